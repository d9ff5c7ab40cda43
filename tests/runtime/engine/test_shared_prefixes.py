"""Shared prefixes: their slots, the choice of what to keep, bits of real runs, orders of rows."""

import pickle
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from related_prompts import table_of
from symbolic_run import SymbolicRun
from tiny import TAIL_GRID, TinyModel
from tiny import TWO_LAYERS as CONFIG
from unoptimized import set_optimized

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefix_tree import PrefixNode, count_slots, dissolve
from noria.compile.grids.row_shape import RowShape
from noria.compile.planning.run_bounds import ExpectedRow
from noria.runtime.engine.shared_prefixes import (
    PrefixSearch,
    Submission,
    plan_submission,
    submission_order,
)
from noria.runtime.planning.search import simulate_in_order
from noria.runtime.planning.simulator import SimulatedRow, schedule
from noria.runtime.request import Request, SamplingParams


def seeds(count: int) -> list:
    """Return the numbers of random runs, of which a third are in every run of the tests."""
    slow = pytest.mark.slow
    return [pytest.param(seed, marks=[slow] * (seed >= count // 3)) for seed in range(count)]


@pytest.mark.parametrize("seed", seeds(80))
def test_every_row_runs_through_its_own_pieces(seed):
    SymbolicRun(seed).assert_all_rows_ended()


@pytest.mark.parametrize("seed", seeds(40))
def test_rows_in_any_other_order_run_as_well(seed):
    SymbolicRun(seed, in_order=False).assert_all_rows_ended()


@pytest.mark.parametrize("seed", seeds(40))
def test_a_drain_drops_prefixes_and_keeps_rows_in_flight(seed):
    SymbolicRun(seed, drain_at=seed % 30 + 1).assert_all_rows_ended()


def few_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 9, count).tolist()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_many_rows_of_one_prefix_compute_it_once(depth):
    """Requests come a few at a time, long after a prefix has continued in its parent's slot."""
    grid = BucketGrid(512, ((512, 4, 32),), 16)
    beginnings = [few_tokens(64 * (i + 1), 0) for i in range(depth)]
    counts = [2] * (depth - 1) + [400]
    prompts = [
        beginning + few_tokens(40, seed=1000 * i + j)
        for i, (beginning, count) in enumerate(zip(beginnings, counts, strict=True))
        for j in range(count)
    ]
    run = SymbolicRun(0, grid=grid, prompts=prompts)
    run.assert_all_rows_ended()
    shared = run.table.shared_pieces(np.array(list(map(len, prompts))), grid.chunks)
    assert run.num_computed == sum(map(len, prompts)) - shared.sum()


def test_prefixes_after_one_prefix_run_beside_each_other():
    """Their pieces fill calls together, and their rows decode together."""
    grid = BucketGrid(512, ((512, 8, 32),), 64)
    beginning = few_tokens(128, 0)
    prompts = [
        beginning + few_tokens(128, seed=1 + document) + few_tokens(20, seed=1000 + question)
        for document in range(40)
        for question in range(3 * document, 3 * document + 3)
    ]
    run = SymbolicRun(0, grid=grid, prompts=prompts)
    run.assert_all_rows_ended()
    assert run.submission.num_held == 8
    assert run.num_pieces > 3 * run.num_calls


def test_few_rows_do_not_decode_while_others_wait_for_prefixes():
    """Conversations grow turn by turn, and calls of their short pieces are rarely full."""
    grid = BucketGrid(512, ((512, 8, 8), (512, 1, 64)), 128, chunks_per_decode=4096)
    turns = [few_tokens(60 - seed % 7, seed) for seed in range(200)]
    prompts = [
        [token for turn in turns[first : first + count] for token in turn]
        for first in range(0, 200, 5)
        for count in range(1, 6)
    ]
    table, _ = table_of(prompts)
    rows = [ExpectedRow(RowShape(len(prompt), 32), 32) for prompt in prompts]
    assert simulate_in_order(rows, grid, None, table).occupancy > 0.3


def test_sharing_computes_fewer_tokens():
    runs = [SymbolicRun(seed) for seed in range(40)]
    computed = sum(run.num_computed for run in runs)
    assert computed < 0.9 * sum(len(prompt) for run in runs for prompt in run.prompts)


def random_tree(rng: np.random.Generator) -> tuple[PrefixNode, list[PrefixNode]]:
    root, row = PrefixNode(0, None), 0
    nodes: list[PrefixNode] = []
    for _ in range(rng.integers(1, 10)):
        parent = [root, *nodes][rng.integers(len(nodes) + 1)]
        node = PrefixNode(parent.length + 16 * int(rng.integers(1, 6)), parent)
        parent.children[node] = None
        nodes.append(node)
    for node in nodes:
        for _ in range(rng.integers(0, 3) if node.children else rng.integers(2, 5)):
            node.rows.append(row)
            row += 1
    return root, nodes


def num_computed(root: PrefixNode, nodes: list[PrefixNode], length_of: dict[int, int]) -> int:
    """Return the tokens that are computed for all rows up to their nodes in the whole tree."""
    rows = sum(length_of[row] - node.length for node in [root, *nodes] for row in node.rows)
    return rows + sum(node.length - node.parent.length for node in nodes)


@pytest.mark.parametrize("max_slots", [1, 2, 3])
@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_of_prefixes_computes_fewer_tokens(seed, max_slots):
    tree = random_tree(np.random.default_rng(seed))
    length_of = {row: node.length for node in tree[1] for row in node.rows}
    best = np.inf
    for is_kept in product([False, True], repeat=len(tree[1])):
        root, nodes = pickle.loads(pickle.dumps(tree))
        for node, keep in reversed(list(zip(nodes, is_kept, strict=True))):
            if not keep:
                dissolve(node, node.parent)
        kept = [node for node, keep in zip(nodes, is_kept, strict=True) if keep]
        count_slots(kept)
        if all(node.num_slots <= max_slots for node in root.children):
            best = min(best, num_computed(root, kept, length_of))
    root, nodes = tree
    kept = PrefixSearch(root, nodes, max_slots).kept()
    count_slots(kept)
    assert all(node.num_slots <= max_slots for node in root.children)
    assert num_computed(root, kept, length_of) == best


def test_slots_grow_with_the_logarithm_of_the_tree():
    """In a chain each prefix continues in the slot of the one before it."""
    chain, parent = [], PrefixNode(0, None)
    for length in range(16, 16 * 200, 16):
        node = PrefixNode(length, parent, rows=[length])
        parent.children[node] = None
        chain.append(node)
        parent = node
    count_slots(chain)
    assert chain[0].num_slots == 1


SHARED = np.random.default_rng(5).integers(3, CONFIG.vocab_size, 24).tolist()
PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=9, n=2, logprobs=2)


def requests() -> list[Request]:
    """Return rows with prefixes of 8, 16 and 24 tokens, two equal prompts, and unrelated rows."""
    rng = np.random.default_rng(6)
    lengths = [24, 24, 16, 24, 8, 0, 16, 0, 24, 8]
    rows = [
        SHARED[:n] + rng.integers(3, CONFIG.vocab_size, m).tolist()
        for n, m in zip(lengths, rng.integers(1, 15, len(lengths)), strict=True)
    ]
    rows += rows[:1]
    return [
        Request(f"row-{i}", row, replace(PARAMS, temperature=0.9 * (i % 2)))
        for i, row in enumerate(rows)
    ]


def submission_of(rows: list[Request], grid: BucketGrid) -> Submission:
    index, _ = table_of([row.prompt_token_ids for row in rows])
    lengths = [(len(row.prompt_token_ids), row.params.max_tokens) for row in rows]
    return plan_submission(lengths, index, grid)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    """Return a model with windows, for which each slot has pages of its own."""
    set_optimized(True)
    return TinyModel(
        CONFIG, replace(TAIL_GRID, decode_slots=8, pages=64, row_tokens=16, score=False)
    )


def run(model: TinyModel, rows: list[Request], submission: Submission):
    generator = model.generator()
    generator.reserve(submission.num_held)
    for row, prefix in zip(submission.rows, submission.prefixes, strict=True):
        generator.submit(rows[row], prefix)
    return {output.request_id: output.outputs for output in generator.run()}, generator


def without_prefixes(submission: Submission) -> Submission:
    return Submission(submission.rows, [None] * len(submission.rows))


def test_a_copied_prefix_gives_the_bits_of_a_computed_one(model):
    rows = requests()
    submission = submission_of(rows, model.grid)
    shared, generator = run(model, rows, submission)
    computed, plain = run(model, rows, without_prefixes(submission))
    assert shared == computed
    metrics = generator.metrics
    assert metrics.saved_tokens > 50
    num_tokens = [
        sum(use.real_tokens for use in m.prefill.values()) for m in (metrics, plain.metrics)
    ]
    assert num_tokens[1] - num_tokens[0] == metrics.saved_tokens
    assert plain.metrics.saved_tokens == 0


def test_different_prompts_with_equal_hashes_do_not_share(model):
    rows = requests()
    submission = submission_of(rows, model.grid)
    last = max(i for i, prefix in enumerate(submission.prefixes) if prefix is not None)
    changed = rows[submission.rows[last]]
    other = [3 + (token - 2) % 100 for token in changed.prompt_token_ids]
    rows[submission.rows[last]] = replace(changed, prompt_token_ids=other)
    shared, _ = run(model, rows, submission)
    computed, _ = run(model, rows, without_prefixes(submission))
    assert shared == computed


def test_the_simulator_has_the_tokens_and_calls_of_the_run(model):
    rows = requests()
    submission = submission_of(rows, model.grid)
    outputs, generator = run(model, rows, submission)
    simulated = []
    for row, prefix in zip(submission.rows, submission.prefixes, strict=True):
        length = len(rows[row].prompt_token_ids)
        emitted = tuple(len(o.token_ids) for o in outputs[rows[row].request_id])
        limit = length + rows[row].params.max_tokens
        simulated.append(SimulatedRow(length, limit, emitted, prefix=prefix))
    got = schedule(model.grid, simulated, submission.num_held).priced(model.grid, None).metrics
    metrics = generator.metrics
    for name in ("forks", "copied_tokens", "prefix_tokens", "padding"):
        assert getattr(got, name) == getattr(metrics, name)
    calls, expected = (
        {name: use.calls for name, use in {**m.prefill, "decode": m.decode}.items()}
        for m in (got, metrics)
    )
    assert calls == expected


def test_the_longest_need_comes_first_and_equal_ones_stay_in_order():
    needs = [(10, 5), (20, 30), (10, None), (5, 10), (3, 47)]
    assert submission_order(needs) == [2, 1, 4, 0, 3]
