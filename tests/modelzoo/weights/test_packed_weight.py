"""The order of weights in panels, against plain loops."""

import jax.numpy as jnp
import numpy as np
import pytest

from noria.modelzoo.weights.packed_weight import PackedWeight, can_pack, pack

SHAPES = {
    "matrix": ((6, 11), (-2,)),
    "several output axes": ((6, 3, 4), (-3,)),
    "several input axes": ((2, 3, 11), (-3, -2)),
    "groups": ((2, 6, 11), (-2,)),
    "transposed": ((11, 6), (-1,)),
    "whole panels": ((6, 8), (-2,)),
    "less than a panel": ((6, 3), (-2,)),
}
COLUMNS = 4


def in_panels(weight: np.ndarray, inputs: tuple[int, ...]) -> np.ndarray:
    """The numbers of a weight, one after another, as the description of panels has them."""
    together = 4 // weight.itemsize
    num_inputs = int(np.prod([weight.shape[axis] for axis in inputs]))
    if inputs[-1] == -1:
        matrices = weight.reshape(1, -1, num_inputs).swapaxes(1, 2)
    else:
        matrices = weight.reshape(*weight.shape[: inputs[0]], num_inputs, -1)
        matrices = matrices.reshape(-1, *matrices.shape[-2:])
    numbers = []
    for matrix in matrices:
        for first in range(0, matrix.shape[1], COLUMNS):
            panel = matrix[:, first : first + COLUMNS]
            for k in range(0, num_inputs, together):
                numbers += [panel[k + p, c] for c in range(panel.shape[1]) for p in range(together)]
    return np.array(numbers, weight.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_weight_is_packed_as_described_and_back(name, dtype):
    shape, inputs = SHAPES[name]
    weight = np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(dtype))
    packed = pack(jnp.asarray(weight), inputs, COLUMNS)
    assert packed.shape == shape
    np.testing.assert_array_equal(np.asarray(packed).reshape(-1), in_panels(weight, inputs))
    np.testing.assert_array_equal(PackedWeight(packed, inputs, COLUMNS).plain(), weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_table_are_taken_and_ids_outside_are_clipped(dtype):
    table = jnp.arange(11 * 6).reshape(11, 6).astype(dtype)
    packed = PackedWeight(pack(table, (-1,), COLUMNS), (-1,), COLUMNS)
    ids = jnp.array([[0, 3, 4], [9, 10, 99]])
    np.testing.assert_array_equal(packed.take(ids), table[jnp.minimum(ids, 10)])


def test_the_inputs_of_a_packed_weight_fill_pairs():
    assert can_pack((6, 5), (-2,)) and can_pack((5, 6), (-1,))
    assert not can_pack((5, 6), (-2,))
    assert not can_pack((2**16, 2**15), (-2,))
