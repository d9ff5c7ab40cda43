"""Quantised tensors of a checkpoint, presented as numbers under their plain names.

Where a file holds codes and scales, a reader finds one float32 tensor: what was published as
`down_proj_blocks` and `down_proj_scales` is `down_proj`, and all other tensors are as they were.
Knows nothing of parameters, families, or of where the bytes lie. Guarantees: all codes have scales,
all scales have codes, and their types and shapes fit, or everything that does not is listed before
anything is read; a box is read from its own codes and the scales of the blocks that it touches.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from ...modelzoo.families.quantisation import Quantisation
from ..console import plural
from ..errors import InvalidQuantisation
from .block_formats import BlockFormat, format_of
from .tensor_source import Index, TensorInfo, TensorSource, intervals

MAX_LISTED = 20


def dequantised(stored: TensorSource, quantisation: Quantisation | None) -> TensorSource:
    """Present the tensors of a checkpoint as numbers; None means that they are."""
    if quantisation is None:
        return stored
    return DequantisedTensors(stored, format_of(quantisation))


class DequantisedTensors:
    """A tensor source over another, of which it joins codes and scales."""

    def __init__(self, stored: TensorSource, form: BlockFormat):
        self._stored, self._form = stored, form
        names = sorted(set(_quantised_names(stored.tensors, form)))
        if problems := [p for name in names for p in _problems(name, stored.tensors, form)]:
            more = (
                f"\n  and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
            )
            listed = "".join(f"\n  {problem}" for problem in problems[:MAX_LISTED])
            raise InvalidQuantisation(
                f"Expected quantised tensors ({form.name}) and their scales to belong together, "
                f"got {plural(len(problems), 'difference')}:{listed}{more}\n"
                f"Is the quantization_config of another model, or the file incomplete?"
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
        """Read a tensor or a box of it, as float32 where it is quantised."""
        if name not in self._quantised:
            return self._stored.read(name, index)
        shape, form = self._tensors[name].shape, self._form
        box = intervals(index or (slice(None),) * len(shape), shape)
        codes_box, scales_box = form.boxes(box)
        codes = self._stored.read(name + form.codes.suffix, codes_box)
        scales = self._stored.read(name + form.scales.suffix, scales_box)
        return form.values(codes, scales, box)

    def close(self) -> None:
        self._stored.close()


def _quantised_names(tensors: Mapping[str, TensorInfo], form: BlockFormat) -> Iterator[str]:
    """Plain names of which there are codes, or scales."""
    for name, info in tensors.items():
        if name.endswith(form.codes.suffix) and info.stored_as in form.codes.stored_as:
            yield name.removesuffix(form.codes.suffix)
        if name.endswith(form.scales.suffix):
            yield name.removesuffix(form.scales.suffix)


def _problems(name: str, tensors: Mapping[str, TensorInfo], form: BlockFormat) -> Iterator[str]:
    """What keeps the codes and scales of one tensor from being read."""
    infos = []
    for kind, role in (("codes", form.codes), ("scales", form.scales)):
        info = tensors.get(name + role.suffix)
        if info is None:
            yield f"{name}: expected {kind} {name + role.suffix!r}, got no such tensor"
        elif info.stored_as not in role.stored_as:
            expected = " or ".join(role.stored_as)
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
    shape, axis_order = form.presented(codes.shape)
    num_bytes = codes.num_bytes + scales.num_bytes
    return TensorInfo(shape, np.dtype(np.float32), form.name, num_bytes, axis_order)
