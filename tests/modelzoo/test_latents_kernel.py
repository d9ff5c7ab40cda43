"""The kernel of latents in codes against the reference: in blocks of rows, and in a model."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coded_entries import decode, encode
from tiny import random_parameters
from tolerances import FLOAT32_ELEMENTWISE, FLOAT32_MODEL_LOGPROB

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.attention.attend import Attend, Visibility, attend_dense
from noria.modelzoo.attention.prompt_pieces import PromptPieces
from noria.modelzoo.cache import kv_cache
from noria.modelzoo.cache.entry_codes import EntryCodes
from noria.modelzoo.cache.segments import EMPTY_POSITION
from noria.modelzoo.config import AS_PUBLISHED, DecoderConfig
from noria.modelzoo.kernels import latents
from noria.modelzoo.kernels.latents import attend_latents
from noria.modelzoo.latent_config import LatentAttention
from noria.modelzoo.layer_config import Scores
from noria.modelzoo.operations import ON_ONE_DEVICE

H, RANK, G = 9, 5, 3
CONFIG = DecoderConfig.alike(
    vocab_size=37,
    embed=16,
    mlp=24,
    num_query_heads=3,
    num_kv_heads=3,
    head_dim=10,
    windows=(None, 5),
    max_position=32,
    latent=LatentAttention(rank=10, plain_dim=6, rope_dim=4, value_dim=7),
)


def as_codes(x_BSH: np.ndarray) -> tuple[EntryCodes, EntryCodes]:
    """Return latents as keys and values in codes."""
    codes, scales = encode(x_BSH, 2, "int8", np.dtype("float32"), (RANK,))
    v_B1SH, scale_B1PS = jnp.asarray(codes)[:, None], jnp.asarray(np.stack(scales, 1))[:, None]
    keys = EntryCodes(v_B1SH.swapaxes(2, 3), scale_B1PS, (RANK,))
    return keys, EntryCodes(v_B1SH, scale_B1PS, (RANK,))


def as_floats(x_BSH: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return the values of these codes as keys and values."""
    codes, scales = encode(x_BSH, 2, "int8", np.dtype("float32"), (RANK,))
    v_B1SH = jnp.asarray(decode(codes, scales, 2, (RANK,)))[:, None]
    return v_B1SH.swapaxes(2, 3), v_B1SH


def _run(attend, seen: Visibility, scores: Scores, q_BTKGH, k_BKHS, v_BKSH):
    return attend(q_BTKGH, k_BKHS, v_BKSH, seen, scores)


@pytest.mark.parametrize(
    ("B", "T", "S", "fitting", "sizes"),
    [
        (6, 1, 13, 2, [2, 2, 2]),
        (4, 1, 1, 0.5, [1] * 4),
        (8, 3, 9, 9, [4, 4]),
        (1, 2, 11, 9, [1]),
        # no more blocks than the program may have, and all of them with as many rows
        (32, 1, 3, 1, [2] * 16),
        (19, 1, 3, 1, [19]),
    ],
)
def test_it_equals_the_reference(monkeypatch, B, T, S, fitting, sizes):
    """One row sees nothing, and rows see entries in no order. `fitting` is the rows of a block."""
    rng = np.random.default_rng(B)
    q_BTKGH = jnp.asarray(rng.normal(size=(B, T, 1, G, H)), jnp.float32)
    x_BSH = rng.normal(size=(B, S, H)).astype(np.float32)
    key_position_BS = rng.permuted(np.tile(np.arange(S), (B, 1)), axis=1)
    key_position_BS[0] = EMPTY_POSITION
    query_position_BT = np.sort(rng.integers(0, S, (B, T)), axis=1)
    seen = Visibility(jnp.asarray(query_position_BT), jnp.asarray(key_position_BS), window=6)
    scores, rows = Scores(scale=0.7, cap=2.0), []
    attend_masked = latents.attend_masked

    def counted(q_BTKGH, *arguments):
        rows.append(len(q_BTKGH))
        return attend_masked(q_BTKGH, *arguments)

    monkeypatch.setattr(latents, "attend_masked", counted)
    got, wanted = (
        jax.jit(partial(_run, attend, seen, scores))(q_BTKGH, *entries)
        for attend, entries in (
            (partial(attend_latents, block_bytes=int(fitting * S * H)), as_codes(x_BSH)),
            (attend_dense, as_floats(x_BSH)),
        )
    )
    assert rows == sizes and np.isneginf(wanted[1][0]).all()
    # the last features of the output, those of the rotated key, are undefined
    np.testing.assert_allclose(
        got[0][..., :RANK], wanted[0][..., :RANK], atol=FLOAT32_ELEMENTWISE, rtol=0
    )
    np.testing.assert_allclose(got[1], wanted[1], atol=FLOAT32_ELEMENTWISE, rtol=0)


def test_a_model_decodes_as_with_the_reference():
    """Rows are in segments of odd lengths, and one layer has a rolling buffer."""
    definition = AbstractModel(CONFIG, replace(AS_PUBLISHED, cache_codes="int8"))
    parameters, lengths = random_parameters(definition), np.array([3, 7])
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 12)))

    is_token_NB = np.array([[True, True], [True, False], [True, True]])

    @partial(jax.jit, static_argnums=0)
    def logprobs(attend: Attend, parameters) -> jax.Array:
        prompts, decoder = (
            definition.bind(parameters, attend=one) for one in (attend_dense, attend)
        )
        cache = kv_cache.allocate(
            CONFIG, 2, (3, 7, 16), jnp.dtype("float32"), arrangement=definition.arrangement
        )
        rows = PromptPieces(jnp.arange(2), None, jnp.asarray(lengths))
        _, cache, _ = prompts.prefill(tokens_BT[:, :7], rows, cache, ON_ONE_DEVICE)
        found = []
        for step, is_token_B in enumerate(is_token_NB):
            position_B = jnp.asarray(lengths + step)
            token_B = tokens_BT[jnp.arange(2), position_B]
            logits_BV, cache, _ = decoder.decode(
                token_B, position_B, cache, jnp.asarray(is_token_B)
            )
            found.append(jax.nn.log_softmax(logits_BV))
        return jnp.stack(found)

    got, wanted = (
        np.asarray(logprobs(attend, parameters))[is_token_NB]
        for attend in (attend_latents, attend_dense)
    )
    np.testing.assert_allclose(got, wanted, atol=FLOAT32_MODEL_LOGPROB, rtol=0)
