"""Every family gives the log-probabilities of its published implementation.

Transformers saves each model; noria opens and loads it like a user's model. Its results are
compared with those of transformers on each prompt alone: through prefill and, from the first tokens
on, token by token through decode. `slow` tests use a longer bucket, and decode models whose special
features other models cover. Deeper models of some families also scan their layers.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import decode
from conformance import CASES, TRUE_LENGTHS, Case, prompts, save_reference
from cpu_kernels import loaded as kernels_loaded
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.abstract_model import AbstractModel
from noria.compile.grids.bucket_grid import BucketGrid
from noria.modelzoo.attention.prompt_pieces import PromptPieces
from noria.modelzoo.attention.shared_pages import SlotPages
from noria.modelzoo.cache.layer_state import Cache
from noria.modelzoo.cache.pages import PageCounts, allocate_pages
from noria.modelzoo.config import AS_PUBLISHED, Arrangement
from noria.modelzoo.cpu.objects import panel_columns
from noria.modelzoo.families.registry import FAMILIES
from noria.modelzoo.operations import ON_ONE_DEVICE
from noria.modelzoo.weights.packed_weight import PackedWeight
from noria.runtime.checkpoint import open_model
from noria.runtime.checkpoint.loader import load_params

pytestmark = pytest.mark.reference

BUCKET_LENGTH = 24
"""Bucket of prefill and decode in every run; both share prefill's program."""


PAGE, ROW_PAGES = 4, 10
"""The entries of a page, and the pages of each slot."""
PAGED = BucketGrid(
    ROW_PAGES * PAGE, ((ROW_PAGES * PAGE, 3, 8),), 3,
    pages=3 * ROW_PAGES, page=PAGE, row_tokens=8,
)  # fmt: skip
"""In layers with windows, rows have pages of their own."""


class LoadedCase:
    """A case as read by noria, with the log-probabilities of transformers."""

    def __init__(self, case: Case, directory, arrangement: Arrangement = AS_PUBLISHED):
        self.case = case
        self.reference = save_reference(case, directory)
        self.prompts = prompts(case)
        with open_model(str(directory)) as files:
            self.definition = AbstractModel(files.spec.config, arrangement)
            abstract = self.definition.abstract_parameters(jnp.float32)
            sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            parameters = load_params(files.spec, files.tensors, abstract, sharding)
            self.parameters = self.definition.pack(parameters)

    def prefill_logits(self, bucket_length: int) -> jax.Array:
        """Return the logits of every position."""
        return self._prefill_prompts(bucket_length, max(TRUE_LENGTHS))[0]

    def decode_logits(self, first: int) -> np.ndarray:
        """Return the logits from position `first` on: prefill up to `first`, then decode.

        Rows past their end write nothing.
        """
        definition, longest = self.definition, max(TRUE_LENGTHS)

        @jax.jit
        def step(parameters, token_B, position_B, is_live_B, cache):
            pages = SlotPages(self._pages(np.arange(len(TRUE_LENGTHS))))
            decoder = definition.bind(parameters)
            return decode(decoder, token_B, position_B, cache, is_live_B, pages)[:2]

        _, cache = self._prefill_prompts(BUCKET_LENGTH, first)
        tokens_BT = self.padded_prompts(longest)
        logits = []
        for position in range(first, longest):
            is_live_B = np.asarray(TRUE_LENGTHS) > position
            position_B, token_B = np.full(len(is_live_B), position), tokens_BT[:, position]
            logits_BV, cache = step(self.parameters, token_B, position_B, is_live_B, cache)
            logits.append(np.asarray(logits_BV))
        return np.stack(logits, axis=1)

    def chunk_logits(self, chunk: int = 8) -> np.ndarray:
        """Return the logits of every position, computed in chunks.

        Slots are not in the order of rows; a row without tokens is none, and has no slot.
        """
        cache, tokens_BT = self._empty_cache(), self.padded_prompts(ROW_PAGES * PAGE)
        slot_B, logits = np.array([2, 0, 1]), []
        for start in range(0, max(TRUE_LENGTHS), chunk):
            count_B = np.clip(np.asarray(TRUE_LENGTHS) - start, 0, chunk)
            slots_B = np.where(count_B, slot_B, len(slot_B))
            rows = PromptPieces(
                slots_B, np.full_like(slot_B, start), count_B, page_BN=self._pages(slots_B)
            )
            logits_BTV, cache = self._prefill(tokens_BT[:, start : start + chunk], rows, cache)
            logits.append(np.asarray(logits_BTV))
        return np.concatenate(logits, axis=1)

    def _prefill_prompts(self, bucket_length: int, count: int) -> tuple[jax.Array, Cache]:
        """Prefill the first `count` tokens as a prompt; return logits and the cache."""
        count_B = np.minimum(TRUE_LENGTHS, count)
        slot_B = np.arange(len(count_B))
        rows = PromptPieces(slot_B, None, count_B, page_BN=self._pages(slot_B))
        return self._prefill(self.padded_prompts(bucket_length), rows, self._empty_cache())

    def _empty_cache(self) -> Cache:
        B, definition = len(TRUE_LENGTHS), self.definition
        counts, dtype = PageCounts(B * ROW_PAGES, PAGE, B, PAGED.window_pages), jnp.dtype("float32")
        return allocate_pages(definition.config, counts, dtype, arrangement=definition.arrangement)

    def _pages(self, slot_B: np.ndarray) -> np.ndarray:
        """Return the pages of slots, which lie between those of other slots.

        No page has a number for a slot that does not exist.
        """
        B = len(TRUE_LENGTHS)
        page_BN = np.arange(B * ROW_PAGES, dtype=np.int32)[::-1].reshape(ROW_PAGES, B).T
        return np.concatenate([page_BN, np.full_like(page_BN[:1], page_BN.size)])[slot_B]

    @cached_property
    def _prefill(self) -> Callable[..., tuple[jax.Array, Cache]]:
        """A compiled prefill of prompt pieces; it returns logits and the cache."""

        @jax.jit
        def prefill(parameters, tokens_BT, rows, cache):
            decoder = self.definition.bind(parameters)
            x_BTD, cache, _ = decoder.prefill(tokens_BT, rows, cache, ON_ONE_DEVICE)
            return decoder.logits(x_BTD), cache

        return partial(prefill, self.parameters)

    def padded_prompts(self, length: int) -> jax.Array:
        # padding is an ordinary token, so that the results change if padding is read
        tokens = np.full((len(self.prompts), length), 7, np.int32)
        for row, prompt in zip(tokens, self.prompts, strict=True):
            row[: min(len(prompt), length)] = prompt[:length]
        return jnp.asarray(tokens)

    def assert_close(self, logits_BTV: np.ndarray, first: int = 0) -> None:
        """Compare the positions from `first` to the end of each prompt."""
        logprobs_BTV = np.asarray(jax.nn.log_softmax(jnp.asarray(logits_BTV), axis=-1))
        for row_TV, expected_TV in zip(logprobs_BTV, self.reference, strict=True):
            true_length = len(expected_TV)
            np.testing.assert_allclose(
                row_TV[: max(true_length - first, 0)],
                expected_TV[first:],
                rtol=0,
                atol=FLOAT32_MODEL_LOGPROB,
            )


PREFILLED_ALONE = {
    "command-r-biases-linear",
    "command-r-odd-heads",
    "deepseek-v2-linear",
    "deepseek-v2-mscales-differ",
    "deepseek-v3-attention-factor",
    "deepseek-v3-mscale-alone",
    "gemma2-biases-uncapped",
    "gemma2-odd-heads",
    "gemma3-biases-capped",
    "gemma3-odd-heads",
    "gpt-oss-all-chosen-linear",
    "granite-all-heads",
    "granite-biases-yarn",
    "granite-linear",
    "granite-odd-heads-linear",
    "llama-3.2-new",
    "llama-biases-yarn",
    "llama-linear",
    "mistral-head-dim",
    "mistral-odd-heads-tied",
    "olmo2-32b-biases-yarn",
    "olmo2-linear",
    "olmo2-odd-heads",
    "phi3-mini-4k",
    "qwen2-odd-heads",
    "qwen3-biases-linear",
    "qwen3-odd-heads",
}
"""Models that differ from another of their family in biases, factors, the number of heads or rope's
frequencies. Prefill shows them; decode calls the same functions, and others of their family, which
have windows and caps, and others with such a rope decode."""
OF_OTHERS = {
    "deepseek-moe",
    "ernie4.5",
    "exaone4-no-window",
    "flex-olmo",
    "gemma-2b-biases",
    "granite-moe-shared",
    "granite4-dense-unrotated",
    "granite4-moe-rotated",
    "helium-biases",
    "internlm2-biases",
    "kimi-k2",
    "mimo",
    "minicpm",
    "ministral-8b",
    "olmo3-by-kind-biases",
    "orion",
    "seed-oss-biases",
    "solar-open",
    "starcoder2",
    "vaultgemma",
    "cwm",
}
"""Families whose blocks have options of other families. Prefill shows that they are read; decode
calls the same functions, and others decode with these options."""
STORED_OTHERWISE = {
    "granite-moe-many-fused",
    "granite-moe-one-choice-linear",
    "mixtral-all-chosen",
    "mixtral-many-fused",
    "olmoe-one-choice",
    "olmoe-many-fused-linear",
    "qwen3-moe-many-fused-yarn",
}
"""Sparse models whose experts are saved in another form, or are chosen otherwise. Prefill shows
that they are read and chosen; decode calls the same functions, and each family has other models
that decode."""
WITH_SLOW = {
    "command-r-odd-heads",
    "gemma2-odd-heads",
    "gemma3-odd-heads",
    "granite-all-heads",
    "mistral-head-dim",
    "olmo2-odd-heads",
    "qwen2-odd-heads",
    "qwen3-odd-heads",
}
"""Models of slow runs, which differ from others of their family in the number or size of heads
alone. Every run has "llama-3.2-new" and other families with such heads."""
IN_CHUNKS = {"llama-2", "mistral-window", "llama4-scout", "deepseek-v2-lite", "gpt-oss"}


DEEPER = {
    "smollm2": 5,
    "gemma2": 5,
    "qwen3-moe": 3,
    "qwen3-moe-each-second-all-chosen-biases": 6,
    "deepseek-v3": 4,
    "gpt-oss": 5,
    "llama4-maverick-alternating": 4,
    "llama4-scout": 8,
}
"""Layers of cases that are scanned: of one kind, of two with one left over, after a dense one; of
four with `--slow`, as those of one family that others scan, too, have two kinds."""
SCANNED_BY_OTHERS = {"smollm2", "llama4-scout"}
"""Scanned cases of slow runs: "qwen3-moe" has layers of one kind, and "llama4-maverick-alternating"
those of the other family. Tests of layouts scan dense layers of one kind."""
SCANNED_IN_CHUNKS = {"gemma2", "gpt-oss", "deepseek-v3", "llama4-maverick-alternating"}
"""Scanned cases that take chunks in every run: one for each kind of layer cache."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] * (name in SCANNED_BY_OTHERS), id=name)
        for name in DEEPER
    ],
)
def scanned(request, tmp_path_factory) -> LoadedCase:
    name = request.param
    (case,) = (case for case in CASES if case.name == name)
    case = replace(case, options=case.options | {"num_hidden_layers": DEEPER[name]})
    return LoadedCase(case, tmp_path_factory.mktemp(name), Arrangement(scan_layers=True))


@pytest.fixture(scope="module")
def is_slow(request) -> bool:
    return bool(request.config.getoption("--slow") or request.config.getoption("--slow-part"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name in WITH_SLOW))
        for case in CASES
    ],
)
def loaded(request, tmp_path_factory) -> LoadedCase:
    return LoadedCase(request.param, tmp_path_factory.mktemp(request.param.name))


@pytest.mark.parametrize("bucket_length", [BUCKET_LENGTH, pytest.param(40, marks=pytest.mark.slow)])
def test_prefill_gives_the_logprobs_of_transformers(loaded: LoadedCase, bucket_length: int):
    loaded.assert_close(loaded.prefill_logits(bucket_length))


def test_decoding_token_by_token_gives_the_logprobs_of_transformers(
    loaded: LoadedCase, is_slow: bool
):
    if loaded.case.name in PREFILLED_ALONE | OF_OTHERS | STORED_OTHERWISE and not is_slow:
        pytest.skip("slow; run with --slow")
    loaded.assert_close(loaded.decode_logits(first=5), first=5)


def test_scanned_layers_give_the_logprobs_of_transformers(scanned: LoadedCase, is_slow: bool):
    """Published tensors are read layer by layer into one array for each group position."""
    assert any(":" in name for name in scanned.parameters)
    scanned.assert_close(scanned.prefill_logits(BUCKET_LENGTH))
    scanned.assert_close(scanned.decode_logits(first=5), first=5)
    if is_slow or scanned.case.name in SCANNED_IN_CHUNKS:
        scanned.assert_close(scanned.chunk_logits())


def test_prefill_in_chunks_gives_the_logprobs_of_transformers(loaded: LoadedCase, is_slow: bool):
    """Every run tests one family for each kind of layer cache; `--slow` tests the others."""
    if not (is_slow or loaded.case.name in IN_CHUNKS):
        pytest.skip("slow; run with --slow")
    loaded.assert_close(loaded.chunk_logits())


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
@pytest.mark.cpu_kernels
@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
def test_weights_in_panels_give_the_logprobs_of_transformers(family, tmp_path, monkeypatch):
    """All products of weights in panels are those of kernels, and no family has none."""
    with kernels_loaded():
        monkeypatch.setattr(PackedWeight, "plain", lambda self: pytest.fail("not by a kernel"))
        case = next(case for case in CASES if case.family == family)
        loaded = LoadedCase(case, tmp_path, Arrangement(panel_columns=panel_columns()))
        assert loaded.definition.packed
        # a lookup reads a row of a table faster than a column of panels
        is_head = loaded.definition.config.tie_embeddings
        assert ("embedding.table" in loaded.definition.packed) == is_head
        loaded.assert_close(loaded.prefill_logits(BUCKET_LENGTH))
        loaded.assert_close(loaded.decode_logits(first=20), first=20)
        narrow = loaded.definition.abstract_parameters(jnp.bfloat16)
        count_B, slot_B = np.asarray(TRUE_LENGTHS), np.arange(len(TRUE_LENGTHS))
        rows = PromptPieces(slot_B, None, count_B, page_BN=loaded._pages(slot_B))
        tokens_BT, cache = loaded.padded_prompts(BUCKET_LENGTH), loaded._empty_cache()
        # a product that no kernel serves fails while it is traced
        jax.eval_shape(loaded._prefill.func, narrow, tokens_BT, rows, cache)


def test_every_family_has_a_case():
    assert {case.family for case in CASES} == {family.name for family in FAMILIES}
