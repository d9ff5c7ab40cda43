"""The table `[prefixes]`: its file, its refusals, the prefix of a prompt, and the work of calls."""

import tomllib
from dataclasses import replace

import numpy as np
import pytest
from alike import changed
from planning_models import PLAIN, work_of
from related_prompts import related_prompts, table_of

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid, hash_tokens
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.sharding.call import Call

SHARED = (PlannedPrefix(16, "0123456789abcdef"), PlannedPrefix(20, "fedcba9876543210"))
PREFIXES = PrefixGrid(groups=2, length=64, chunk=32, shared=SHARED, batch=3)
GRID = BucketGrid(128, ((32, 2), (64, 1)), 4, (64, 128), prefixes=PREFIXES)
PAGED = replace(GRID, decode_spans=(128,), pages=32, page=16)
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


def test_one_row_is_the_default_of_calls_that_compute_prefixes():
    table = tomllib.loads(PLAN.to_toml())
    del table["prefixes"]["batch"]
    assert Plan.from_table(table).buckets.prefixes == replace(PREFIXES, batch=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 0}, "prefixes.groups: expected a positive integer, got 0"),
        ({"length": True}, "prefixes.length: expected a positive integer, got True"),
        ({"chunk": 1.5}, "prefixes.chunk: expected a positive integer, got 1.5"),
        ({"batch": -1}, "prefixes.batch: expected a positive integer, got -1"),
        (
            {"length": 48},
            r"prefixes.length: expected a multiple of prefixes.chunk \(32\), got 48. Change",
        ),
        ({"shared": "0" * 16}, "prefixes.shared: expected a list, got '0000"),
        ({"shared": []}, "prefixes.shared: expected at least one .* got 0. List each .* or leave"),
        ({"shared": [SHARED[0]] * 2}, "each one once, got 2. List each prefix once"),
        ({"shared": [[65, "0" * 16]]}, r"a length up to prefixes.length \(64\) .* got \[65, '0000"),
        ({"shared": [[0, "0" * 16]]}, r"prefixes.shared: expected pairs .* got \[0, "),
        ({"shared": [["0" * 16, 8]]}, "prefixes.shared: expected pairs of a length"),
        ({"shared": [[8, "0" * 15]]}, "a hash of 16 hexadecimal digits .* got"),
        ({"shared": [[8, 10**15]]}, "a hash of 16 hexadecimal digits .* got"),
        ({"shared": [[8, "g" * 16]]}, "a hash of 16 hexadecimal digits .* got .*gggg"),
        ({"shared": [[8, "A" * 16]]}, "a hash of 16 hexadecimal digits in lower case, got .*AAAA"),
        ({"shared": [[8]]}, r"prefixes.shared: expected pairs .* got \[8\]"),
        ({"shared": [8]}, "prefixes.shared: expected pairs .* got 8"),
        ({"size": 3}, r"\[prefixes\]: .* unknown \['size'\]"),
        ({"groups": 3}, r"groups: expected a divisor of buckets.decode_slots \(4\), got 3. Change"),
    ],
)
def test_a_wrong_table_is_refused_by_name(changes, message):
    table = tomllib.loads(PLAN.to_toml())
    table["prefixes"] |= changes
    with pytest.raises(ValueError, match=message):
        Plan.from_table(table)


@pytest.mark.parametrize("key", ["groups", "length", "chunk", "shared"])
def test_a_missing_key_is_named(key):
    table = tomllib.loads(PLAN.to_toml())
    del table["prefixes"][key]
    with pytest.raises(ValueError, match=rf"\[prefixes\]: .*'{key}'"):
        Plan.from_table(table)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill": [[64, 2]], "chunk": 16}, r"buckets.chunk: with \[prefixes\], .* got \(16,\)"),
        ({"span_slots": [4, 2]}, r"buckets.span_slots: with \[prefixes\], .* got \(4, 2\)"),
        ({"score": True}, r"buckets.score: with \[prefixes\], expected none, got True.* Leave out"),
        (
            {"decode_slots": 0, "decode_spans": [], "score": True},
            r"buckets.score: with \[prefixes\], expected none, got True",
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
    prefixes = PrefixGrid(2, 256, 64, tuple(listed))
    for prompt in prompts:
        found = [p for p, t in listed.items() if len(t) < len(prompt) and t == (*prompt[: len(t)],)]
        assert prefixes.prefix_of(prompt) == max(found, default=None)


def test_the_pieces_of_a_prefix_are_chunks_and_a_rest():
    assert list(PREFIXES.pieces(64)) == [(0, 32), (32, 32)]
    assert list(PREFIXES.pieces(33)) == [(0, 32), (32, 1)]
    assert list(PREFIXES.pieces(5)) == [(0, 5)]


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


def test_a_prefill_call_reads_one_prefix():
    call = GRID.prefill_call(GRID.prefill[0])
    assert call == Call("chunk", 2, 32, 32, prefix=(1, 64))
    whole, work = Call("chunk", 2, 32, 32), work_of(PLAIN)
    new, old = attention(work, call), attention(work, whole)
    assert new.bytes - old.bytes == LAYERS * 64 * ENTRY_BYTES
    assert new.flops - old.flops == LAYERS * 2 * 32 * 64 * QUERY_HEADS * 4 * HEAD_DIM


def test_a_step_reads_each_prefix_once():
    call = GRID.decode_call(128)
    assert call == Call("decode", 4, 1, 128, prefix=(2, 64))
    work = work_of(PLAIN)
    part = attention(work, call)
    # four rows have 128 entries of their own, and two prefixes have 64
    assert part.bytes == LAYERS * (4 * 128 + 2 * 64) * ENTRY_BYTES
    # each row sees its own entries and one prefix; a score and a sum take 2 H operations each
    assert part.flops == LAYERS * 4 * (128 + 64) * QUERY_HEADS * 4 * HEAD_DIM
    assert work.needed(call).cache == part.bytes
    # a cache in pages has the same entries here, and the same prefixes
    assert attention(work, PAGED.decode_call(128)) == part
    less = attention(work, PAGED.average_step(200))
    assert less.bytes == LAYERS * (200 + 2 * 64) * ENTRY_BYTES


def test_the_cache_of_a_grid_has_its_prefixes():
    for grid in (GRID, PAGED):
        assert work_of(PLAIN).grid_bytes(grid) == LAYERS * (4 * 128 + 2 * 64) * ENTRY_BYTES


def test_a_window_limits_what_a_step_reads_of_a_prefix():
    work = work_of(changed(PLAIN, windows=(None, 10, None)))
    part = attention(work, GRID.decode_call(128))
    assert part.bytes == (2 * (4 * 128 + 2 * 64) + (4 + 2) * 10) * ENTRY_BYTES


def test_a_call_that_computes_a_prefix_ends_at_its_last_piece():
    assert PREFIXES.call == Call("chunk", 3, 32, 64)


def attention(work, call: Call):
    return next(part for part in work.parts(call) if part.name == "attention")
