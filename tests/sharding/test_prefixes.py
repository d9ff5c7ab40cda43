"""Pages with which rows begin, read once for groups of rows: the same answers under all layouts."""

from functools import cache

import numpy as np
import pytest
from laid_out import PAGE, VOCAB, LaidOut, Row, config_of, expected, layout_of, num_slot_groups
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid
from noria.runtime.engine.actions import SharedGroup

CASES = pytest.mark.parametrize(
    ("family", "layout", "scan_layers"),
    [
        ("llama", None, True),
        pytest.param("gemma2", None, False, marks=pytest.mark.slow),
        ("llama4_text", None, False),
        ("gpt_oss", "weight-stationary-1d", False),
        ("deepseek_v3", "ring-tensor", False),
        ("qwen2", "data-tensor", False),
        pytest.param("qwen3", "data-tensor-batch-attention", False, marks=pytest.mark.slow),
    ],
)
"""Cases: scanned layers; windows; chunked attention; split sinks and heads; split latents and
entries; split rows."""
LENGTHS = (PAGE + 1, 2 * PAGE)
"""The lengths of two prefixes, of one and of two whole pages."""
PREFIXES = PrefixGrid(16, 4, 2 * PAGE, tuple(PlannedPrefix(n, f"{n:016x}") for n in LENGTHS))


def shares(family: str, layout: str | None, scan_layers: bool) -> LaidOut:
    placed = None if layout is None else layout_of(layout)
    options = {"scan_layers": scan_layers, "in_chunks": True, "prefixes": PREFIXES}
    return LaidOut(config_of(family), placed, **options)


compiled = cache(shares)


def rows_of(model: LaidOut) -> dict[int, Row]:
    """Return a row for most slots; two of three begin with one of the prefixes."""
    rng = np.random.default_rng(5)
    beginnings = [tuple(rng.integers(3, VOCAB, n).tolist()) for n in (*LENGTHS, 0)]
    slots = [slot for slot in range(model.grid.decode_slots) if slot != 2]
    lengths = (1, 8, 5, 2, 7, 3, 6)
    return {
        slot: Row(beginnings[slot % 3] + tuple(rng.integers(3, VOCAB, lengths[slot % 7]).tolist()))
        for slot in slots
    }


def groups_of(model: LaidOut) -> list[SharedGroup]:
    """Return the groups of the rows; those of a group are on the same devices."""
    parts, slots = num_slot_groups(model.layout), model.grid.decode_slots
    groups = []
    for part in range(parts):
        for index, length in enumerate(LENGTHS):
            of_group = [
                slot
                for slot in rows_of(model)
                if slot % 3 == index and slot * parts // slots == part
            ]
            if of_group:
                number = part * PREFIXES.groups // parts + index
                groups.append(SharedGroup(number, tuple(of_group), length // PAGE))
    return groups


@CASES
def test_pages_that_a_group_reads_change_no_answer(family, layout, scan_layers):
    model = compiled(family, layout, scan_layers)
    rows = rows_of(model)
    got = model.answer(rows, groups=groups_of(model))
    expected(model.config, tuple(rows.values())).assert_equals(got, rows)


def test_a_group_reads_the_pages_that_it_is_given():
    """A group with the pages of other rows gets other answers."""
    model = compiled("llama", None, True)
    rows, (first, second) = rows_of(model), groups_of(model)
    right = model.answer(rows, groups=[first, second])
    swapped = model.answer(rows, groups=[first, second._replace(num_pages=1)])
    # the second page is then read by each row itself
    np.testing.assert_allclose(
        *(x.logprobs_BV[list(rows)] for x in (right, swapped)), rtol=0, atol=FLOAT32_MODEL_LOGPROB
    )
    mixed = first._replace(slots=(second.slots[0], *first.slots))
    wrong = model.answer(rows, groups=[mixed, second._replace(slots=second.slots[1:])])
    changed = np.abs(wrong.logprobs_BV - right.logprobs_BV).max(axis=1) > 10 * FLOAT32_MODEL_LOGPROB
    assert changed[list(first.slots)].all()
    others = [slot for slot in rows if slot not in first.slots]
    assert not changed[others].any()


@pytest.mark.usefixtures("optimized")
def test_a_row_keeps_its_bits_whatever_is_in_its_group():
    model = shares("gemma2", None, False)
    rows, groups = rows_of(model), groups_of(model)
    together = model.answer(rows, groups=groups)
    alone = model.answer({1: rows[1]}, groups=[SharedGroup(9, (1,), groups[1].num_pages)])
    for name in ("prompt_logprobs_BV", "logprobs_BV"):
        np.testing.assert_array_equal(getattr(together, name)[1], getattr(alone, name)[1])
    np.testing.assert_array_equal(together.output.tokens_BQ[1], alone.output.tokens_BQ[1])
