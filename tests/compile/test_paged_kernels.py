"""Kernels that read live pages, compiled for absent devices beside writes to the same pool.

A loop writes a token of each row into the pool of a layer, and then attends to its pages, as decode
does. The queries are single tokens or tiles.
"""

import re
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from noria.compile.targets import find_target
from noria.modelzoo.attention.paged import AttendPages, PagedRows
from noria.modelzoo.axes import LANES
from noria.modelzoo.cache.layer_state import LayerState, PromptKeysValues, PromptLatents
from noria.modelzoo.cache.pages import append_to_pages
from noria.modelzoo.cache.state_spec import state_spec
from noria.modelzoo.config import Arrangement
from noria.modelzoo.kernels.paged_gpu import attend_pages_gpu
from noria.modelzoo.kernels.paged_tpu import attend_pages_tpu
from noria.modelzoo.latent_config import LatentAttention
from noria.modelzoo.layer_config import Attention, Chunk, Scores, Window
from noria.sharding.placement import Placement

NUM_ROWS, NUM_PAGES, NUM_STEPS = 64, 4096, 4
PAGES_OF_ROW = 16
MAX_TEMP = 0.1
"""The most temporary memory beside queries, as a share of the pool; a copy of keys or values is
half of it."""
LATENT = LatentAttention(512, plain_dim=128, rope_dim=64, value_dim=128)


class Form(NamedTuple):
    """The sizes and options of a call."""

    T: int = 1
    K: int = 8
    G: int = 4
    H: int = 128
    page: int = 64
    dtype: str = "bfloat16"
    codes: str | None = None
    window: Window = None
    cap: float | None = None
    is_latent: bool = False


ON_TPU = {
    "plain": Form(),
    "tiles of 16, a window and a cap": Form(T=16, window=100, cap=30.0),
    "tiles of 64, chunks, heads of 256": Form(T=64, K=4, H=256, window=Chunk(128)),
    "tiles of 128 in blocks, groups of 7": Form(T=128, K=4, G=7),
    "float32": Form(dtype="float32"),
    "int8": Form(codes="int8", page=128),
    "float8": Form(codes="float8_e4m3fn", page=128),
    "latents": Form(K=1, G=128, is_latent=True),
    "tiles of latents": Form(T=16, K=1, G=16, is_latent=True),
    "latents in int8": Form(K=1, G=128, codes="int8", page=128, is_latent=True),
    "int4": Form(codes="int4", page=128),
    "tiles of int4, heads of 256": Form(T=16, K=4, H=256, codes="int4", page=128),
    "latents in int4": Form(K=1, G=128, codes="int4", page=128, is_latent=True),
    "tiles of latents in float8": Form(
        T=16, K=1, G=16, codes="float8_e4m3fn", page=128, is_latent=True
    ),
}
ON_GPU = {
    "plain": Form(),
    "tiles of 16, a window and a cap": Form(T=16, window=100, cap=30.0),
    "tiles of 64 in blocks, chunks, heads of 256": Form(T=64, K=4, H=256, window=Chunk(128)),
    "tiles of 16 in blocks, groups of 7": Form(T=16, G=7),
    "float16, heads of 64, large pages": Form(dtype="float16", H=64, page=128),
}
TPUS = "tpu:v5e:1x1", "tpu:v6e:1x1", "tpu:v5p:1x1x1"
OFTEN = "tpu:v5e:1x1", "tiles of 16, a window and a cap"
on_gpu = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(
        find_spec("jax_cuda12_plugin") is None or find_spec("nvidia") is None,
        reason="needs jax-cuda12-plugin and nvidia-cuda-nvcc-cu12",
    ),
]


def pool_of(form: Form, placement: Placement) -> LayerState:
    """Return the pool of a layer, without values."""
    heads, head_dim, latent = form.K, form.H, None
    if form.is_latent:
        heads, head_dim, latent = form.G, LATENT.head_dim, LATENT
    attention = Attention(form.K * form.G, heads, head_dim, latent=latent)
    multiple = LANES if placement.platform == "tpu" else 1
    arrangement = Arrangement(head_multiple=multiple, cache_codes=form.codes)
    spec = state_spec(attention, form.dtype, arrangement)
    pool = jax.eval_shape(lambda: LayerState.empty(spec, 1, NUM_PAGES, form.page))
    return pool.map(
        lambda x, array: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=placement.state(array.axes)
        )
    )


def arguments(form: Form, target: str) -> list[Any]:
    """Return the pool, queries, tables and positions, without values."""
    placement = find_target(target).placement()
    sharding, pool = placement.replicated, pool_of(form, placement)

    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return [
        pool,
        array(form.dtype, NUM_ROWS, form.T, form.K, form.G, pool.spec.features),
        array("int32", NUM_ROWS, PAGES_OF_ROW),
        array("int32", NUM_ROWS),
    ]


def compiled(attend: AttendPages, form: Form, given: list[Any]) -> Any:
    """Return the executable of a loop of steps over a donated pool, for arguments."""

    def step(carry: Any) -> Any:
        i, pool, q_BTKGH, page_BN, first_B = carry
        new_BKH = q_BTKGH[:, 0, :, 0]
        new = PromptKeysValues(new_BKH[..., None], new_BKH[:, :, None])
        if form.is_latent:
            new = PromptLatents(new_BKH)
        pool = append_to_pages(pool, new, page_BN, first_B, jnp.int32(0))
        rows, scores = (
            PagedRows(page_BN, first_B, jnp.full_like(first_B, form.T)),
            Scores(cap=form.cap),
        )
        out, lse = attend(q_BTKGH, *pool.keys_values(), rows, form.window, scores)
        q_BTKGH = jnp.where(jnp.isneginf(lse)[..., None], q_BTKGH, out)
        return i + 1, pool, q_BTKGH, page_BN, first_B + 1

    def run(pool: Any, q_BTKGH: Any, page_BN: Any, first_B: Any) -> Any:
        carry = 0, pool, q_BTKGH, page_BN, first_B
        return jax.lax.while_loop(lambda carry: carry[0] < NUM_STEPS, step, carry)[1:3]

    formats = jax.tree.map(lambda x: x.format, given[0]), given[1].format
    return jax.jit(run, donate_argnums=0, out_shardings=formats).lower(*given).compile()


def copies(text: str, pool: LayerState) -> list[str]:
    """Return instructions that make an array as large as one of the pool.

    Scales may go into on-chip memory before the loop.
    """
    sizes = {
        name: {prod(x.shape) for x in (pool.arrays[name] for name in names)}
        for name, names in (("copy-done", pool.spec.entries), ("", pool.spec.arrays))
    }
    made = re.findall(r"= \w+\[([\d,]+)\]\S* (copy|copy-done|transpose|convert)\(", text)
    return [
        shape
        for shape, name in made
        if prod(map(int, shape.split(","))) in sizes.get(name, sizes[""])
    ]


@pytest.mark.parametrize(
    ("attend", "form", "target"),
    [
        pytest.param(
            attend_pages_tpu,
            form,
            target,
            marks=[pytest.mark.tpu_compile]
            + ([] if (target, name) == OFTEN else [pytest.mark.slow]),
            id=f"{target}, {name}",
        )
        for target in TPUS
        for name, form in ON_TPU.items()
    ]
    + [
        pytest.param(
            attend_pages_gpu,
            form,
            "gpu:h100:1",
            marks=on_gpu + ([] if name == OFTEN[1] else [pytest.mark.slow]),
            id=f"gpu:h100:1, {name}",
        )
        for name, form in ON_GPU.items()
    ],
)
def test_a_loop_that_writes_and_reads_pages_copies_no_pool(attend, form, target):
    given = arguments(form, target)
    executable = compiled(attend, form, given)
    pool, queries, *_ = given
    num_bytes = [
        sum(prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(x)) for x in (pool, queries)
    ]
    # queries are arranged for the product, and results are arranged back
    most_bytes = MAX_TEMP * num_bytes[0] + 3 * num_bytes[1]
    assert executable.memory_analysis().temp_size_in_bytes < most_bytes
    assert copies(executable.as_text(), pool) == []
