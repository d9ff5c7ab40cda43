"""Runs each kernel for the CPU against its reference, on small random arrays.

Guarantees: uses the kernels as graphs do, and reads no model.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ...modelzoo.attention.attend import Visibility, attend_dense
from ...modelzoo.attention.paged import PagedRows
from ...modelzoo.cache.entry_codes import EntryCodes, encode, in_blocks
from ...modelzoo.cpu import (
    CODE_PRODUCT,
    ENTRIES,
    PRODUCTS,
    PUT_LINES,
    TAKE_PAIRS,
    attend_name,
    product_name,
)
from ...modelzoo.cpu.moves import put_lines, take_units
from ...modelzoo.cpu.objects import code_lanes, panel_columns
from ...modelzoo.kernels.cpu_attention import attend_pages_cpu, attend_prompts_cpu
from ...modelzoo.weights.packed_products import multiply_panels
from ...modelzoo.weights.packed_weight import PackedWeight, pack
from ...modelzoo.weights.product import einsum

LARGEST_ERROR = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 1e-5, "int32": 0}
"""The largest error of a result in a dtype, as a part of its largest number."""


def wrong_kernels() -> dict[str, float]:
    """The error of each kernel that is too large, by the kernel's name. The kernels are loaded."""
    wrong = {}
    for name, dtype, found, wanted in _results():
        wanted = np.asarray(wanted, np.float64)
        error = float(abs(np.asarray(found, np.float64) - wanted).max() / abs(wanted).max())
        if not error <= LARGEST_ERROR[dtype]:  # NaN is wrong
            wrong[name] = error
    return wrong


def _results() -> Iterator[tuple[str, str, jax.Array, jax.Array]]:
    """The name of each kernel, the dtype of its precision, its result and the reference's."""
    keys = iter(jax.random.split(jax.random.key(0), 32))
    with jax.default_device(jax.devices("cpu")[0]):
        columns = panel_columns()
        assert columns is not None, "the kernels are loaded"
        product = einsum("BD,VD->BV")
        for dtype, out in PRODUCTS:
            if (dtype, out) == CODE_PRODUCT and code_lanes() is None:
                continue  # this processor lacks the kernel
            x_BD, table_VD = (_random(next(keys), (n, 64), dtype) for n in (7, 112))
            packed = PackedWeight(pack(table_VD, (-1,), columns), (-1,), columns)
            found = multiply_panels(product, x_BD, packed, jnp.dtype(out))
            exact = jnp.int32 if out == "int32" else jnp.float32
            wanted = product(x_BD.astype(exact), table_VD.astype(exact))
            yield product_name(dtype, out), out, found, wanted
        position_BT = jnp.arange(48)[None]
        visibility = Visibility(position_BT, position_BT, None, is_in_order=True)
        for dtype in ENTRIES:
            shapes = (1, 48, 2, 3, 32), (1, 2, 32, 48), (1, 2, 48, 32)
            given = dtype if dtype != "int8" else "float32"
            q, k, v = (jax.random.normal(next(keys), shape, given) for shape in shapes)
            if dtype == "int8":
                found, k, v = _attend_codes(q, k, v)
            else:
                found = attend_prompts_cpu(q, k, v, visibility)[0]
            q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
            wanted = attend_dense(q, k, v, visibility)[0]
            yield attend_name(dtype), dtype, found, wanted
        pool, lines = (
            jax.random.normal(next(keys), shape, jnp.bfloat16)
            for shape in ((1, 2, 2, 16, 8), (5, 8))
        )
        place = jnp.array([3, 0, 63, 17, 40])
        wanted = pool.reshape(-1, 8).at[place].set(lines).reshape(pool.shape)
        put = put_lines(pool, lines, place, lambda: pool)
        yield PUT_LINES, "float32", put, wanted
        taken = take_units(lines, place[None] % 20, 2)
        yield TAKE_PAIRS, "float32", taken, lines.reshape(-1, 2)[place % 20].reshape(1, -1)


def _random(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Random numbers, or random codes."""
    if dtype == "int8":
        return jax.random.randint(key, shape, -127, 128, dtype)
    return jax.random.normal(key, shape, dtype)


def _attend_codes(
    q_BTKGH: jax.Array, k_BKHS: jax.Array, v_BKSH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attend to keys and values in codes, each row's in a page; also the numbers that they hold."""
    coded, numbers = [], []
    for x_BKSH in (k_BKHS.swapaxes(2, 3), v_BKSH):
        codes, (scale_BKS,) = encode(x_BKSH, "int8", x_BKSH.dtype, (), x_BKSH.shape[-1])
        coded.append(EntryCodes(in_blocks(codes, codes.shape[-1]), scale_BKS[:, :, None]))
        numbers.append(codes * scale_BKS[..., None])
    B, T = q_BTKGH.shape[:2]
    rows = PagedRows(jnp.arange(B)[:, None], jnp.zeros(B, jnp.int32), jnp.full(B, T))
    keys, values = coded
    found = attend_pages_cpu(q_BTKGH, keys, values, rows)[0]
    return found, numbers[0].swapaxes(2, 3), numbers[1]
