"""Workloads of prompts that begin alike, and the count of tokens that remain without repetition."""

import hashlib
import json
import random
from collections import Counter
from itertools import pairwise
from operator import itemgetter

import pytest
from numerics_helpers import script
from symbolic_run import SymbolicRun

from noria.compile.grids.bucket_grid import BucketGrid

workloads = script("scripts/make_sharing_workloads.py")
count_prefixes = script("scripts/peers/prefix_count.py").count_prefixes

# rows, and the range of output tokens
SIZES = {
    "one_prompt": (2000, 32, 64),
    "few_shot": (8 * 200, 8, 16),
    "documents": (100 * 20, 32, 32),
    "conversations": (746, 32, 48),
}
DIGESTS = {
    "one_prompt": "508cf85d4d81b60e",
    "few_shot": "2e62b1afed1babf2",
    "documents": "d5245c8a632557d6",
    "conversations": "a6dbe630e5acef5a",
}


def rows_of(name: str, *arguments) -> list[dict]:
    return [json.loads(line) for line in workloads.batch_lines(name, *arguments)]


def group_of(row: dict) -> str:
    return row["custom_id"].rsplit("-", 1)[0]


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_a_workload_has_its_rows_and_every_row_a_fixed_number_of_tokens(name):
    rows = rows_of(name)
    num_rows, shortest, longest = SIZES[name]
    assert len({row["custom_id"] for row in rows}) == len(rows) == num_rows
    limits = [row["body"]["max_tokens"] for row in rows]
    assert (min(limits), max(limits)) == (shortest, longest)
    assert all(row["body"]["ignore_eos"] and row["body"]["temperature"] == 0 for row in rows)


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_the_bytes_of_a_sample_never_change(name):
    text = "\n".join(workloads.batch_lines(name, 30))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_an_order_changes_only_the_order(name):
    grouped, shuffled = rows_of(name, 60, "grouped"), rows_of(name, 60, "shuffled")
    assert grouped == sorted(shuffled, key=itemgetter("custom_id")) != shuffled


def test_a_sample_of_few_shot_has_all_headers_equally_often():
    counts = Counter(group_of(row) for row in rows_of("few_shot", 40))
    assert list(counts.values()) == [5] * 8


def test_a_sample_of_documents_has_all_questions_about_some():
    counts = Counter(group_of(row) for row in rows_of("documents", 40))
    assert list(counts.values()) == [20] * 2


def test_rows_of_a_group_begin_alike_and_groups_differ():
    first, second, third = (row["body"]["messages"] for row in rows_of("one_prompt", 3))
    assert first[0] == second[0] == third[0] and first[1] != second[1]
    texts = [row["body"]["messages"][0]["content"] for row in rows_of("documents", 40)]
    documents = [text[: text.index("Question: ")] for text in texts]
    assert len(set(documents)) == 2 and len(set(texts)) == 40
    headers = {row["body"]["prompt"][:60] for row in rows_of("few_shot", 40)}
    assert len(headers) == 8


def test_a_turn_holds_all_turns_before_it():
    rows = rows_of("conversations")
    lengths = set()
    for before, row in pairwise(rows):
        earlier, messages = before["body"]["messages"], row["body"]["messages"]
        if group_of(before) == group_of(row):
            assert messages[: len(earlier)] == earlier and len(messages) == len(earlier) + 2
        else:
            assert len(messages) == 1
            lengths.add(len(earlier))
        assert messages[-1]["role"] == "user"
    assert lengths == {2 * turns - 1 for turns in range(2, 9)}


def test_the_script_writes_the_named_files(tmp_path, monkeypatch):
    arguments = [str(tmp_path), "--workloads", "documents", "few_shot", "--rows", "5"]
    monkeypatch.setattr("sys.argv", ["make_sharing_workloads.py", *arguments])
    workloads.main()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "documents5.jsonl",
        "few_shot5.jsonl",
    ]
    lines = (tmp_path / "documents5.jsonl").read_text("utf-8").splitlines()
    assert lines == list(workloads.batch_lines("documents", 5))


@pytest.mark.parametrize(
    ("prompts", "distinct"),
    [
        ([], 0),
        ([[1, 2, 3, 4, 5]], 5),
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 6),  # two pieces, and a rest each
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 6),  # the last piece is never shared
        ([[1, 2, 3], [1, 2, 3]], 4),
        ([[1, 2, 3, 4], [5, 6, 3, 4]], 8),  # the same ids behind others
        ([[1, 2, 1, 2], [1, 2]], 6),
    ],
)
def test_pieces_of_two_tokens_are_counted_once(prompts, distinct):
    assert count_prefixes(prompts, 2) == (sum(map(len, prompts)), distinct)


@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_the_count_is_that_of_a_set_of_prefixes(chunk):
    rng = random.Random(chunk)
    prompts = [[rng.randint(0, 1) for _ in range(rng.randint(0, 12))] for _ in range(200)]
    prefixes = {tuple(ids[:end]) for ids in prompts for end in range(chunk, len(ids), chunk)}
    rest = sum((len(ids) - 1) % chunk + 1 for ids in prompts if ids)
    counted = count_prefixes(prompts, chunk)
    assert counted.distinct == len(prefixes) * chunk + rest
    assert counted.total == sum(map(len, prompts))


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_a_job_computes_the_distinct_pieces_of_a_workload(name):
    """The scheduler's prefill calls have as many real tokens as the independent count."""
    numbers: dict[str, int] = {}
    prompts = [
        [numbers.setdefault(word, len(numbers)) for word in json.dumps(row["body"]).split()]
        for row in rows_of(name, 120)
    ]
    grid = BucketGrid(2048, ((2048, 4, 64),), 64)
    run = SymbolicRun(0, grid=grid, prompts=prompts, num_samples=[1] * len(prompts))
    run.assert_all_rows_ended()
    counted = count_prefixes(prompts, 64)
    assert counted.distinct < 0.7 * counted.total
    assert run.num_computed == counted.distinct
