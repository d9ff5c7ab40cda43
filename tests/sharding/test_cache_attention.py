"""Chunks over a cache that is split over devices: both methods give the answer of one device."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tolerances import FLOAT32_ELEMENTWISE

from noria.modelzoo.attention.attend import attend_dense, with_sinks
from noria.modelzoo.attention.blockwise import attend_blockwise
from noria.modelzoo.attention.segment_attention import Entries, attend_segments
from noria.modelzoo.cache.layer_state import PromptLatents
from noria.modelzoo.cache.state_spec import KeysAndValues
from noria.modelzoo.cache.stripes import EMPTY_POSITION, Stripes, entry_positions
from noria.modelzoo.layer_config import PLAIN_SCORES, Chunk, Scores, Window
from noria.modelzoo.operations import ON_ONE_DEVICE, Operations
from noria.sharding import cache_attention
from noria.sharding.cache_attention import attend_sharded_chunk, gather_queries, pass_entries
from noria.sharding.ring_attention import num_ring_steps

AXES = ("sequence",)
B, T, K, G, H = 2, 16, 2, 3, 4
START_B, COUNT_B = np.array([24, 8]), np.array([16, 9])
SPANS, RING = (16, 16), (8,)
"""Segment sizes of a whole layer, and of a layer with a window of at most 8."""
SMALL_BLOCKS = partial(attend_blockwise, query_block=4, block_scores=20)


class Case(NamedTuple):
    """The options of one attention layer."""

    window: Window = None
    scores: Scores = PLAIN_SCORES
    has_sinks: bool = False
    keeps_latents: bool = False


CASES = {
    "causal": Case(),
    "window": Case(window=3),
    "chunks": Case(window=Chunk(6)),
    "sinks": Case(window=8, has_sinks=True),
    "cap": Case(scores=Scores(0.9, 0.7)),
    "latents": Case(keeps_latents=True),
}


class Inputs(NamedTuple):
    """A chunk and the entries of its slots, in the order of tokens or in stripes."""

    q_BTKGH: np.ndarray
    position_BT: np.ndarray
    entries: tuple[KeysAndValues, ...]
    key_position_BS: tuple[np.ndarray, ...]

    def in_stripes(self, n: int) -> "Inputs":
        permute = Stripes(n).permute
        entries = tuple((permute(k_BKHS, 3), permute(v_BKSH, 2)) for k_BKHS, v_BKSH in self.entries)
        keys = tuple(permute(x, 1) for x in self.key_position_BS)
        return Inputs(permute(self.q_BTKGH, 1), permute(self.position_BT, 1), entries, keys)


def inputs(case: Case) -> Inputs:
    """Return two rows: one is full and begins in mid-segment, the other has padding."""
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    position_BT = START_B[:, None] + np.arange(T)[None]
    own_BT = np.where(np.arange(T)[None] < COUNT_B[:, None], position_BT, EMPTY_POSITION)
    sizes = SPANS if case.window is None else RING
    held_BS = np.stack([entry_positions(start, sum(sizes)) for start in START_B])
    keys = (*np.split(held_BS, np.cumsum(sizes)[:-1], axis=1), own_BT)
    if case.keeps_latents:
        latents = tuple(PromptLatents(random(B, size, H)).read() for size in (*sizes, T))
        return Inputs(random(B, T, K * G, 1, H), position_BT, latents, keys)
    entries = tuple((random(B, K, H, size), random(B, K, size, H)) for size in (*sizes, T))
    return Inputs(random(B, T, K, G, H), position_BT, entries, keys)


def attend_layer(
    case: Case, made: Inputs, operations: Operations = ON_ONE_DEVICE, attend=attend_dense
) -> jax.Array:
    sink_KG = None
    if case.has_sinks:
        sink_KG = jnp.asarray(np.random.default_rng(1).normal(size=(K, G)), jnp.float32)
    attend_entries = partial(attend_segments, partial(attend, scores=case.scores), case.window)
    attend_all = operations.over_cache(attend_entries, case.window)
    entries = Entries(list(made.entries), made.key_position_BS)
    position_BT = jnp.asarray(made.position_BT)
    attended = attend_all(made.q_BTKGH, position_BT, entries)
    return with_sinks(*attended, sink_KG).reshape(*made.q_BTKGH.shape[:-1], -1)


@cache
def mesh(n: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:n]), AXES)


class OverRing(Operations):
    """Operations on a cache that a ring splits; `way` is the method of attention."""

    def __init__(self, way):
        self._way = way

    def over_cache(self, attend, window):
        return partial(self._way, attend, AXES, window)


def by_queries(attend, mesh_axes, window, *arrays):
    return gather_queries(attend, mesh_axes, *arrays)


def by_entries(attend, mesh_axes, window, q_BTKGH, *arrays):
    n = jax.lax.axis_size(mesh_axes)
    num_steps = num_ring_steps(window, n)
    return pass_entries(attend, mesh_axes, num_steps, q_BTKGH, *arrays)


def on_a_ring(case: Case, made: Inputs, n: int, way, attend=attend_dense) -> jax.Array:
    """Run a case on a ring: devices have a stripe of each array, and all queries' positions."""
    made = made.in_stripes(n)
    in_stripes = {1: P(None, "sequence"), 2: P(None, None, "sequence")}
    in_stripes[3] = P(None, None, None, "sequence")
    entry_specs = tuple((in_stripes[3], in_stripes[2]) for _ in made.entries)
    key_specs = tuple(in_stripes[1] for _ in made.key_position_BS)
    over = jax.shard_map(
        lambda made: attend_layer(case, made, OverRing(way), attend),
        mesh=mesh(n),
        in_specs=(Inputs(in_stripes[1], P(), entry_specs, key_specs),),
        out_specs=in_stripes[1],
        check_vma=False,
    )
    return Stripes(n).restore(over(made), 1)


@pytest.mark.parametrize(
    ("n", "name"),
    [
        pytest.param(n, name, marks=[pytest.mark.slow] * (n != 4))
        for n in (2, 4, 8)
        for name in CASES
    ],
)
def test_a_chunk_attends_in_either_way_as_on_one_device(n, name):
    """A row begins in the second of two segments; heads are grouped; a row has padding."""
    case = CASES[name]
    made = inputs(case)
    expected = jax.jit(partial(attend_layer, case))(made)
    ways = (by_queries, by_entries)
    got = jax.jit(lambda made: [on_a_ring(case, made, n, way) for way in ways])(made)
    is_token_BT = np.arange(T)[None] < COUNT_B[:, None]
    for ours in got:
        np.testing.assert_allclose(
            ours[is_token_BT], expected[is_token_BT], rtol=0, atol=FLOAT32_ELEMENTWISE
        )


def test_either_way_goes_block_by_block():
    """The blocks do not divide any device's part."""
    case = CASES["causal"]
    made = inputs(case)
    expected = jax.jit(partial(attend_layer, case))(made)
    for way in (by_queries, by_entries):
        got = jax.jit(partial(on_a_ring, case, n=4, way=way, attend=SMALL_BLOCKS))(made)
        np.testing.assert_allclose(got, expected, rtol=0, atol=FLOAT32_ELEMENTWISE)


def chosen(monkeypatch, *, chunk: int, span: int, window: Window = None, queries: int = G) -> str:
    """Return the chosen method for a chunk and a cache of one segment, on four devices."""
    found = []
    for name in ("pass_entries", "gather_queries"):
        monkeypatch.setattr(cache_attention, name, lambda *x, name=name: found.append(name))

    def trace(q_BTKGH, entries):
        attend_sharded_chunk(
            lambda q_BTKGH, position_BT, entries: (q_BTKGH, q_BTKGH[..., 0]),
            AXES,
            window,
            q_BTKGH,
            jnp.zeros((1, 4 * chunk), jnp.int32),
            entries,
        )
        return q_BTKGH

    over = jax.shard_map(trace, mesh=mesh(4), in_specs=P(), out_specs=P(), check_vma=False)
    k_BKHS = jax.ShapeDtypeStruct((1, K, H, chunk + span), jnp.bfloat16)
    q_BTKGH = jax.ShapeDtypeStruct((1, chunk, K, queries, H), jnp.bfloat16)
    jax.eval_shape(over, q_BTKGH, (k_BKHS, k_BKHS))
    (way,) = found
    return way


def test_what_sends_less_is_chosen_by_chunk_span_and_heads(monkeypatch):
    choose = partial(chosen, monkeypatch)
    assert choose(chunk=8, span=8) == "pass_entries"
    assert choose(chunk=8, span=64) == "gather_queries"
    assert choose(chunk=64, span=64) == "pass_entries"
    assert choose(chunk=8, span=64, queries=16) == "pass_entries"
    # the window reaches two of four devices
    assert choose(chunk=8, span=64, window=2) == "pass_entries"


def test_bytes_of_either_way_are_those_of_what_is_sent():
    """On eight devices, bfloat16 entries of 8 heads compete with float32 results of 64 heads."""
    of_entries = 2 * (16 * 8 * 128 * 2) + 16 * 4
    of_queries, of_lse = 16 * 64 * 128 * 2, 16 * 64 * 4
    assert cache_attention.entry_bytes(of_entries, 8) == 7 * (65536 + 64)
    assert cache_attention.entry_bytes(of_entries, 1) == 0
    gathered, maximum, scattered = 7 * of_queries, 2 * 7 * of_lse, 7 * 129 * of_lse
    assert cache_attention.query_bytes(of_queries, of_lse, 128, 8) == gathered + maximum + scattered
