"""Turn parameters back into the tensors of their published form: the inverse of `loader`.

Does not know about file formats. Guarantees: the loader reads the tensors as the same parameters.
"""

from collections.abc import Mapping

import numpy as np

from ...modelzoo.families.mapping import ParameterSource
from ..errors import UserError
from .axis_pattern import AxisPattern


def publish(
    source: ParameterSource, parameter: np.ndarray, *, is_scales: bool = False
) -> Mapping[str, np.ndarray]:
    """The published tensors of a whole parameter without padding, by name.

    Args:
      source: The source of the parameter.
      parameter: The parameter in the canonical arrangement, or its codes or scales.
      is_scales: Whether the array has groups in place of input features, as scales have.

    Raises:
      ValueError: The rows of several parts alternate in a tensor.
    """
    axis, start = source.concat_axis, 0
    by_rows: dict[str, list[tuple[int, np.ndarray]]] = {}
    for part in source.parts:
        if part.block is not None:
            raise UserError(
                f"{part.tensor}: expected a tensor with parts one after the other, got one with "
                f"alternating rows of several parts, which cannot be written"
            )
        pattern = AxisPattern.of(part)
        if is_scales:
            pattern = pattern.join_last()
        size = parameter.shape[axis] if parameter.ndim else 0
        if len(source.parts) > 1:
            # parts differ only in names whose sizes are given
            given = dict(pattern.sizes)
            size = int(np.prod([given.get(name, 1) for name in pattern.target[axis]]))
        index = (slice(None),) * axis + (slice(start, start + size),)
        tensor = pattern.invert(parameter[index] if parameter.ndim else parameter)
        start += size
        members = tensor if part.stacked else [tensor]
        for name, member in zip(part.tensors, members, strict=True):
            by_rows.setdefault(name, []).append((part.rows[0] if part.rows else 0, member))
    return {
        name: parts[0][1]
        if len(parts) == 1
        else np.concatenate([member for _, member in sorted(parts, key=lambda x: x[0])])
        for name, parts in by_rows.items()
    }
