"""The table `[prefixes]`: its file, its refusals, the prefix of a prompt, and the work of calls."""

import tomllib
from dataclasses import replace

import numpy as np
import pytest
from alike import changed
from planning_models import PLAIN, work_of
from related_prompts import hash_tokens, related_prompts, table_of

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.sharding.call import Call

SHARED = (PlannedPrefix(16, "0123456789abcdef"), PlannedPrefix(20, "fedcba9876543210"))
PREFIXES = PrefixGrid(groups=2, rows=3, length=16, shared=SHARED)
GRID = BucketGrid(128, ((128, 2, 32),), 4, page=16, prefixes=PREFIXES)
PLAN = Plan("cpu", PlannedModel("m", ""), Numbers("float32"), GRID)
LAYERS, QUERY_HEADS, HEADS, HEAD_DIM, FLOAT32 = 3, 8, 2, 16, 4
ENTRY_BYTES = 2 * HEADS * HEAD_DIM * FLOAT32
"""The bytes of the key and the value of a token in a layer of `PLAIN`."""


def test_a_plan_with_prefixes_is_read_back():
    text = PLAN.to_toml()
    assert "[prefixes]\ngroups = 2\n" in text
    assert Plan.from_table(tomllib.loads(text)) == PLAN
    without = replace(PLAN, buckets=replace(GRID, prefixes=None))
    assert "prefixes" not in without.to_toml()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 0}, "prefixes.groups: expected a positive integer, got 0"),
        ({"length": True}, "prefixes.length: expected a positive integer, got True"),
        ({"rows": 1.5}, "prefixes.rows: expected a positive integer, got 1.5"),
        (
            {"length": 24},
            r"prefixes.length: expected a multiple of buckets.page \(16\), .* got 24. Change",
        ),
        ({"shared": "0" * 16}, "prefixes.shared: expected a list, got '0000"),
        ({"shared": []}, "prefixes.shared: expected at least one .* got 0. List each .* or leave"),
        ({"shared": [SHARED[0]] * 2}, "each one once, got 2. List each prefix once"),
        ({"shared": [[0, "0" * 16]]}, r"prefixes.shared: expected pairs .* got \[0, "),
        ({"shared": [["0" * 16, 8]]}, "prefixes.shared: expected pairs of a length"),
        ({"shared": [[8, "0" * 15]]}, "a hash of 16 hexadecimal digits .* got"),
        ({"shared": [[8, 10**15]]}, "a hash of 16 hexadecimal digits .* got"),
        ({"shared": [[8, "g" * 16]]}, "a hash of 16 hexadecimal digits .* got .*gggg"),
        ({"shared": [[8, "A" * 16]]}, "a hash of 16 hexadecimal digits in lower case, got .*AAAA"),
        ({"shared": [[8]]}, r"prefixes.shared: expected pairs .* got \[8\]"),
        ({"shared": [8]}, "prefixes.shared: expected pairs .* got 8"),
        ({"size": 3}, r"\[prefixes\]: .* unknown \['size'\]"),
    ],
)
def test_a_wrong_table_is_refused_by_name(changes, message):
    table = tomllib.loads(PLAN.to_toml())
    table["prefixes"] |= changes
    with pytest.raises(ValueError, match=message):
        Plan.from_table(table)


@pytest.mark.parametrize("key", ["groups", "rows", "length", "shared"])
def test_a_missing_key_is_named(key):
    table = tomllib.loads(PLAN.to_toml())
    del table["prefixes"][key]
    with pytest.raises(ValueError, match=rf"\[prefixes\]: .*'{key}'"):
        Plan.from_table(table)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"slot_groups": 4, "pages": 32},
            r"prefixes.groups: expected a multiple of buckets.slot_groups \(4\), .* got 2. Change",
        ),
        (
            {
                "decode_slots": 0,
                "score": True,
                "pages": None,
                "page": None,
                "prefill": [[128, 2]],
                "chunk": None,
                "chunks_per_decode": None,
            },
            r"plan \[prefixes\]: expected prompts in chunks .*, got no buckets.chunk",
        ),
        (
            {"prefill": [[128, 2]], "chunk": None, "chunks_per_decode": None},
            r"plan \[prefixes\]: expected prompts in chunks .*, got no buckets.chunk. Give it",
        ),
        ({"prefixes": {}}, r"\[buckets\]: .* unknown \['prefixes'\]"),
    ],
)
def test_buckets_that_cannot_have_prefixes_are_refused(changes, message):
    table = tomllib.loads(PLAN.to_toml())
    table["buckets"] |= changes
    with pytest.raises(ValueError, match=message):
        Plan.from_table(table)


@pytest.mark.parametrize("seed", range(40))
def test_a_prompt_has_its_longest_listed_beginning(seed):
    rng, prompts = np.random.default_rng(seed), related_prompts(seed)
    listed = {}
    for _ in range(rng.integers(1, 12)):
        prompt = prompts[rng.integers(len(prompts))]
        tokens = tuple(prompt[: rng.integers(1, len(prompt) + 1)])
        listed[PlannedPrefix(len(tokens), hash_tokens(tokens))] = tokens
    prefixes = PrefixGrid(2, 8, 64, tuple(listed))
    for prompt in prompts:
        found = [p for p, t in listed.items() if len(t) < len(prompt) and t == (*prompt[: len(t)],)]
        assert prefixes.prefix_of(prompt) == max(found, default=None)


@pytest.mark.parametrize("max_hashes", [10**6, 40])
@pytest.mark.parametrize("seed", range(20))
def test_a_table_has_the_hashes_of_shared_beginnings(seed, max_hashes):
    prompts = related_prompts(seed)
    table, _ = table_of(prompts, max_hashes)
    some = np.random.default_rng(seed).permutation(len(prompts))[: len(prompts) // 2 + 1].tolist()
    for found, of in ((table, prompts), (table.of_rows(some), [prompts[row] for row in some])):
        columns = found.rows.tolist(), found.shared.tolist(), found.hex_hashes()
        for row, shared, digest in zip(*columns, strict=True):
            assert digest == (hash_tokens(of[row][:shared]) if shared else "0" * 16)


def test_a_step_reads_what_is_shared_once_and_multiplies_it_with_each_row():
    call, work = GRID.average_step(200, 520), work_of(PLAIN)
    assert call == Call("decode", 4, 1, 128, entries=200, seen=520, page=16)
    part = attention(work, call)
    assert part.bytes == LAYERS * 200 * ENTRY_BYTES == work.needed(call).cache
    # a score and a sum take 2 H operations each
    assert part.flops == LAYERS * 520 * QUERY_HEADS * 4 * HEAD_DIM


def test_layers_with_windows_share_nothing():
    work = work_of(changed(PLAIN, windows=(None, 10, None)))
    part = attention(work, GRID.average_step(90, 400))
    assert part.bytes == (2 * 90 + 4 * (10 + 16)) * ENTRY_BYTES


def attention(work, call: Call):
    return next(part for part in work.parts(call) if part.name == "attention")
