"""Latent attention: the content of its cache, and equality with attention over heads.

The conformance tests compare both with the published implementation.
"""

from dataclasses import replace

import caches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import changed
from caches import (
    PAGE,
    arrays_of,
    empty_cache,
    entries_of,
    keep,
    layers_of,
    pieces,
    scattered,
    used_cache,
)
from tiny import random_parameters
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.attention.prompt_pieces import PromptPieces
from noria.modelzoo.attention.shared_pages import SlotPages
from noria.modelzoo.cache.layer_state import PromptLatents
from noria.modelzoo.cache.pages import NO_PAGE, append_to_pages
from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.decoder import Decoder
from noria.modelzoo.latent_config import LatentAttention
from noria.modelzoo.operations import ON_ONE_DEVICE

LATENT = LatentAttention(rank=10, plain_dim=6, rope_dim=4, value_dim=7, query_rank=9)
CONFIG = DecoderConfig.alike(
    vocab_size=37,
    embed=16,
    mlp=24,
    num_query_heads=3,
    num_kv_heads=3,
    head_dim=10,
    windows=(None, None),
    max_position=32,
    latent=LATENT,
)
ROWS, LENGTH = 2, 12
PAGE_BN = scattered(ROWS, 4)
"""The pages of rows of up to 16 entries."""


def bound(config: DecoderConfig) -> Decoder:
    definition = AbstractModel(config)
    return definition.bind(random_parameters(definition))


def random_tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, LENGTH))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_the_cache_holds_a_latent_and_a_rotated_key_a_token_and_nothing_else(dtype):
    cache = empty_cache(CONFIG, PAGE_BN, dtype=dtype)
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(cache))
    num_entries = CONFIG.num_layers * 2 * PAGE_BN.size * PAGE
    numbers = num_entries * (LATENT.rank + LATENT.rope_dim)
    assert num_bytes == numbers * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize(("query_rank", "window"), [(None, None), (9, 5)])
def test_tokens_that_read_latents_from_the_cache_answer_as_in_a_prompt(query_rank, window):
    """The test prefills three tokens of one row and seven of the other, and decodes the rest."""
    latent = replace(LATENT, query_rank=query_rank)
    config = changed(CONFIG, latent=latent, windows=(None, window))
    tokens_BT, lengths = random_tokens(), np.array([3, 7])
    decoder = bound(config)

    @jax.jit
    def forward(tokens_BT):
        x_BTD, _ = decoder.forward(tokens_BT, jnp.full(ROWS, LENGTH))
        return decoder.logits(x_BTD)

    @jax.jit
    def prefill(tokens_BT, rows, cache):
        return decoder.prefill(tokens_BT, rows, cache, ON_ONE_DEVICE)[1]

    pages = SlotPages(jnp.asarray(PAGE_BN))
    decode = jax.jit(lambda *arguments: caches.decode(decoder, *arguments, pages)[:2])
    expected_BTV = np.asarray(forward(jnp.asarray(tokens_BT)))
    rows = PromptPieces(jnp.arange(ROWS), None, jnp.asarray(lengths), pages.page_BN)
    cache = empty_cache(config, PAGE_BN, row_tokens=1)
    cache = prefill(jnp.asarray(tokens_BT[:, :7]), rows, cache)
    for step in range(5):
        position_B = lengths + step
        token_B = tokens_BT[np.arange(ROWS), position_B]
        is_token_B = jnp.ones(ROWS, bool)
        logits_BV, cache = decode(jnp.asarray(token_B), jnp.asarray(position_B), cache, is_token_B)
        np.testing.assert_allclose(
            jax.nn.log_softmax(logits_BV),
            jax.nn.log_softmax(expected_BTV[np.arange(ROWS), position_B]),
            rtol=0,
            atol=FLOAT32_MODEL_LOGPROB,
        )


def latents_of(layer) -> np.ndarray:
    """Return the latents of each row, in order."""
    return entries_of(layer, PAGE_BN, np.arange(ROWS))["latent"]


@pytest.mark.parametrize("start", [None, 6])
def test_a_piece_is_written_at_its_positions_and_nowhere_else(start):
    rng = np.random.default_rng(1)
    before = used_cache(CONFIG, PAGE_BN)
    new = [PromptLatents(jnp.asarray(rng.normal(size=(1, 6, 14)), jnp.float32)) for _ in range(2)]
    after = keep(before, new, pieces(PAGE_BN, [1], [5], start))
    first = start or 0
    for old, layer, (latent_BTH,) in zip(layers_of(before), layers_of(after), new, strict=True):
        expected = latents_of(old).copy()
        expected[1, first : first + 6] = latent_BTH[0]
        np.testing.assert_array_equal(latents_of(layer), expected)


def test_append_writes_one_entry_a_row_and_without_a_page_none():
    layer, new = layers_of(empty_cache(CONFIG, PAGE_BN))[0], PromptLatents(jnp.ones((ROWS, 1, 14)))
    page_BN = jnp.asarray(PAGE_BN).at[1].set(NO_PAGE)
    layer = append_to_pages(layer, new, page_BN, jnp.array([5, 15]), jnp.int32(0))
    expected = np.zeros((ROWS, 16, 14), np.float32)
    expected[0, 5] = 1.0
    np.testing.assert_array_equal(latents_of(layer), expected)
    assert arrays_of(layer)["latent"].sum() == expected.sum()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 1}, "expected 3 num_kv_heads, one a query head.* got 1 with 10"),
        ({"head_dim": 12}, "head_dim of 10, plain_dim and rope_dim together, got 3 with 12"),
        ({"qkv_bias": True, "qk_norm": "head"}, "expected no qkv_bias, qk_norm beside it"),
        ({"latent": replace(LATENT, plain_dim=7, rope_dim=3)}, "needs an even size, got 3"),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        changed(CONFIG, **changes)


@pytest.mark.parametrize("size", ["rank", "plain_dim", "rope_dim", "value_dim", "query_rank"])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match=f"latent.{size}: expected a positive integer, got 0"):
        replace(LATENT, **{size: 0})
