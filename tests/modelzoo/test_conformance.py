"""Every family gives the log-probabilities of its published implementation.

Saved by transformers, opened and loaded as a user's model is, and compared with what transformers
computed on each prompt alone: through prefill and, from a shorter bucket on, token by token through
decode, over a cache of several segments. A longer bucket and a cache in one piece are `slow`.
"""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import CASES, TRUE_LENGTHS, Case, prompts, save_reference
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.definition import Definition
from noria.modelzoo import kv_cache
from noria.modelzoo.chunk_cache import ChunkRows
from noria.modelzoo.families.registry import FAMILIES
from noria.modelzoo.operations import ON_ONE_DEVICE
from noria.runtime.checkpoint.loader import load_params
from noria.runtime.checkpoint.model_files import open_model

pytestmark = pytest.mark.reference


class LoadedCase:
    """A case read by noria, beside what transformers says about it."""

    def __init__(self, case: Case, directory):
        self.case = case
        self.reference = save_reference(case, directory)
        self.prompts = prompts(case)
        with open_model(str(directory)) as files:
            self.definition = Definition(files.spec.config)
            abstract = self.definition.abstract_parameters(jnp.float32)
            sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            self.parameters = load_params(files.spec, files.tensors, abstract, sharding)

    def padded_prompts(self, length: int) -> jax.Array:
        # padding is a token like any other, so that one that is looked at shows
        tokens = np.full((len(self.prompts), length), 7, np.int32)
        for row, prompt in zip(tokens, self.prompts, strict=True):
            row[: min(len(prompt), length)] = prompt[:length]
        return jnp.asarray(tokens)

    def assert_close(self, logits_BTV: np.ndarray, first: int = 0) -> None:
        """Compare positions from `first` on, as far as each prompt goes."""
        logprobs_BTV = np.asarray(jax.nn.log_softmax(jnp.asarray(logits_BTV), axis=-1))
        for row_TV, expected_TV in zip(logprobs_BTV, self.reference, strict=True):
            true_length = len(expected_TV)
            np.testing.assert_allclose(
                row_TV[: max(true_length - first, 0)],
                expected_TV[first:],
                rtol=0,
                atol=FLOAT32_MODEL_LOGPROB,
            )


IN_CHUNKS = {"llama-2", "mistral-window", "llama4-scout", "deepseek-v2-lite", "gpt-oss"}


@pytest.fixture(scope="module")
def is_slow(request) -> bool:
    return request.config.getoption("--slow")


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def loaded(request, tmp_path_factory) -> LoadedCase:
    return LoadedCase(request.param, tmp_path_factory.mktemp(request.param.name))


@pytest.mark.parametrize("bucket_length", [24, pytest.param(40, marks=pytest.mark.slow)])
def test_prefill_gives_the_logprobs_of_transformers(loaded: LoadedCase, bucket_length: int):
    @jax.jit
    def prefill(parameters, tokens_BT, true_length_B):
        decoder = loaded.definition.bind(parameters)
        x_BTD, *_ = decoder.prefill(tokens_BT, true_length_B)
        return decoder.logits(x_BTD)

    tokens_BT = loaded.padded_prompts(bucket_length)
    loaded.assert_close(prefill(loaded.parameters, tokens_BT, jnp.asarray(TRUE_LENGTHS)))


@pytest.mark.parametrize(
    "spans", [pytest.param((32,), marks=pytest.mark.slow), (8, 16, 48)], ids=str
)
def test_decoding_token_by_token_gives_the_logprobs_of_transformers(
    loaded: LoadedCase, spans: tuple[int, ...]
):
    """The first tokens come through prefill and insert; rows past their end write nothing."""
    first, longest = 5, max(TRUE_LENGTHS)

    @jax.jit
    def start(parameters, tokens_BT, length_B):
        _, prompt, _ = loaded.definition.bind(parameters).prefill(tokens_BT, length_B)
        B = len(TRUE_LENGTHS)
        cache = kv_cache.allocate(loaded.definition.config, B, spans, jnp.float32)
        for row in range(B):
            cache = kv_cache.insert(cache, prompt, length_B, jnp.int32(row), jnp.int32(row))
        return cache

    @jax.jit
    def step(parameters, token_B, position_B, cache):
        decoder = loaded.definition.bind(parameters)
        is_token_B = position_B < spans[-1]
        return decoder.decode(token_B, position_B, cache, is_token_B)[:2]

    length_B = np.minimum(TRUE_LENGTHS, first)
    cache = start(loaded.parameters, loaded.padded_prompts(8), jnp.asarray(length_B))
    tokens_BT = loaded.padded_prompts(longest)
    logits = []
    for position in range(first, longest):
        is_live_B = np.asarray(TRUE_LENGTHS) > position
        position_B = jnp.asarray(np.where(is_live_B, position, spans[-1]).astype(np.int32))
        logits_BV, cache = step(loaded.parameters, tokens_BT[:, position], position_B, cache)
        logits.append(np.asarray(logits_BV))
    loaded.assert_close(np.stack(logits, axis=1), first)


@pytest.mark.parametrize("spans", [pytest.param((32,), marks=pytest.mark.slow), (8, 24)], ids=str)
def test_prefill_in_chunks_gives_the_logprobs_of_transformers(
    loaded: LoadedCase, is_slow: bool, spans: tuple[int, ...]
):
    """Slots are not in the order of rows; a row without tokens is none, and has no slot.

    In every run one family for each way of keeping a layer, the others when asked.
    """
    if not (is_slow or loaded.case.name in IN_CHUNKS):
        pytest.skip("slow; run with --slow")
    chunk, slot_B = 8, np.array([2, 0, 1], np.int32)
    B = len(TRUE_LENGTHS)

    @partial(jax.jit, static_argnames="num_segments")
    def pour(parameters, tokens_BT, rows, cache, num_segments):
        decoder = loaded.definition.bind(parameters)
        head = cache.head(num_segments)
        x_BTD, head, _ = decoder.prefill_chunk(tokens_BT, rows, head, ON_ONE_DEVICE)
        return decoder.logits(x_BTD), cache.with_head(head)

    cache = kv_cache.allocate(loaded.definition.config, B, spans, jnp.float32)
    tokens_BT = loaded.padded_prompts(max(spans))
    logits = []
    for start in range(0, max(TRUE_LENGTHS), chunk):
        count_B = np.clip(np.asarray(TRUE_LENGTHS) - start, 0, chunk).astype(np.int32)
        slots_B = np.where(count_B, slot_B, B).astype(np.int32)
        rows = ChunkRows(*map(jnp.asarray, (slots_B, np.full(B, start, np.int32), count_B)))
        num_segments = 1 + sum(start + chunk > span for span in spans)
        piece_BT = tokens_BT[:, start : start + chunk]
        logits_BTV, cache = pour(loaded.parameters, piece_BT, rows, cache, num_segments)
        logits.append(np.asarray(logits_BTV))
    loaded.assert_close(np.concatenate(logits, axis=1))


def test_every_family_has_at_least_four_cases():
    counts = Counter(case.family for case in CASES)
    assert set(counts) == {family.name for family in FAMILIES}
    assert min(counts.values()) >= 4
