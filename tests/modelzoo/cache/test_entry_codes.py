"""Cache entries in codes against plain numpy: rounding, writes of all kinds, and attention."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from alike import alike, changed
from caches import (
    CONFIG,
    ROWS,
    H,
    K,
    arrays_of,
    empty_cache,
    keep,
    layers_of,
    pages_in,
    pieces,
    random_prompt,
    scattered,
)
from coded_entries import decode, encode, in_blocks, pair
from tolerances import FLOAT32_ELEMENTWISE

from noria.modelzoo.attention.attend import Visibility, attend_dense
from noria.modelzoo.attention.paged import PagedRows, attend_in_groups, queries_of_pages
from noria.modelzoo.cache import entry_codes
from noria.modelzoo.cache.entry_codes import EntryCodes
from noria.modelzoo.cache.layer_state import LayerState, NewEntries, PromptLatents
from noria.modelzoo.cache.pages import append_to_pages
from noria.modelzoo.cache.stripes import EMPTY_POSITION
from noria.modelzoo.config import AS_PUBLISHED, DecoderConfig
from noria.modelzoo.latent_config import LatentAttention
from noria.modelzoo.layer_config import Chunk, Scores

CODES = ("int8", "float8_e4m3fn")
PAGE_BN = scattered(ROWS, 6)
"""The pages of rows of up to 24 entries."""
RANK = 5
LATENT = LatentAttention(rank=RANK, plain_dim=3, rope_dim=4, value_dim=4)
KINDS = {
    "keys and values": changed(CONFIG, windows=(None, Chunk(5))),
    "latents": changed(CONFIG, num_kv_heads=6, head_dim=7, latent=LATENT, windows=(6,)),
}
"""Kinds of entries, in layers that keep all entries and in those with pages of slots."""


def random(*shape: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    # tokens of very different size, one of them zeros
    return x * np.geomspace(1e-3, 1e3, shape[-1]).astype(np.float32) * (np.arange(shape[-1]) > 0)


encode_by_noria = jax.jit(entry_codes.encode, static_argnums=(1, 2, 3, 4))


@pytest.mark.parametrize("scales", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("splits", [(), (3,), (2, 5)], ids=str)
@pytest.mark.parametrize("codes", CODES)
def test_codes_and_scales_are_those_of_numpy(codes, splits, scales):
    x = random(2, 3, 8, 7).swapaxes(2, 3)
    wanted, wanted_scales = encode(x, 3, codes, scales, splits)
    got, got_scales = encode_by_noria(jnp.asarray(x), codes, jnp.dtype(scales), splits, 8)
    np.testing.assert_array_equal(np.asarray(got), wanted)
    for ours, theirs in zip(got_scales, wanted_scales, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)
    largest = np.expand_dims(np.abs(x).max(3), 3)
    error = abs(decode(wanted, wanted_scales, 3, splits) - x)
    step = {"int8": 0.51 / 127, "float8_e4m3fn": 17 / 448}[codes]
    assert np.all(error <= (step + 2**-8 * (scales != np.float32)) * largest)


@pytest.mark.parametrize("splits", [(), (16,)], ids=str)
def test_entries_in_int4_are_rotated(splits):
    """A large feature would leave few codes to the others."""
    x = np.random.default_rng(0).normal(size=(2, 3, 50, 32)).astype(np.float32)
    x[..., 5] *= 30
    wanted, wanted_scales = encode(x, 3, "int4", np.float32, splits)
    got, got_scales = encode_by_noria(jnp.asarray(x), "int4", jnp.dtype("float32"), splits, 32)
    np.testing.assert_allclose(got_scales, wanted_scales, rtol=1e-6)
    codes = np.asarray(got).astype(int)
    # a value near the middle between two codes may have either
    assert np.mean(codes != wanted.astype(int)) < 1e-3
    assert abs(codes - wanted.astype(int)).max() <= 1
    errors = decode(np.asarray(got).astype(ml_dtypes.int4), got_scales, 3, splits) - x
    plain_scale = abs(x).max(3, keepdims=True) / 7
    plain_errors = np.rint(x / plain_scale) * plain_scale - x
    assert errors.std() < 0.6 * plain_errors.std()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("codes", [*CODES, "int4"])
def test_a_value_that_is_not_finite_stays_visible(codes, value):
    x = jnp.ones((1, 1, 2, 4)).at[0, 0, 0, 1].set(value)
    _, (scale_BKS,) = encode_by_noria(x, codes, jnp.dtype("float32"), (), 4)
    np.testing.assert_array_equal(np.isfinite(scale_BKS)[0, 0], [False, True])


def new_entries(config: DecoderConfig, length: int, seed: int) -> tuple[NewEntries, ...]:
    """Return new entries of each layer, for all rows; sums of a few of them are exact."""
    if alike(config).latent is None:
        return jax.tree.map(lambda x: jnp.rint(4096 * x) / 4096, random_prompt(ROWS, length, seed))
    rng = np.random.default_rng(seed)
    return tuple(
        PromptLatents(jnp.asarray(rng.normal(size=(ROWS, length, 9)), jnp.float32))
        for _ in alike(config).windows
    )


@partial(jax.jit, static_argnums=(0, 1))
def written(config: DecoderConfig, codes: str | None) -> list[LayerState]:
    """Return a cache after whole prompts, chunks, and a token of each row but one."""
    arrangement = replace(AS_PUBLISHED, cache_codes=codes)
    cache = empty_cache(config, PAGE_BN, row_tokens=4, arrangement=arrangement)
    rows = pieces(PAGE_BN, [2, 0, 3, ROWS], [14, 3, 9, 14])
    cache = keep(cache, new_entries(config, 14, 1), rows)
    rows = pieces(PAGE_BN, [3, ROWS, 1, 2], [4, 4, 2, 3], 16)
    cache = keep(cache, new_entries(config, 4, 2), rows)
    position_B, layer = jnp.array([3, 18, EMPTY_POSITION, 19]), jnp.int32(0)

    def append(old: LayerState, new: NewEntries) -> LayerState:
        page_BN = jnp.asarray(pages_in(old, PAGE_BN, np.arange(ROWS)))
        return append_to_pages(old, new, page_BN, position_B, layer)

    return list(map(append, layers_of(cache), new_entries(config, 1, 3)))


@pytest.mark.parametrize(
    ("kind", "codes"), [*zip(KINDS, CODES, strict=True), *((kind, "int4") for kind in KINDS)]
)
def test_every_write_leaves_the_codes_of_the_floats_that_it_would_leave(kind, codes):
    config = KINDS[kind]
    for floats, in_codes in zip(written(config, None), written(config, codes), strict=True):
        wanted = {}
        for name, x in arrays_of(floats).items():
            assert x.any()
            if codes == "int4" and floats.spec.splits:
                # the halves of a latent are alike
                x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] % 2)])
            wanted[name], scales = encode(x, x.ndim - 1, codes, np.float32, floats.spec.splits)
            # the heads of keys and values have one part each; latents have parts, but no heads
            scales = [scale.reshape(*x.shape[:2], -1, scale.shape[-1]) for scale in scales]
            wanted[f"{name}_scale"] = np.concatenate(scales, axis=2)
        if codes == "int4":
            wanted |= in_pairs(wanted)
        wanted |= {name: in_blocks(wanted[name]) for name in in_codes.spec.entries}
        got = arrays_of(in_codes)
        assert got.keys() == wanted.keys()
        for name, codes_of_floats in wanted.items():
            np.testing.assert_array_equal(got[name], codes_of_floats)


def in_pairs(codes: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return bytes of the codes of vectors, two in each, which are taken out of `codes`."""
    if "latent" in codes:
        return {"latent": pair(*np.split(codes.pop("latent"), 2, axis=-1))}
    return {"kv": pair(codes.pop("k"), codes.pop("v"))}


def test_scanned_layers_write_the_scales_of_their_own_layer():
    config = changed(CONFIG, windows=(None,) * 3)
    arrangement = replace(AS_PUBLISHED, scan_layers=True, cache_codes="int8")
    (layers,) = layers_of(empty_cache(config, PAGE_BN, arrangement=arrangement))
    (new,) = random_prompt(ROWS, 1, num_layers=1)
    append, position_B = jax.jit(append_to_pages), jnp.array([0, 9, EMPTY_POSITION, 23])
    after = append(layers, new, jnp.asarray(PAGE_BN), position_B, jnp.int32(1))
    for name, side, axis in (("k_scale", new[0], 2), ("v_scale", new[1], 3)):
        got = arrays_of(after)[name]
        _, (scale_BK1,) = encode(np.asarray(side), axis, "int8", np.float32)
        wanted = np.zeros((3, 2 * PAGE_BN.size, K, 4), np.float32)
        for row, page, entry in ((0, 0, 0), (1, 2, 1), (3, 5, 3)):
            wanted[1, PAGE_BN[row, page], :, entry] = scale_BK1[row, :, 0]
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("group", [None, 1], ids=["at once", "row by row"])
@pytest.mark.parametrize(
    ("codes", "splits", "width"),
    [("int8", (3,), H), ("int8", (), 2 * H), ("int4", (2,), H), ("int4", (), 2 * H)],
    ids=["parts", "wide heads", "rotated parts", "rotated wide heads"],
)
def test_attention_to_codes_is_that_to_their_values(codes, splits, width, group):
    """The cache pads heads to a width; zeros that pad a rotated head are rotated, too."""
    N, S, T, G = 3, 4, 5, 2
    rng = np.random.default_rng(3)
    page_BN, first_B = scattered(2, N), np.array([7, 2])
    coded, floats, both_codes = [], [], []
    for side_splits in (splits, ()):
        x_PKSH = rng.normal(size=(2 * page_BN.size, K, S, H)).astype(np.float32)
        x_PKSH = np.pad(x_PKSH, [(0, 0)] * 3 + [(0, width - H)])
        in_codes, scales = encode(x_PKSH, 3, codes, np.float32, side_splits)
        scale_PKRS = jnp.asarray(np.stack(scales, axis=2))
        coded.append(EntryCodes(jnp.asarray(in_blocks(in_codes)), scale_PKRS, side_splits))
        both_codes.append(in_codes)
        of_rows = decode(in_codes, scales, 3, side_splits)[page_BN].swapaxes(1, 2)
        floats.append(jnp.asarray(of_rows.reshape(2, K, N * S, width)))
    if codes == "int4":
        in_bytes = jnp.asarray(in_blocks(pair(*both_codes)))
        coded = [replace(x, codes=in_bytes, halves=(half,)) for half, x in enumerate(coded)]
    q_BTKGH = jnp.asarray(rng.normal(size=(2, T, K, G, H)), jnp.float32)
    scores = Scores(scale=0.7, cap=2.0)
    rows = PagedRows(*map(jnp.asarray, (page_BN, first_B, np.full(2, T))))

    @jax.jit
    def attend(q_BTKGH, coded):
        q_BTKGH = queries_of_pages(q_BTKGH, coded)
        return attend_in_groups(q_BTKGH, *coded, rows, 6, scores, group=group)

    out, lse = attend(q_BTKGH, coded)
    got = out[..., :H], lse
    seen = Visibility(first_B[:, None] + np.arange(T), np.tile(np.arange(N * S), (2, 1)), 6)
    wide_BTKGH = jnp.pad(q_BTKGH, [(0, 0)] * 4 + [(0, width - H)])
    keys, values = floats
    out, lse = attend_dense(wide_BTKGH, keys.swapaxes(2, 3), values, seen, scores)
    for ours, wanted in zip(got, (out[..., :H], lse), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=FLOAT32_ELEMENTWISE, rtol=0)
