"""Prompts in pieces: every division gives the same cache, and hides what pages held before."""

from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import alike, changed
from caches import decode, empty_cache, entries_of, scattered
from tiny import random_parameters
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.attention.prompt_pieces import PromptPieces, write_pieces
from noria.modelzoo.attention.shared_pages import SlotPages
from noria.modelzoo.cache.layer_state import Cache, LayerState, PromptKeysValues
from noria.modelzoo.cache.pages import NO_PAGE
from noria.modelzoo.cache.state_spec import state_spec
from noria.modelzoo.config import AS_PUBLISHED, Arrangement, DecoderConfig
from noria.modelzoo.latent_config import LatentAttention
from noria.modelzoo.layer_config import Chunk
from noria.modelzoo.layer_groups import block_layers, single_layer_names
from noria.modelzoo.operations import ON_ONE_DEVICE

HEADS = DecoderConfig.alike(
    vocab_size=41,
    embed=16,
    mlp=24,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    windows=(None, 3, Chunk(5)),
    max_position=32,
)
"""A model with whole layers, and layers with windows that are shorter than most prompts."""
LATENT = LatentAttention(rank=10, plain_dim=6, rope_dim=4, value_dim=7)
CONFIGS = {
    "heads": HEADS,
    "latents": changed(HEADS, num_kv_heads=4, head_dim=LATENT.head_dim, latent=LATENT),
}
SCANNED = Arrangement(scan_layers=True)
WIDE = Arrangement(head_multiple=16)
LONGEST = 24
LENGTHS = np.arange(1, LONGEST - 3)
"""Lengths of the prompts; each prompt has its own slot."""
SLOTS = len(LENGTHS)
STEPS = 4
IN_CHUNKS = [*range(0, 24, 4), 24]
UNEVENLY, LARGEST = [0, 4, 8, 16, 24], 8
"""Pieces shorter and longer than a window; each begins at a multiple of its size."""
PAGES, OTHER_PAGES = (scattered(SLOTS, LONGEST // 4, seed) for seed in (0, 1))
WHOLE = None


class Model:
    """One decoder, and compiled steps over all slots."""

    def __init__(self, config: DecoderConfig, arrangement: Arrangement = AS_PUBLISHED):
        self.config, self.arrangement = config, arrangement
        definition, parameters = (
            AbstractModel(config, arrangement),
            parameters_of(config, arrangement),
        )

        @jax.jit
        def prefill(parameters, tokens_BT, rows, cache):
            decoder = definition.bind(parameters)
            x_BTD, cache, _ = decoder.prefill(tokens_BT, rows, cache, ON_ONE_DEVICE)
            return decoder.logits(x_BTD), cache

        @jax.jit
        def step(parameters, token_B, position_B, cache):
            call = token_B, position_B, cache, jnp.ones(SLOTS, bool), SlotPages(jnp.asarray(PAGES))
            return decode(definition.bind(parameters), *call)[:2]

        self._prefill, self._decode = partial(prefill, parameters), partial(step, parameters)

    def empty(self, row_tokens: int | None = None) -> Cache:
        return empty_cache(self.config, PAGES, row_tokens=row_tokens, arrangement=self.arrangement)

    def prefill(
        self,
        cache: Cache,
        tokens_BT,
        length_B,
        cuts=WHOLE,
        page_BN=PAGES,
        *,
        decodes_between=False,
    ):
        """Return logits of every position, and the cache.

        Where decode goes on between chunks, it writes to every slot at its next position.
        """
        page_BN = np.concatenate([page_BN, np.full_like(page_BN[:1], NO_PAGE)])
        logits = []
        for start, end in pairwise(cuts or [0, int(length_B.max())]):
            count_B = np.clip(length_B - start, 0, end - start)
            # a row without tokens has no slot
            slot_B = np.where(count_B, np.arange(SLOTS), SLOTS)
            start_B = None if cuts is WHOLE else np.full(SLOTS, start)
            pieces = PromptPieces(slot_B, start_B, count_B, page_BN[slot_B])
            rows = jax.tree.map(jnp.asarray, pieces)
            logits_BTV, cache = self._prefill(tokens_BT[:, start:end], rows, cache)
            logits.append(np.asarray(logits_BTV))
            if decodes_between:
                _, cache = self.decode(cache, jnp.full(SLOTS, 7), np.minimum(length_B, end))
        return np.concatenate(logits, axis=1), cache

    def decode(self, cache: Cache, token_B, position_B):
        return self._decode(token_B, jnp.asarray(position_B), cache)


def parameters_of(config: DecoderConfig, arrangement: Arrangement) -> dict[str, jax.Array]:
    """The same layers in both arrangements."""
    single = random_parameters(AbstractModel(config))
    if arrangement == AS_PUBLISHED:
        return single
    found = {}
    for name in AbstractModel(config, arrangement).abstract_parameters(jnp.float32):
        layers = [single[one] for one in single_layer_names(name)]
        found[name] = jnp.stack(layers) if ":" in name else layers[0]
    return found


model = cache(Model)


def in_turns(config: DecoderConfig, arrangement: Arrangement) -> DecoderConfig:
    """Return the model with its layers twice where they are scanned: the loop has two turns."""
    return changed(config, windows=alike(config).windows * (2 if arrangement.scan_layers else 1))


def random_tokens(seed: int) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, HEADS.vocab_size, (SLOTS, LONGEST)), jnp.int32)


def meeting(
    cases: dict[str, tuple[Arrangement, list[int] | None]], slow: set[tuple[str, str]]
) -> pytest.MarkDecorator:
    """Parametrize over configs and cases: without `slow`, every two of the facts meet."""
    params = [
        pytest.param(
            config, *case, id=f"{kind}-{name}", marks=[pytest.mark.slow] * ((kind, name) in slow)
        )
        for name, case in cases.items()
        for kind, config in CONFIGS.items()
    ]
    return pytest.mark.parametrize(("config", "arrangement", "cuts"), params)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("cuts", [WHOLE, IN_CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_nothing_is_seen_of_a_former_owner(config, cuts):
    """Earlier rows had the pages in another order, and other lengths; all positions are tested."""
    one, tokens_BT = model(config), random_tokens(1)
    former_B, former = LONGEST - np.arange(SLOTS) % 4, random_tokens(2)
    _, used = one.prefill(one.empty(LARGEST), former, former_B, IN_CHUNKS, OTHER_PAGES)
    expected, fresh = one.prefill(one.empty(LARGEST), tokens_BT, LENGTHS, cuts)
    got, used = one.prefill(used, tokens_BT, LENGTHS, cuts, decodes_between=cuts is not WHOLE)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_array_equal(got[row, :length], expected[row, :length])
    for step in range(STEPS):
        expected_BV, fresh = one.decode(fresh, tokens_BT[:, step], LENGTHS + step)
        got_BV, used = one.decode(used, tokens_BT[:, step], LENGTHS + step)
        np.testing.assert_array_equal(got_BV, expected_BV)


@meeting(
    {
        "chunks": (AS_PUBLISHED, IN_CHUNKS),
        "uneven chunks": (AS_PUBLISHED, UNEVENLY),
        "scanned, whole": (SCANNED, WHOLE),
        "scanned, uneven chunks": (SCANNED, UNEVENLY),
    },
    slow={
        ("heads", "chunks"),
        ("latents", "uneven chunks"),
        ("heads", "scanned, whole"),
        ("latents", "scanned, uneven chunks"),
    },
)
def test_a_cache_is_the_same_however_prompts_come_in(config, arrangement, cuts):
    """The reference is whole prompts through unrolled layers, entry by entry."""
    config = in_turns(config, arrangement)
    whole, other, tokens_BT = model(config), model(config, arrangement), random_tokens(1)
    expected = live_entries(whole, whole.prefill(whole.empty(), tokens_BT, LENGTHS)[1])
    got = live_entries(other, other.prefill(other.empty(), tokens_BT, LENGTHS, cuts)[1])
    for arrays, expected_arrays in zip(got, expected, strict=True):
        for array, wanted in zip(arrays, expected_arrays, strict=True):
            np.testing.assert_allclose(array, wanted, rtol=0, atol=FLOAT32_MODEL_LOGPROB)


@meeting(
    {
        "wide heads, whole": (WIDE, WHOLE),
        "wide heads, uneven chunks": (WIDE, UNEVENLY),
        "wide heads, scanned, whole": (replace(WIDE, scan_layers=True), WHOLE),
    },
    slow={("heads", "wide heads, whole"), ("latents", "wide heads, uneven chunks")},
)
def test_a_cache_arranged_otherwise_gives_the_same_answers(config, arrangement, cuts):
    config, tokens_BT, found = in_turns(config, arrangement), random_tokens(2), []
    for one in (model(config), model(config, arrangement)):
        logits_BTV, cache = one.prefill(one.empty(LARGEST), tokens_BT, LENGTHS, cuts)
        is_token_BT = np.arange(logits_BTV.shape[1]) < LENGTHS[:, None]
        logits = [logits_BTV[is_token_BT]]
        for step in range(STEPS):
            logits_BV, cache = one.decode(cache, jnp.full(SLOTS, 3 + step), LENGTHS + step)
            logits.append(np.asarray(logits_BV))
        found.append(logits)
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=FLOAT32_MODEL_LOGPROB)


def test_pieces_of_one_call_share_a_page_of_codes_and_keep_what_it_had():
    """Three pieces of a row, one of another row with NaN, and one without pages, in a used pool."""
    page, piece, layer = 16, 4, 1
    spec = state_spec(HEADS.layers[0].attention, "float32", Arrangement(cache_codes="int8"))
    pages = {name: array.shape(2, 5, page) for name, array in spec.arrays.items()}
    rng = np.random.default_rng(0)
    used = {name: rng.integers(1, 99, shape) for name, shape in pages.items()}
    arrays = {name: jnp.asarray(x, spec.arrays[name].dtype) for name, x in used.items()}
    k, v = rng.normal(size=(2, 5, 2, piece, 8)).astype(np.float32)
    v[3, 1, 2] = np.nan
    new = PromptKeysValues(jnp.asarray(k.swapaxes(2, 3)), jnp.asarray(v))
    page_BN = np.array([[4, 2], [4, 2], [4, 2], [1, 3], [NO_PAGE, NO_PAGE]])
    first_B = np.array([4, 12, 16, 8, 0])
    expected = {name: np.array(x) for name, x in arrays.items()}
    for name, x in spec.encode(new).items():
        for b in range(4):
            at = expected[name][layer, page_BN[b, first_B[b] // page]]
            entries = slice(first_B[b] % page, first_B[b] % page + piece)
            at.swapaxes(0, spec.arrays[name].position_axis - 2)[entries] = np.asarray(x)[
                b
            ].swapaxes(0, spec.arrays[name].position_axis - 2)
    state = LayerState(arrays, spec)
    written = write_pieces(state, new, jnp.asarray(page_BN), jnp.asarray(first_B), layer)
    for name, wanted in expected.items():
        np.testing.assert_array_equal(written.arrays[name], wanted)
    assert np.isnan(expected["v_scale"]).sum() == 1


def live_entries(one: Model, cache: Cache) -> list[list[np.ndarray]]:
    """Return the entries of each layer in order, with zeros where a row has no token."""
    found = {}
    is_live_BS = np.arange(LONGEST) < LENGTHS[:, None]
    for layers, kept in zip(block_layers(one.config, one.arrangement), cache, strict=True):
        assert kept is not None
        for index, layer in enumerate(layers):
            arrays = []
            for name, x in entries_of(kept, PAGES, np.arange(SLOTS), index).items():
                axis = kept.spec.arrays[name].position_axis - 1
                shape = [SLOTS, *[1] * (x.ndim - 1)]
                shape[axis] = LONGEST
                arrays.append(np.where(is_live_BS.reshape(shape), x, 0))
            found[layer] = arrays
    return [found[layer] for layer in range(one.config.num_layers)]
