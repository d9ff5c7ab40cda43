"""Kernels of products and moves for the CPU against plain numpy: drawn shapes, guarded buffers."""

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_kernels import NEEDS_NUMBA, loaded
from guarded_frame import call, guarded
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.compile.programs.hlo_text import read_program
from noria.compile.programs.products import product_flops
from noria.modelzoo.cpu import CODE_PRODUCT, PRODUCTS, PUT_LINES, TAKE_PAIRS, objects, product_name
from noria.modelzoo.cpu.moves import put_lines
from noria.modelzoo.cpu.objects import panel_columns
from noria.modelzoo.cpu.processor import Processor
from noria.modelzoo.operations import ON_ONE_DEVICE
from noria.modelzoo.weights.packed_products import Rows, multiply_panels
from noria.modelzoo.weights.packed_weight import PackedWeight, pack
from noria.modelzoo.weights.product import Product, einsum, gate_up_product
from noria.modelzoo.weights.quantised_weight import QuantisedWeight, multiply_codes, take_rows
from noria.modelzoo.weights.weight_formats import Quantisation, WeightFormat

pytestmark = list(NEEDS_NUMBA)
BFLOAT16 = jnp.dtype("bfloat16")
ERROR = {"float32": 2e-6, "bfloat16": 8e-3, "int32": 0}
"""The largest error of a result, as a part of the sum of the products' absolute values."""


@pytest.fixture(autouse=True)
def _kernels():
    with loaded():
        yield


def handler(name: str) -> int:
    (engine,) = objects._engines
    return engine.get_function_address(name)


def run_guarded(name: str, arguments: list, results: list, *, at_end: bool) -> list[np.ndarray]:
    """Call a kernel with buffers between pages that nobody may touch; arguments must not change."""
    given_buffers = [guarded(x, at_end=at_end) for x in arguments]
    made = [guarded(x, at_end=at_end) for x in results]
    failed = call(handler(name), [x.array for x in given_buffers], [x.array for x in made])
    assert failed is None
    for before, after in zip(arguments, given_buffers, strict=True):
        assert before.tobytes() == after.array.tobytes()
    return [x.array.copy() for x in made]


def packed(weight: np.ndarray) -> np.ndarray:
    columns = panel_columns()
    assert columns is not None
    return np.asarray(pack(jnp.asarray(weight), (-2,), columns))


HAS_CODES = find_spec("llvmlite") is not None and Processor.here().has_code_products
SERVED = [dtypes for dtypes in PRODUCTS if dtypes != CODE_PRODUCT or HAS_CODES]
"""The kernels of products that this processor has."""
FLOAT_PRODUCTS = [dtypes for dtypes in PRODUCTS if dtypes != CODE_PRODUCT]


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "int8":
        return rng.integers(-128, 128, shape, np.int8)
    return rng.standard_normal(shape).astype(jnp.dtype(dtype))


def rows_of(is_used) -> np.ndarray:
    return np.asarray(Rows.of(jnp.asarray(is_used)).order)


def all_rows(x: np.ndarray) -> np.ndarray:
    return rows_of(np.ones(len(x), bool))


@st.composite
def products(draw: st.DrawFn):
    M, G = draw(st.integers(1, 200)), draw(st.integers(1, 2))
    dtype, out = draw(st.sampled_from(SERVED))
    units, multiple = (4, 16) if dtype == "int8" else (2, 1)
    K, N = (
        units * draw(st.integers(1, 300 // units)),
        multiple * draw(st.integers(1, 200 // multiple)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    x, w = (random(rng, shape, dtype) for shape in ((M, K), (G, K, N)))
    is_used = rng.random(M) < draw(st.sampled_from([0, 0.1, 0.8, 1]))
    return x, w, is_used, out


@settings(max_examples=80, deadline=None)
@given(products(), st.booleans())
def test_a_product_equals_the_reference_and_touches_its_buffers_alone(drawn, at_end):
    x, w, is_used, out = drawn
    arguments = [x, packed(w), rows_of(is_used)]
    result = np.full((w.shape[0], len(x), w.shape[2]), 9, jnp.dtype(out))
    name = product_name(x.dtype.name, out)
    (found,) = run_guarded(name, arguments, [result], at_end=at_end)
    x, w = x.astype(np.float64), w.astype(np.float64)
    wanted, largest = np.einsum("mk,gkn->gmn", x, w), np.einsum("mk,gkn->gmn", abs(x), abs(w))
    found = found.astype(np.float64)
    assert (abs(found - wanted) <= ERROR[out] * largest + 1e-30)[:, is_used].all()
    assert not found[:, ~is_used].any()


@pytest.mark.parametrize(("dtype", "out"), SERVED)
def test_a_row_of_a_product_has_its_own_bits(dtype, out):
    rng = np.random.default_rng(0)
    x, w = random(rng, (120, 96), dtype), packed(random(rng, (1, 96, 208), dtype))

    def rows(x, is_used=None):
        given = [x, w, all_rows(x) if is_used is None else rows_of(is_used)]
        result = np.zeros((1, len(x), 208), jnp.dtype(out))
        assert call(handler(product_name(dtype, out)), given, [result]) is None
        return result[0].astype(np.float32)

    whole = rows(x)
    np.testing.assert_array_equal(rows(x[::-1].copy())[::-1], whole)
    for first, last in ((0, 1), (7, 10), (50, 55), (100, 120)):
        np.testing.assert_array_equal(rows(x[first:last].copy()), whole[first:last])
    for share in (0.1, 0.5, 0.9):
        is_used = rng.random(len(x)) < share
        np.testing.assert_array_equal(rows(x, is_used), np.where(is_used[:, None], whole, 0))


@pytest.mark.parametrize(("dtype", "out"), FLOAT_PRODUCTS)
def test_a_number_that_is_not_finite_stays_in_its_row(dtype, out):
    x, w = np.ones((3, 4), jnp.dtype(dtype)), np.ones((1, 4, 70), jnp.dtype(dtype))
    for number in (np.nan, np.inf):
        x[1, 2], result = number, np.zeros((1, 3, 70), jnp.dtype(out))
        given = [x, packed(w), all_rows(x)]
        assert call(handler(product_name(dtype, out)), given, [result]) is None
        is_finite = np.isfinite(result[0].astype(np.float32)).all(axis=1)
        assert is_finite.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("x", "w", "result", "message"),
    [
        ((3, 4), (1, 6, 8), (1, 3, 8), "sizes or rows of its arguments"),
        ((3, 4), (1, 4, 8), (1, 3, 9), "sizes or rows of its arguments"),
        ((3, 4), (1, 4, 8), (2, 3, 8), "sizes or rows of its arguments"),
        ((3, 4), (1, 4, 8), (1, 2, 8), "sizes or rows of its arguments"),
        ((3, 5), (1, 5, 8), (1, 3, 8), "sizes or rows of its arguments"),
        ((3, 4), (4, 8), (1, 3, 8), "expected arguments bfloat16 of rank 2, bfloat16 of rank 3"),
    ],
)
def test_arguments_of_a_product_that_do_not_fit_are_an_error(x, w, result, message):
    arguments = [np.ones(shape, BFLOAT16) for shape in (x, w)]
    arguments.append(all_rows(arguments[0]))
    failed = call(handler(product_name(*PRODUCTS[1])), arguments, [np.zeros(result, np.float32)])
    assert failed is not None and message in failed


@pytest.mark.parametrize(
    "rows", [[3, 0, 1], [4, 0, 1, 2], [-1, 0, 1, 2], [2, 0, 3, 1], [2, 0, -1, 1]]
)
def test_rows_that_activations_do_not_have_are_an_error(rows):
    arguments = [np.ones(shape, np.float32) for shape in ((3, 4), (1, 4, 8))]
    arguments.append(np.array(rows, np.int32))
    name, result = product_name("float32", "float32"), np.zeros((1, 3, 8), np.float32)
    failed = call(handler(name), arguments, [result])
    assert failed is not None and "sizes or rows of its arguments" in failed


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.booleans())
def test_pairs_are_taken_and_lines_are_put_where_they_belong(seed, at_end):
    rng = np.random.default_rng(seed)
    V, D, M, W = rng.integers(1, 40), 2 * rng.integers(1, 20), rng.integers(1, 70), 5
    table = rng.standard_normal((V, D)).astype(BFLOAT16)
    place = rng.integers(0, V * D // 2, (M, W)).astype(np.int32)
    result = np.zeros((M, 2 * W), BFLOAT16)
    (taken,) = run_guarded(TAKE_PAIRS, [table, place], [result], at_end=at_end)
    np.testing.assert_array_equal(taken, table.reshape(-1, 2)[place].reshape(M, 2 * W))
    # a place outside is an error of the caller, and nothing outside is read
    run_guarded(TAKE_PAIRS, [table, place * 0 + 10**6], [result], at_end=at_end)

    pool = rng.standard_normal((1, V, 2, 3, D)).astype(BFLOAT16)
    lines = rng.standard_normal((min(M, 6 * V), D)).astype(BFLOAT16)
    to = rng.permutation(6 * V)[: len(lines)].astype(np.int32)
    to[0] = rng.choice([-1, 6 * V, 10**9])
    buffers = [guarded(x, at_end=at_end) for x in (pool, lines, to)]
    arrays = [x.array for x in buffers]
    assert call(handler(PUT_LINES), arrays, arrays[:1]) is None
    wanted = pool.reshape(-1, D).copy()
    wanted[to[1:]] = lines[1:]
    np.testing.assert_array_equal(arrays[0], wanted.reshape(pool.shape))


def test_lines_are_put_in_place_or_not_at_all():
    pool, lines, to = (
        np.zeros((1, 2, 1, 4, 8), BFLOAT16),
        np.ones((1, 8), BFLOAT16),
        np.zeros(1, "i4"),
    )
    failed = call(handler(PUT_LINES), [pool, lines, to], [pool.copy()])
    assert failed is not None and "do not belong together" in failed
    failed = call(handler(PUT_LINES), [pool, np.ones((1, 7), BFLOAT16), to], [pool])
    assert failed is not None and "do not belong together" in failed


def test_a_loop_puts_lines_without_a_copy_of_the_array():
    pool = jnp.zeros((1, 64, 2, 16, 32), BFLOAT16)

    def body(index, pool):
        return put_lines(pool, jnp.ones((1, 32), BFLOAT16), index[None], lambda: pool)

    loop = jax.jit(lambda pool: jax.lax.fori_loop(0, 5, body, pool), donate_argnums=0)
    text = loop.lower(pool).compile().as_text()
    assert "f32[1,64,2,16,32]" not in text.replace("bf16[", "")
    moved = [line for line in text.splitlines() if "= bf16[1,64,2,16,32]" in line]
    assert any("noria_put_lines" in line for line in moved)
    assert not [line for line in moved if " copy(" in line or " fusion(" in line]
    assert loop(pool).astype(jnp.float32).sum() == 5 * 32


CASES = {
    "queries": (einsum("BTD,DKJH->BTKJH"), (3, 5, 32), (32, 2, 3, 16), (-4,)),
    "heads": (einsum("BTKGH,KGHD->BTD"), (3, 5, 2, 3, 16), (2, 3, 16, 40), (-4, -3, -2)),
    "gate and up": (Product("BTD,PDF->PBTF", gate_up_product), (3, 5, 32), (2, 32, 72), (-2,)),
    "logits": (einsum("BD,VD->BV", "...D,VD->...V"), (3, 32), (100, 32), (-1,)),
    "more leading axes": (einsum("BD,VD->BV", "...D,VD->...V"), (3, 5, 32), (100, 32), (-1,)),
    "not one matrix": (einsum("BTNH,NHI->BTNI"), (3, 5, 2, 16), (2, 16, 32), (-1,)),
}
"""A product, the shapes of activations and weight, and the inputs of the weight."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in CASES),
        *((name, "bfloat16") for name in CASES if name != "not one matrix"),
    ],
)
def test_a_product_with_panels_equals_that_with_the_weight(name, dtype):
    product, of_x, of_weight, inputs = CASES[name]
    keys = jax.random.split(jax.random.key(0), 2)
    x, weight = (
        jax.random.normal(key, s, dtype) for key, s in zip(keys, (of_x, of_weight), strict=True)
    )
    in_panels = PackedWeight(pack(weight, inputs, panel_columns()), inputs, panel_columns())
    multiply = jax.jit(multiply_panels, static_argnums=(0, 3))
    found = multiply(product, x, in_panels, jnp.dtype("float32"))
    np.testing.assert_allclose(found, product(x, weight), atol=2e-5, rtol=1e-5)
    lowered = multiply.lower(product, x, in_panels, jnp.dtype("float32"))
    is_kernel = name != "not one matrix"
    assert (product_name(dtype, "float32") in lowered.as_text()) == is_kernel
    if is_kernel:
        program = read_program(lowered.compile().as_text())
        entry = program.computations[program.entry]
        counted = sum(product_flops(program, entry, one) for one in entry.instructions.values())
        rows = x.size // np.prod([of_weight[axis] for axis in inputs])
        assert counted == 2 * weight.size * rows


@pytest.mark.skipif(not HAS_CODES, reason="this processor has no products of codes")
def test_codes_in_panels_are_multiplied_exactly():
    product, keys = einsum("BTD,DF->BTF"), jax.random.split(jax.random.key(0), 2)
    x, weight = jax.random.normal(keys[0], (3, 5, 64)), jax.random.normal(keys[1], (64, 80))
    scale = jnp.abs(weight).max(axis=0, keepdims=True) / 127
    codes = jnp.rint(weight / scale).astype(jnp.int8)
    quantisation = Quantisation(WeightFormat("int8"), (-2,), rounds_activations=True)
    plain = QuantisedWeight(codes, scale, quantisation)
    in_panels = replace(
        plain, codes=PackedWeight(pack(codes, (-2,), panel_columns()), (-2,), panel_columns())
    )
    multiply = jax.jit(multiply_codes, static_argnums=0)
    np.testing.assert_array_equal(multiply(product, x, in_panels), multiply(product, x, plain))
    assert product_name(*CODE_PRODUCT) in multiply.lower(product, x, in_panels).as_text()
    table, of_rows = codes.T, replace(quantisation, inputs=(-1,))
    plain = QuantisedWeight(table, scale.T, of_rows)
    in_panels = replace(
        plain, codes=PackedWeight(pack(table, (-1,), panel_columns()), (-1,), panel_columns())
    )
    ids = jnp.array([[3, 0], [79, 200]])
    np.testing.assert_array_equal(take_rows(in_panels, ids), take_rows(plain, ids))


def test_rows_without_tokens_are_not_computed():
    product, weight = einsum("BTD,DF->BTF"), jnp.ones((32, 40))
    in_panels = PackedWeight(pack(weight, (-2,), panel_columns()), (-2,), panel_columns())
    is_token = jnp.arange(5)[None] < jnp.array([[2], [5], [0]])
    operations = ON_ONE_DEVICE.for_tokens(is_token)
    found = operations.project(product, jnp.ones((3, 5, 32)), in_panels)
    wanted = np.where(np.asarray(is_token)[..., None], 32.0, 0.0)
    np.testing.assert_array_equal(found, np.broadcast_to(wanted, (3, 5, 40)))
    # other rows are not those of tokens
    found = operations.project(product, jnp.ones((3, 1, 32)), in_panels)
    np.testing.assert_array_equal(found, jnp.full((3, 1, 40), 32.0))


def test_the_forms_for_other_processors_are_right():
    """Vectors of eight numbers, and pairs that are widened, for a processor with AVX2 alone."""
    program = """
import jax, jax.numpy as jnp, numpy as np
from noria.modelzoo.cpu import CODE_PRODUCT, PRODUCTS, objects, product_name
from noria.modelzoo.weights.packed_weight import pack
objects.Processor.here = classmethod(lambda cls: cls("haswell", "+avx2,+fma"))
objects.register(objects.compile_all(objects.Processor.here()))
assert objects.panel_columns() == 16 and objects.code_lanes() is None
rng = np.random.default_rng(0)
for dtype, out in set(PRODUCTS) - {CODE_PRODUCT}:
    x, w = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((37, 50), (1, 50, 77)))
    shape, rows = jax.ShapeDtypeStruct((1, 37, 77), out), np.arange(-1, 37, dtype=np.int32)
    rows[0] = 37
    found = jax.ffi.ffi_call(product_name(dtype, out), shape)(x, pack(w, (-2,), 16), rows)
    x, w = (np.asarray(a, np.float64) for a in (x, w[0]))
    error = abs(np.asarray(found[0], np.float64) - x @ w) / (abs(x) @ abs(w))
    assert error.max() < (8e-3 if out == "bfloat16" else 1e-6), (dtype, out, error.max())
print("right")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr
