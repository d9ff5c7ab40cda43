"""Cache entries in codes against plain numpy: rounding, writes of all kinds, and attention."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from alike import alike, changed
from caches import CONFIG, SLOTS, H, K, keep, pieces, random_prompt
from coded_entries import decode, encode
from tolerances import FLOAT32_ELEMENTWISE

from noria.modelzoo.attention.attend import Slots, Visibility, attend_dense
from noria.modelzoo.attention.blockwise import attend_blockwise
from noria.modelzoo.cache import entry_codes, kv_cache
from noria.modelzoo.cache.entry_codes import INT4_IN_BYTES, EntryCodes
from noria.modelzoo.cache.layer_state import LayerState, NewEntries, PromptLatents
from noria.modelzoo.cache.segments import EMPTY_POSITION
from noria.modelzoo.config import AS_PUBLISHED, DecoderConfig
from noria.modelzoo.latent_config import LatentAttention
from noria.modelzoo.layer_config import Chunk, Scores

CODES = ("int8", "float8_e4m3fn")
SPANS = (8, 24)
RANK = 5
LATENT = LatentAttention(rank=RANK, plain_dim=3, rope_dim=4, value_dim=4)
KINDS = {
    "keys and values": changed(CONFIG, windows=(None, Chunk(5))),
    "latents": changed(CONFIG, num_kv_heads=6, head_dim=7, latent=LATENT, windows=(6,)),
}
"""Kinds of entries, in layers that keep all entries and in rolling buffers."""


def random(*shape: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    # tokens of very different size, one of them zeros
    return x * np.geomspace(1e-3, 1e3, shape[-1]).astype(np.float32) * (np.arange(shape[-1]) > 0)


encode_by_noria = jax.jit(entry_codes.encode, static_argnums=(1, 2, 3, 4))


@pytest.mark.parametrize("scales", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("splits", [(), (3,), (2, 5)], ids=str)
@pytest.mark.parametrize("codes", CODES)
def test_codes_and_scales_are_those_of_numpy(codes, splits, scales):
    x = random(2, 3, 8, 7)
    wanted, wanted_scales = encode(x, 2, codes, scales, splits)
    got, got_scales = encode_by_noria(
        jnp.asarray(x), 2, jnp.dtype(codes), jnp.dtype(scales), splits
    )
    np.testing.assert_array_equal(np.asarray(got), wanted)
    for ours, theirs in zip(got_scales, wanted_scales, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)
    largest = np.expand_dims(np.abs(x).max(2), 2)
    error = abs(decode(wanted, wanted_scales, 2, splits) - x)
    step = {"int8": 0.51 / 127, "float8_e4m3fn": 17 / 448}[codes]
    assert np.all(error <= (step + 2**-8 * (scales != np.float32)) * largest)


@pytest.mark.parametrize("splits", [(), (16,)], ids=str)
def test_entries_in_int4_are_rotated(splits):
    """A large feature would leave few codes to the others."""
    x = np.random.default_rng(0).normal(size=(2, 3, 32, 50)).astype(np.float32)
    x[:, :, 5] *= 30
    wanted, wanted_scales = encode(x, 2, "int4", np.float32, splits)
    got, got_scales = encode_by_noria(
        jnp.asarray(x), 2, jnp.dtype("int4"), jnp.dtype("float32"), splits
    )
    np.testing.assert_allclose(got_scales, wanted_scales, rtol=1e-6)
    codes = np.asarray(got).astype(int)
    # a value near the middle between two codes may have either
    assert np.mean(codes != wanted.astype(int)) < 1e-3
    assert abs(codes - wanted.astype(int)).max() <= 1
    errors = decode(np.asarray(got), got_scales, 2, splits) - x
    plain_scale = abs(x).max(2, keepdims=True) / 7
    plain_errors = np.rint(x / plain_scale) * plain_scale - x
    assert errors.std() < 0.6 * plain_errors.std()


def test_codes_of_int4_in_bytes_are_those_of_int4():
    x, q = np.random.default_rng(1).normal(size=(2, 2, 3, 16, 16)).astype(np.float32)
    products = []
    for dtype in ("int4", INT4_IN_BYTES):
        codes, (scale_BKS,) = encode_by_noria(x, 3, jnp.dtype(dtype), jnp.dtype("float32"))
        assert codes.dtype == dtype
        values = EntryCodes(codes, scale_BKS[:, :, None])
        keys = replace(values, codes=codes.swapaxes(-1, -2))
        products.append((entry_codes.score_codes(q, keys), entry_codes.weigh_codes(q, values)))
    assert np.abs(products[0][0]).max() > 1
    jax.tree.map(np.testing.assert_array_equal, *products)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("codes", [*CODES, "int4"])
def test_a_value_that_is_not_finite_stays_visible(codes, value):
    x = jnp.ones((1, 1, 4, 2)).at[0, 0, 1, 0].set(value)
    _, (scale_BKS,) = encode_by_noria(x, 2, jnp.dtype(codes), jnp.dtype("float32"))
    np.testing.assert_array_equal(np.isfinite(scale_BKS)[0, 0], [False, True])


def new_entries(config: DecoderConfig, length: int, seed: int) -> tuple[NewEntries, ...]:
    """Return new entries of each layer, for all slots; sums of a few of them are exact."""
    if alike(config).latent is None:
        return jax.tree.map(lambda x: jnp.rint(4096 * x) / 4096, random_prompt(SLOTS, length, seed))
    rng = np.random.default_rng(seed)
    return tuple(
        PromptLatents(jnp.asarray(rng.normal(size=(SLOTS, length, 9)), jnp.float32))
        for _ in alike(config).windows
    )


@partial(jax.jit, static_argnums=(0, 1))
def written(config: DecoderConfig, codes: str | None) -> list[LayerState]:
    """Return a cache after whole prompts, chunks, and a token of each row but one."""
    arrangement = replace(AS_PUBLISHED, cache_codes=codes)
    cache = kv_cache.allocate(config, SLOTS, SPANS, jnp.float32, arrangement=arrangement)
    write = partial(keep, windows=alike(config).windows)
    cache = write(cache, new_entries(config, 14, 1), pieces([2, 0, 3, SLOTS], [14, 3, 9, 14]))
    cache = write(cache, new_entries(config, 5, 2), pieces([3, SLOTS, 1, 2], [5, 5, 2, 4], 14))
    position_B, layer = jnp.array([3, 16, EMPTY_POSITION, 19]), jnp.int32(0)
    tokens = new_entries(config, 1, 3)
    return [
        kv_cache.append(old, new, cache.positions.entry(position_B, window), layer)
        for old, new, window in zip(cache.layers, tokens, alike(config).windows, strict=True)
    ]


@pytest.mark.parametrize(
    ("kind", "codes"), [*zip(KINDS, CODES, strict=True), ("keys and values", "int4")]
)
def test_every_write_leaves_the_codes_of_the_floats_that_it_would_leave(kind, codes):
    config = KINDS[kind]
    for floats, in_codes in zip(written(config, None), written(config, codes), strict=True):
        wanted_arrays = {}
        for name, array in floats.spec.arrays.items():
            parts = [
                encode(np.asarray(x), array.feature_axis, codes, np.float32, floats.spec.splits)
                for x in floats.arrays[name]
            ]
            wanted_arrays[name] = [x for x, _ in parts]
            # the heads of keys and values have one part each; latents have parts, but no heads
            of_parts = [[x.reshape(1, SLOTS, -1, x.shape[-1]) for x in found] for _, found in parts]
            wanted_arrays[f"{name}_scale"] = [np.concatenate(found, axis=2) for found in of_parts]
        assert wanted_arrays.keys() == in_codes.arrays.keys()
        for name, wanted in wanted_arrays.items():
            got = in_codes.arrays[name]
            assert len(got) == len(wanted) > 0
            for ours, theirs in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(np.asarray(ours), theirs)


def test_scanned_layers_write_the_scales_of_their_own_layer():
    config = changed(CONFIG, windows=(None,) * 3)
    arrangement = replace(AS_PUBLISHED, scan_layers=True, cache_codes="int8")
    cache = kv_cache.allocate(config, SLOTS, SPANS, jnp.float32, arrangement=arrangement)
    (layers,) = cache.layers
    (new,) = random_prompt(SLOTS, 1, num_layers=1)
    append, position_B = jax.jit(kv_cache.append), jnp.array([0, 9, EMPTY_POSITION, 23])
    after = append(layers, new, position_B, jnp.int32(1))
    for name, side, axis in (("k_scale", new[0], 2), ("v_scale", new[1], 3)):
        got = np.concatenate(after.arrays[name], axis=3)
        _, (scale_BK1,) = encode(np.asarray(side), axis, "int8", np.float32)
        wanted = np.zeros((3, SLOTS, K, 24), np.float32)
        for row, entry in ((0, 0), (1, 9), (3, 23)):
            wanted[1, row, :, entry] = scale_BK1[row, :, 0]
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("attend", "dtype", "splits"),
    [
        (attend_dense, "int8", (3,)),
        (partial(attend_blockwise, block_scores=20), "int8", ()),
        (attend_dense, "int4", (2,)),
        (partial(attend_blockwise, block_scores=20), "int4", ()),
    ],
    ids=["at once", "in blocks", "rotated at once", "rotated in blocks"],
)
def test_attention_to_codes_is_that_to_their_values(attend, dtype, splits):
    """Rows read other slots than their own, in the second of two layers."""
    L, B, T, S, G = 2, 3, 5, 12, 2
    rng = np.random.default_rng(3)
    shapes = (L, B, K, H, S), (L, B, K, S, H)
    keys, values = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    seen = Visibility(
        jnp.array([[3, 7, 8, 10, 11], [0, 1, 2, 3, 4]]),
        jnp.asarray(rng.permuted(np.tile(np.arange(S), (2, 1)), axis=1)),
        window=6,
        slots=Slots(jnp.int32(1), jnp.array([2, 0])),
    )
    coded, floats = [], []
    for x, axis, side_splits in ((keys, 3, splits), (values, 4, ())):
        codes, scales = encode(x, axis, dtype, np.float32, side_splits)
        scale_LBKPS = jnp.asarray(np.stack(scales, axis=3))
        coded.append(EntryCodes(jnp.asarray(codes), scale_LBKPS, side_splits))
        floats.append(jnp.asarray(decode(codes, scales, axis, side_splits)))
    q_BTKGH = jnp.asarray(rng.normal(size=(2, T, K, G, H)), jnp.float32)
    got, wanted = (
        jax.jit(partial(one, visibility=seen, scores=Scores(scale=0.7, cap=2.0)))(q_BTKGH, *entries)
        for one, entries in ((attend, coded), (attend_dense, floats))
    )
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=FLOAT32_ELEMENTWISE, rtol=0)
