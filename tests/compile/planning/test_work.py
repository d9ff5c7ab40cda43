"""The work of graphs, against what the compiler counts and against sums by hand."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from alike import changed
from decode_steps import step_of
from planning_models import PLAIN, SPARSE, work_of
from tiny import CONFIG

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import compile_graph, plan_graphs
from noria.compile.graphs.graph_kinds import call_of
from noria.compile.graphs.signatures import decode_state
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefill_bucket import PrefillBucket
from noria.compile.planning.work import Work, sent_by_axes
from noria.compile.targets import find_target
from noria.sharding.call import Call
from noria.sharding.layout import Layout


def part(work: Work, call: Call, name: str):
    return next(part for part in work.parts(call) if part.name == name)


@pytest.mark.parametrize("config", [PLAIN, CONFIG], ids=["plain", "windows"])
def test_operations_are_near_those_that_the_compiler_counts(config):
    """One slot has one page, as the compiler counts loops over slots or pages as one turn."""
    grid = BucketGrid(64, ((32, 4),), 1, page=64)
    placement = find_target("cpu").placement()
    work, kinds = work_of(config), {"prefill", "decode"}
    for graph in plan_graphs(AbstractModel(config), grid, placement, jnp.dtype("float32")):
        if graph.key.kind not in kinds:
            continue
        kinds.remove(graph.key.kind)
        call = call_of(grid, graph.key)
        compiled, _ = compile_graph(graph)
        counted = compiled.cost_analysis()["flops"]
        ours = sum(part.flops for part in work.parts(call))
        # the compiler also counts norms, softmax and sampling, a large part of a tiny model
        assert 0.5 * counted < ours <= counted
    assert not kinds


def test_products_are_two_operations_a_weight_and_token():
    layer = 64 * 16 * (8 + 2 * 2) + 8 * 16 * 64 + 3 * 64 * 160
    expected = 2 * 5 * 7 * 3 * layer
    found = part(work_of(PLAIN), Call("prefill", 5, 7, 7), "products")
    assert found.flops == expected


def test_attention_of_a_step_reads_the_cache_once():
    work = work_of(PLAIN)
    found = part(work, step_of(4, 128), "attention")
    assert found.bytes == work.page_bytes(4 * 128) == 4 * 128 * 3 * 2 * 2 * 16 * 4
    assert work.entry_bytes == 2 * 2 * 16 * 4
    assert found.flops == 2 * 4 * 128 * 3 * 8 * 2 * 16


def test_a_step_needs_each_weight_once_the_entries_that_it_reads_and_its_logits():
    layer = 64 * 16 * (8 + 2 * 2) + 8 * 16 * 64 + 3 * 64 * 160
    head, work = 512 * 64, work_of(PLAIN)
    found = work.needed(step_of(4, 128))
    assert found.weights == (3 * layer + head) * 4
    assert (found.experts, found.cache) == (0, work.page_bytes(4 * 128))
    assert found.logits == 2 * 4 * 512 * 4
    assert found.total == found.weights + found.cache + found.logits
    assert work.needed(step_of(4, 64)).cache == work.page_bytes(4 * 64)


def test_a_step_needs_the_experts_that_its_tokens_choose_if_routing_is_uniform():
    experts = 3 * 8 * 3 * 64 * 96 * 4
    for tokens in (1, 4, 1000):
        chosen = 1 - (1 - 2 / 8) ** tokens
        found = work_of(SPARSE).needed(step_of(tokens, 128)).experts
        assert found == pytest.approx(chosen * experts)


def test_a_prompt_needs_room_for_the_entries_that_it_fills():
    work = work_of(PLAIN)
    assert work.needed(Call("prefill", 4, 32, 32)).cache == work.page_bytes(4 * 32)
    windowed = work_of(changed(PLAIN, windows=(16, None, 16)))
    assert windowed.needed(Call("prefill", 4, 32, 32)).cache == work.page_bytes(4 * 32)


def test_a_window_bounds_what_a_step_attends_to():
    windowed = changed(PLAIN, windows=(16, None, 16))
    spans = [part(work_of(windowed), step_of(1, span), "attention").flops for span in (64, 96)]
    per_entry = 2 * 8 * 2 * 16
    assert spans == [(16 + 64 + 16) * per_entry, (16 + 96 + 16) * per_entry]


def test_longer_prompts_cost_attention_more_than_their_share_and_products_exactly_it():
    work = work_of(PLAIN)
    short, long = (PrefillBucket(length, 1).call() for length in (1024, 2048))
    assert part(work, long, "products").flops == 2 * part(work, short, "products").flops
    ratio = part(work, long, "attention").flops / part(work, short, "attention").flops
    assert 3 < ratio < 4


def test_scored_prompts_have_logits_for_every_token():
    work = work_of(PLAIN)
    plain, scored = (
        part(work, Call("prefill", 2, 8, 8, is_scored), "logits").flops
        for is_scored in (False, True)
    )
    assert scored == 8 * plain


def test_experts_are_read_as_far_as_tokens_choose_them():
    work = work_of(SPARSE)
    one, many = (part(work, step_of(rows, 64), "experts") for rows in (1, 256))
    everything = 3 * 8 * 3 * 64 * 96 * 4
    assert one.bytes == pytest.approx(everything * 2 / 8, rel=0.01)
    assert many.bytes == pytest.approx(everything, rel=0.01)
    least = 2 * 256 * 2 * 3 * 3 * 64 * 96
    assert least <= many.flops < 1.3 * least


def test_devices_share_the_work_and_say_what_they_send():
    table = {
        "name": "weight-stationary-1d",
        "mesh": {"tensor": 2},
        "rules": {"query_heads": "tensor", "mlp": "tensor", "vocab": "tensor"},
    }
    layout = Layout.from_table(table)
    alone, shared = work_of(PLAIN), work_of(PLAIN, layout)
    call = Call("prefill", 4, 32, 32)
    for name in ("attention", "logits"):
        assert part(shared, call, name).flops == part(alone, call, name).flops / 2
    assert part(shared, call, "products").flops == pytest.approx(
        part(alone, call, "products").flops / 2, rel=0.02
    )
    # two sums of the residual stream in each of three layers, of which a ring of two sends all
    residual = 4 * 32 * 64 * 4
    assert part(shared, call, "exchanges").sent == {("all-reduce", ("tensor",)): 3 * 2 * residual}
    assert all(part.name != "exchanges" for part in alone.parts(call))


def test_parts_that_only_move_bytes_have_no_operations():
    layout = Layout.from_table({"name": "l", "mesh": {"tensor": 2}, "rules": {"mlp": "tensor"}})
    parts = {found.name: found for found in work_of(PLAIN, layout).parts(step_of(4, 64))}
    assert parts["activations"].flops == parts["exchanges"].flops == 0


def test_a_chunk_on_a_ring_sends_its_queries_and_entries_and_merges_its_results():
    """Two devices gather queries of 8 heads of 16 and entries of 2 heads for each token and layer.

    They sum a maximum, results and their weights, of which each device sends all.
    """
    table = {
        "name": "ring",
        "mesh": {"sequence": 2},
        "prefill": {"rules": {"length": "sequence"}},
        "decode": {"rules": {"cache_length": "sequence"}},
    }
    work = work_of(PLAIN, Layout.from_table(table))
    gathered, merged = (8 + 2 * 2) * 16 * 4 / 2, 8 * (1 + 16 + 1) * 4
    for entries in (256, 1024):
        call = Call("chunk", 4, 32, 256, entries=entries, page=16)
        sent = sent_by_axes([part(work, call, "exchanges").sent])
        assert sent == {"sequence": 3 * 4 * 32 * (gathered + merged)}


def test_gathered_weights_are_written_and_read_whole():
    table = {
        "name": "gathered",
        "mesh": {"data": 2},
        "rules": {"batch": "data", "embed_in": "data"},
        "prefill": {"rules": {"embed_in": ""}},
    }
    alone, gathered = work_of(PLAIN), work_of(PLAIN, Layout.from_table(table))
    call = Call("prefill", 4, 32, 32)
    whole, ours = (part(work, call, "products").bytes for work in (alone, gathered))
    assert ours == pytest.approx(1.5 * whole, rel=0.01)


PAGED = BucketGrid(128, ((64, 1),), 4, pages=12, page=16)


@pytest.mark.parametrize("config", [PLAIN, CONFIG], ids=["plain", "windows"])
def test_a_cache_of_pages_has_all_entries_in_every_layer(config):
    work = work_of(config)
    whole = work_of(changed(config, windows=(None,) * config.num_layers))
    assert work.grid_bytes(PAGED) == whole.page_bytes(12 * 16) == 12 * work.page_bytes(16)
    assert work.num_pages(work.grid_bytes(PAGED) + 1, 16) == pytest.approx(12, rel=1e-3)


@pytest.mark.parametrize(("row_tokens", "of_slot"), [(None, 0), (1, 2), (16, 3)])
def test_pages_have_the_bytes_of_the_arrays_of_their_layers(row_tokens, of_slot):
    """One of three layers has a window of 7."""
    work, grid = work_of(CONFIG), replace(PAGED, row_tokens=row_tokens)
    state = jax.eval_shape(partial(decode_state, work.model, grid, jnp.float32))
    assert sum(x.size * 4 for x in jax.tree.leaves(state.cache)) == work.grid_bytes(grid)
    in_pool, layer_bytes = 3 - (row_tokens is not None), work.page_bytes(16) / 3
    expected = in_pool * layer_bytes, of_slot * layer_bytes
    assert work.bytes_of_pages(16, grid.window_pages) == pytest.approx(expected)


def test_a_step_with_pages_reads_the_entries_that_rows_hold():
    work = work_of(PLAIN)
    whole, part_of_it = (part(work, PAGED.average_step(n), "attention") for n in (192, 80))
    assert whole == part(work, PAGED.decode_call(), "attention")
    assert whole.bytes == work.grid_bytes(PAGED)
    for figure in ("bytes", "flops", "elements"):
        assert getattr(part_of_it, figure) == getattr(whole, figure) * 80 / 192
    assert work.needed(PAGED.average_step(80)).cache == part_of_it.bytes
    few = replace(PAGED, pages=100)
    assert few.decode_call().entries == 4 * 128, "rows read no more than their longest"


def test_a_row_reads_one_page_more_than_its_window_at_most():
    work = work_of(changed(PLAIN, windows=(24,) * 3))
    assert part(work, PAGED.average_step(192), "attention").bytes == work.page_bytes(4 * (24 + 16))
    assert part(work, PAGED.average_step(80), "attention").bytes == work.page_bytes(80)


def test_devices_that_split_heads_have_a_part_of_each_page():
    table = {"name": "heads", "mesh": {"tensor": 2}, "rules": {"query_heads": "tensor"}}
    split, whole = work_of(PLAIN, Layout.from_table(table)), work_of(PLAIN)
    assert 2 * split.grid_bytes(PAGED) == whole.grid_bytes(PAGED)
    parts = [part(work, PAGED.average_step(80), "attention") for work in (split, whole)]
    assert 2 * parts[0].bytes == parts[1].bytes and 2 * parts[0].flops == parts[1].flops


def test_working_memory_has_embeddings_hidden_activations_and_gathered_weights():
    call = Call("prefill", 4, 64, 64)
    mlp, head, heads, kv_heads = 160, 16, 8, 2
    # the gates and inputs of the MLP are wider than queries, keys and values
    expected = 4 * (6 * 4 * 64 * PLAIN.embed + 2 * 4 * 64 * 2 * mlp)
    assert work_of(PLAIN).working_bytes(call) == expected
    table = {"name": "x", "mesh": {"data": 2}, "rules": {"embed_in": "data"}}
    table["prefill"] = {"rules": {"batch": "data", "embed_in": ""}}
    gathered = work_of(PLAIN, Layout.from_table(table))
    weights = PLAIN.embed * (head * (2 * heads + 2 * kv_heads) + 3 * mlp)
    assert gathered.working_bytes(call) == expected / 2 + 4 * 2 * weights
