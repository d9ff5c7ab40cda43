"""Use the head of a checkpoint whose configuration says that head and embedding are one matrix.

Programs that tune, merge or quantise models write such checkpoints. As in the reference, a head
that differs from the embedding is used, and a copy of the embedding is not read. Does not know
about file formats or families. Guarantees: the choice is made before anything is compiled, and the
tensors are read in pieces, up to the first difference.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .tensor_source import TensorSource

if TYPE_CHECKING:
    from ...modelzoo.families.family import ModelSpec

PIECE_BYTES = 16 * 2**20
_MATRIX_AXES = 2


def with_own_head(spec: "ModelSpec", tensors: TensorSource) -> "ModelSpec":
    """A model that ties its head, with the head of its checkpoint if the embedding differs."""
    head, embedding = spec.head_tensor, spec.embedding_tensor
    if not {head, embedding} <= tensors.tensors.keys() or _are_equal(tensors, head, embedding):
        return spec
    key = f"tie_word_embeddings = True ({head} differs from the embedding, and is used)"
    return replace(spec.untied(), ignored_keys=(*spec.ignored_keys, key))


def _are_equal(tensors: TensorSource, name: str, other: str) -> bool:
    shape = tensors.tensors[name].shape
    if shape != tensors.tensors[other].shape or len(shape) != _MATRIX_AXES:
        return False
    num_rows, num_columns = shape
    step = max(PIECE_BYTES // (4 * num_columns), 1)
    for start in range(0, num_rows, step):
        box = slice(start, min(start + step, num_rows)), slice(0, num_columns)
        first, second = (tensors.read(each, box).astype(np.float32) for each in (name, other))
        if not np.array_equal(first, second):
            return False
    return True
