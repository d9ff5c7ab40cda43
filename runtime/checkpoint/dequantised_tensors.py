"""Read quantised tensors of a checkpoint as float32 tensors under their plain names.

A reader gets one float32 tensor for codes and scales: `down_proj` for the published tensors
`down_proj_blocks` and `down_proj_scales`. All other tensors are unchanged. Does not know about
parameters, families or file formats. Guarantees: all codes have scales, all scales have codes, and
their types and shapes match, or an error lists all differences before anything is read; a box is
read from its own codes and the scales of their blocks.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from ...modelzoo.families.quantisation import Quantisation
from ..console import plural
from ..errors import InvalidQuantisation
from .block_formats import BlockFormat, format_of
from .tensor_source import Index, TensorInfo, TensorSource, intervals

MAX_LISTED = 20


def dequantise(stored: TensorSource, quantisation: Quantisation | None) -> TensorSource:
    """Wrap a source of stored tensors so that all tensors read as numbers.

    `quantisation` is None if no tensor is quantised; then the source is returned unchanged.
    """
    if quantisation is None:
        return stored
    return DequantisedTensors(stored, format_of(quantisation))


class DequantisedTensors:
    """A tensor source that joins the codes and scales of another tensor source."""

    def __init__(self, stored: TensorSource, form: BlockFormat):
        self._stored, self._form = stored, form
        names = sorted(set(_quantised_names(stored.tensors, form)))
        if problems := [p for name in names for p in _problems(name, stored.tensors, form)]:
            more = (
                f"\n  and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
            )
            listed = "".join(f"\n  {problem}" for problem in problems[:MAX_LISTED])
            raise InvalidQuantisation(
                f"Expected quantised tensors ({form.name}) with matching scales, "
                f"got {plural(len(problems), 'difference')}:{listed}{more}\n"
                f"Use the quantization_config of this model, and fetch incomplete files again."
            )
        self._quantised = {name: _joined(name, stored.tensors, form) for name in names}
        used = {
            name + suffix for name in names for suffix in (form.codes.suffix, form.scales.suffix)
        }
        plain = {name: info for name, info in stored.tensors.items() if name not in used}
        self._tensors = plain | self._quantised

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Read a tensor or a box of it; a quantised tensor is read as float32."""
        if name not in self._quantised:
            return self._stored.read(name, index)
        shape, form = self._tensors[name].shape, self._form
        box = intervals(index or (slice(None),) * len(shape), shape)
        codes_box, scales_box = form.boxes_to_read(box)
        codes = self._stored.read(name + form.codes.suffix, codes_box)
        scales = self._stored.read(name + form.scales.suffix, scales_box)
        return form.values(codes, scales, box)

    def close(self) -> None:
        self._stored.close()


def _quantised_names(tensors: Mapping[str, TensorInfo], form: BlockFormat) -> Iterator[str]:
    """The plain names of tensors with codes or scales; a name may occur twice."""
    for name, info in tensors.items():
        if name.endswith(form.codes.suffix) and info.stored_as in form.codes.types:
            yield name.removesuffix(form.codes.suffix)
        if name.endswith(form.scales.suffix):
            yield name.removesuffix(form.scales.suffix)


def _problems(name: str, tensors: Mapping[str, TensorInfo], form: BlockFormat) -> Iterator[str]:
    """The reasons why the codes and scales of one tensor cannot be read."""
    infos = []
    for kind, role in (("codes", form.codes), ("scales", form.scales)):
        info = tensors.get(name + role.suffix)
        if info is None:
            yield f"{name}: expected {kind} {name + role.suffix!r}, got no such tensor"
        elif info.stored_as not in role.types:
            expected = " or ".join(role.types)
            yield f"{name + role.suffix}: expected {kind} in {expected}, got {info.stored_as}"
        else:
            infos.append(info)
    if form.codes.suffix and name in tensors:
        yield f"{name}: expected either codes and scales or a plain tensor, got both"
    if len(infos) < 2:
        return
    codes, scales = infos
    try:
        expected = form.scales_shape(codes.shape)
    except ValueError as error:
        yield f"{name + form.codes.suffix}: {error}"
        return
    if scales.shape != expected:
        yield (
            f"{name + form.scales.suffix}: expected shape {expected} for codes of {codes.shape}, "
            f"got {scales.shape}"
        )


def _joined(name: str, tensors: Mapping[str, TensorInfo], form: BlockFormat) -> TensorInfo:
    codes, scales = (tensors[name + role.suffix] for role in (form.codes, form.scales))
    shape, axis_order = form.numbers_shape(codes.shape)
    num_bytes = codes.num_bytes + scales.num_bytes
    return TensorInfo(shape, np.dtype(np.float32), form.name, num_bytes, axis_order)
