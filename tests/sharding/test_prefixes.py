"""Prefixes that groups of slots share: kept once, read by all rows of the group, same answers."""

from functools import cache

import numpy as np
import pytest
from laid_out import VOCAB, LaidOut, Row, config_of, expected, layout_of

from noria.compile.graphs.graph_kinds import CLEAR_PREFIX
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid

CASES = pytest.mark.parametrize(
    ("family", "layout", "scan_layers", "page"),
    [
        ("llama", None, True, None),
        pytest.param("gemma2", None, False, None, marks=pytest.mark.slow),
        ("llama4_text", None, False, None),
        ("gpt_oss", "weight-stationary-1d", False, None),
        ("deepseek_v3", "ring-tensor", False, None),
        ("qwen2", "data-tensor-batch-attention", False, None),
        pytest.param("llama", None, True, 8, marks=pytest.mark.slow),
        ("llama4_text", None, False, 8),
        pytest.param("gpt_oss", "weight-stationary-1d", False, 8, marks=pytest.mark.slow),
        ("deepseek_v3", "ring-tensor", False, 8),
        pytest.param("qwen2", "data-tensor-batch-attention", False, 8, marks=pytest.mark.slow),
    ],
)
"""Cases: scanned layers; rolling layers; chunked attention; split sinks and heads; split latents
and entries; split rows. Then the same in pages, whose chunks do not begin where pages do."""
LENGTHS = (13, 16)
"""The lengths of two prefixes; both take two calls, and the first one has padding."""


def shares(family: str, layout: str | None, scan_layers: bool, page: int | None = None) -> LaidOut:
    """Return a model whose slots are in groups, as many as a layout needs and at least two."""
    placed = None if layout is None else layout_of(layout)
    shards = (
        1 if placed is None else placed.mesh.num_shards(placed.phase("decode")["attention_batch"])
    )
    rows = 1 if placed is None else placed.mesh.num_shards(placed.phase("prefill")["batch"])
    listed = tuple(PlannedPrefix(n, f"{n:016x}") for n in LENGTHS)
    prefixes = PrefixGrid(max(2, shards), 16, 8, listed, batch=rows)
    options = {"scan_layers": scan_layers, "prefixes": prefixes, "page": page}
    return LaidOut(config_of(family), placed, **options)


compiled = cache(shares)


def prefixes_of(model: LaidOut, lengths: tuple[int, ...] = LENGTHS) -> dict[int, tuple[int, ...]]:
    """Return random prefixes by group, of these lengths in turn."""
    assert model.prefixes is not None
    rng = np.random.default_rng(sum(lengths))
    sizes = [lengths[group % len(lengths)] for group in range(model.prefixes.groups)]
    return {group: tuple(rng.integers(3, VOCAB, n).tolist()) for group, n in enumerate(sizes)}


def own_rows(model: LaidOut) -> dict[int, Row]:
    """Return a row for most slots: what follows its prefix."""
    rng = np.random.default_rng(5)
    slots = [slot for slot in range(model.grid.decode_slots) if slot != 2]
    lengths = (1, 8, 5, 2, 7, 3, 23)
    return {
        slot: Row(tuple(rng.integers(3, VOCAB, lengths[slot % len(lengths)]).tolist()))
        for slot in slots
    }


def whole_rows(
    model: LaidOut, prefixes: dict[int, tuple[int, ...]], rows: dict[int, Row]
) -> tuple[Row, ...]:
    """Return the rows with their prefixes."""
    return tuple(Row(prefixes[model.group_of(slot)] + row.prompt) for slot, row in rows.items())


@CASES
def test_a_shared_prefix_changes_no_answer(family, layout, scan_layers, page):
    model = compiled(family, layout, scan_layers, page)
    prefixes, rows = prefixes_of(model), own_rows(model)
    got = model.answer(rows, model.prefill_prefixes(prefixes))
    expected(model.config, whole_rows(model, prefixes, rows)).assert_equals(got, rows)


@CASES
def test_a_prefix_may_follow_a_longer_one(family, layout, scan_layers, page):
    model = compiled(family, layout, scan_layers, page)
    state = model.prefill_prefixes(prefixes_of(model, (16,)))
    rows = own_rows(model)
    state = model.answer(rows, state).state
    shorter = prefixes_of(model, (9, 3))
    got = model.answer(rows, model.prefill_prefixes(shorter, state))
    expected(model.config, whole_rows(model, shorter, rows)).assert_equals(got, rows)


@CASES
def test_a_cleared_prefix_is_empty(family, layout, scan_layers, page):
    model = compiled(family, layout, scan_layers, page)
    prefixes, rows = prefixes_of(model), own_rows(model)
    state = model.prefill_prefixes(prefixes)
    row = model.put(np.int32(0))
    state, _ = model.graphs.call(CLEAR_PREFIX, model.parameters, state, row)
    got = model.answer(rows, state)
    prefixes[0] = ()
    expected(model.config, whole_rows(model, prefixes, rows)).assert_equals(got, rows)


@pytest.mark.usefixtures("optimized")
def test_a_row_keeps_its_bits_whatever_is_in_other_groups():
    model = shares("gemma2", None, False)
    prefixes, rows = prefixes_of(model), own_rows(model)
    together = model.answer(rows, model.prefill_prefixes(prefixes))
    alone = model.answer({1: rows[1]}, model.prefill_prefixes({0: prefixes[0]}))
    for name in ("prompt_logprobs_BV", "logprobs_BV"):
        np.testing.assert_array_equal(getattr(together, name)[1], getattr(alone, name)[1])
    np.testing.assert_array_equal(together.output.tokens_BQ[1], alone.output.tokens_BQ[1])
