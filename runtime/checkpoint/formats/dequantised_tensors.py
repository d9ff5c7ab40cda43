"""Read quantised tensors of a checkpoint as float32 tensors under their plain names.

A reader gets one float32 tensor for the stored arrays of a tensor: `down_proj` for the published
tensors `down_proj_blocks` and `down_proj_scales`. All other tensors are unchanged. Does not know
about parameters, families or file formats. Guarantees: all codes have scales, all scales have
codes, and their types and shapes match, or an error counts the differences and lists up to
`MAX_LISTED` of them before anything is read; a box is read from its own codes and the scales of
their blocks.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from ....modelzoo.families.quantisation import Quantisation
from ...console import listed, plural
from ...errors import InvalidQuantisation
from ..tensor_source import Index, TensorInfo, TensorSource, intervals
from .block_formats import BlockFormat, format_of
from .coded_tensors import CODES, SCALES, ArrayMismatch, CodedTensor, KeptCodes, Part
from .published_formats import PartOfTensors


def dequantise(stored: TensorSource, quantisation: Quantisation | None) -> TensorSource:
    """Wrap a source of stored tensors so that all tensors read as numbers.

    `quantisation` is None if no tensor is quantised; then the source is returned unchanged.
    """
    if quantisation is None:
        return stored
    return DequantisedTensors(stored, format_of(quantisation))


class DequantisedTensors:
    """A tensor source that joins the arrays of quantised tensors of another source."""

    def __init__(self, stored: TensorSource, form: BlockFormat):
        self._stored, self._form = stored, form
        self._coded: dict[str, CodedTensor] = {}
        used, joined, problems = set(), {}, []
        for beginning in sorted(set(_beginnings(stored.tensors, form))):
            arrays, found = _arrays(beginning, stored.tensors, form)
            problems += found
            used |= {beginning + form.suffixes[role].suffix for role in arrays}
            if not found:
                name = beginning + form.plain
                try:
                    self._coded[name] = form.bind(arrays)
                except ArrayMismatch as error:
                    problems.append(f"{beginning}{form.suffixes[error.role].suffix}: {error}")
                else:
                    joined[name] = _joined(self._coded[name], arrays, form)
        _refuse(problems, form)
        plain = {
            name: info
            for name, info in stored.tensors.items()
            if name not in used and not name.endswith(form.unused)
        }
        self.tensors = plain | joined

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Read a tensor or a box of it; a quantised tensor is read as float32."""
        if name not in self._coded:
            return self._stored.read(name, index)
        return self._read_part(name, index, "values")

    @property
    def kept(self) -> Mapping[str, KeptCodes]:
        """The codes of quantised tensors that a plan may keep."""
        return {name: coded.kept for name, coded in self._coded.items()}

    def part(self, part: Part) -> TensorSource:
        """The quantised tensors, each read as a part of its numbers."""
        return PartOfTensors(self.tensors, self.kept, part, self._read_part)

    def _read_part(self, name: str, index: Index | None, part: Part) -> np.ndarray:
        box = intervals(index, self.tensors[name].shape)
        if not all(map(len, box)):
            return np.empty([len(interval) for interval in box], np.float32)
        beginning = name.removesuffix(self._form.plain)

        def fetch(role: str, index: Index | None) -> np.ndarray:
            return self._stored.read(beginning + self._form.suffixes[role].suffix, index)

        try:
            return self._coded[name].read(fetch, box, part)
        except ArrayMismatch as error:
            raise InvalidQuantisation(f"{name}: {error}") from None

    def zero_biases(self) -> tuple[str, ...]:
        """The biases of quantised tensors that are zeros.

        Some programs write a bias beside each quantised tensor, also for models without biases.
        """
        names = (name.removesuffix("weight") + "bias" for name in self._coded)
        present = (name for name in names if name in self.tensors)
        return tuple(name for name in present if not self._stored.read(name).any())


def _beginnings(tensors: Mapping[str, TensorInfo], form: BlockFormat) -> Iterator[str]:
    """The beginnings of the names of quantised tensors; one may occur several times."""
    codes, scales = form.suffixes[CODES], form.suffixes[SCALES]
    # codes under plain names have no suffix of their own
    others = tuple(stored.suffix for stored in form.suffixes.values() if stored.suffix)
    for name, info in tensors.items():
        is_codes = name.endswith(codes.suffix) and info.stored_as in codes.types
        if is_codes and (codes.suffix or not name.endswith(others)):
            yield name.removesuffix(codes.suffix)
        if name.endswith(scales.suffix) and not name.endswith(form.unused):
            yield name.removesuffix(scales.suffix)


def _arrays(
    beginning: str, tensors: Mapping[str, TensorInfo], form: BlockFormat
) -> tuple[dict[str, TensorInfo], list[str]]:
    """The stored arrays of a tensor by role, and the reasons why they cannot be read."""
    arrays, problems = {}, []
    for role, stored in form.suffixes.items():
        name = beginning + stored.suffix
        info = tensors.get(name)
        if info is None:
            if not stored.is_optional:
                plain = beginning + form.plain
                problems.append(f"{plain}: expected {role} {name!r}, got no such tensor")
        elif info.stored_as not in stored.types:
            expected = " or ".join(stored.types)
            problems.append(f"{name}: expected {role} in {expected}, got {info.stored_as}")
        else:
            arrays[role] = info
    plain = beginning + form.plain
    if form.suffixes[CODES].suffix != form.plain and plain in tensors:
        problems.append(f"{plain}: expected either codes and scales or a plain tensor, got both")
    return arrays, problems


def _joined(coded: CodedTensor, arrays: Mapping[str, TensorInfo], form: BlockFormat) -> TensorInfo:
    num_bytes = sum(info.num_bytes for info in arrays.values())
    float32 = np.dtype(np.float32)
    return TensorInfo(coded.shape, float32, form.name, num_bytes, coded.axis_order)


def _refuse(problems: list[str], form: BlockFormat) -> None:
    if not problems:
        return
    raise InvalidQuantisation(
        f"Expected quantised tensors ({form.name}) with matching scales, "
        f"got {plural(len(problems), 'difference')}:{listed(problems, '  ')}\n"
        f"Use the quantization_config that was published with these weights. If this is the one, "
        f"quantise the model again, or take its float weights."
    )
