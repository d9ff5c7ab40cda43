"""Check that the tensors of a checkpoint and the parameters of a model cover each other.

Reads nothing. Does not know about file formats, numbers or devices.
"""

import math
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from ...modelzoo.families.mapping import ParameterSource
from ..console import listed
from ..errors import CheckpointMismatch
from .axis_pattern import AxisPattern
from .tensor_source import TensorSource, source_of

if TYPE_CHECKING:
    import jax

    from ...modelzoo.families.family import ModelSpec


def check_coverage(
    spec: "ModelSpec", tensors: TensorSource, abstract: "Mapping[str, jax.ShapeDtypeStruct]"
) -> None:
    """Check that tensors and parameters cover each other.

    Raises:
      CheckpointMismatch: They do not; the message lists up to `MAX_LISTED` differences of each
        kind.
    """
    published = tensors.tensors
    uses = [name for source in spec.sources for part in source.parts for name in part.tensors]
    filled = [source.parameter for source in spec.sources]
    groups = {
        "tensors missing from the checkpoint": sorted(set(uses) - published.keys()),
        "tensors that no parameter uses": sorted(
            name
            for name in published.keys() - set(uses) - set(spec.ignored_tensors)
            if not name.startswith(spec.ignored_prefixes)
        ),
        "tensors that are used more than once": sorted(
            tensor
            for tensor, rows in _rows_by_tensor(spec).items()
            if any(end > start for (_, end), (start, _) in pairwise(rows))
        ),
        "tensors with rows that no parameter uses": _left_over_rows(spec, tensors),
        "parameters that no tensor fills": sorted(abstract.keys() - set(filled)),
        "filled parameters that the model does not have": sorted(set(filled) - abstract.keys()),
        "parameters that are filled more than once": sorted(
            name for name, count in Counter(filled).items() if count > 1
        ),
        "wrong shape or type": [
            problem
            for source in spec.sources
            if source.parameter in abstract
            for problem in _shape_problems(source, tensors, tuple(abstract[source.parameter].shape))
        ],
    }
    lines = []
    for title, differences in groups.items():
        if differences:
            lines.append(f"\n  {title} ({len(differences)}):{listed(differences, '    ')}")
    if lines:
        raise CheckpointMismatch(
            f"Expected checkpoint and model ({spec.family}) to cover each other, got these "
            f"differences:{''.join(lines)}\n"
            f"Use the configuration that was published with these weights. If this is the one, "
            f"noria does not support this kind of the family."
        )


def _rows_by_tensor(spec: "ModelSpec") -> dict[str, list[tuple[int, float]]]:
    """The rows of each tensor, or of each of its blocks, that parts use; (0, inf) means all."""
    used: dict[str, list[tuple[int, float]]] = {}
    for source in spec.sources:
        for part in source.parts:
            for name in part.tensors:
                used.setdefault(name, []).append(part.rows or (0, math.inf))
    return {tensor: sorted(rows) for tensor, rows in used.items()}


def _left_over_rows(spec: "ModelSpec", tensors: TensorSource) -> list[str]:
    blocks = {part.tensor: part.block for source in spec.sources for part in source.parts}
    left_over = []
    for tensor, rows in _rows_by_tensor(spec).items():
        if rows[-1][1] == math.inf or tensor not in tensors.tensors:
            continue
        shape = tensors.tensors[tensor].shape
        used = sum(end - start for start, end in rows)
        if shape and used < (in_block := blocks[tensor] or shape[0]):
            left_over.append(f"{tensor}: expected {used} rows, got {in_block}")
    return sorted(left_over)


def _shape_problems(
    source: ParameterSource, tensors: TensorSource, expected: tuple[int, ...]
) -> list[str]:
    """The problems with the parts of one parameter; missing tensors are reported elsewhere."""
    problems, shapes = [], []
    for part in source.parts:
        if not all(name in tensors.tensors for name in part.tensors):
            return problems
        infos = [tensors.tensors[name] for name in part.tensors]
        problems += [
            f"{name}: expected floating numbers, got {info.stored_as}"
            for name, info in zip(part.tensors, infos, strict=True)
            # ml_dtypes' types (bfloat16) are of numpy's kind V
            if info.dtype.kind != "f" and info.dtype.name != "bfloat16"
        ]
        try:
            shape = source_of(part, tensors).tensors[part.tensor].shape
            shapes.append(AxisPattern.of(part).parameter_shape(shape))
        except ValueError as error:
            problems.append(
                f"{part.tensor} -> {source.parameter}: shape {infos[0].shape}, {part.axes!r}: "
                f"{error}"
            )
    if problems:
        return problems
    got = _filled_shape(source, shapes)
    if got != expected:
        described = ", ".join(
            f"{p.tensor} {source_of(p, tensors).tensors[p.tensor].shape}" for p in source.parts
        )
        padding = f" and {source.padding_rows} rows of zeros" if source.padding_rows else ""
        problems.append(
            f"{source.parameter}: expected {expected}, got {got} from {described}{padding}"
        )
    return problems


def filled_shape(source: ParameterSource, tensors: TensorSource) -> tuple[int, ...]:
    """The shape of the parameter that a source fills from tensors that fit it."""
    shapes = [
        AxisPattern.of(part).parameter_shape(source_of(part, tensors).tensors[part.tensor].shape)
        for part in source.parts
    ]
    shape = _filled_shape(source, shapes)
    assert isinstance(shape, tuple), f"{source.parameter}: the parts have shapes {shapes}"
    return shape


def _filled_shape(source: ParameterSource, shapes: list[tuple[int, ...]]) -> object:
    """The shape of a parameter from the shapes of its parts; the list of shapes if they differ."""
    axis, shape = source.concat_axis, shapes[0]
    if len(shapes) > 1:
        others = {(shape[:axis], shape[axis + 1 :]) for shape in shapes}
        if len(others) != 1 or any(len(shape) <= axis for shape in shapes):
            return shapes
        shape = (*shape[:axis], sum(shape[axis] for shape in shapes), *shape[axis + 1 :])
    if source.padding_rows and shape:
        return (shape[0] + source.padding_rows, *shape[1:])
    return shape
