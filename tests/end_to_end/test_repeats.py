"""Equal rows of a job get the answers that they get in jobs where no two rows are equal."""

import random

import pytest
from command import answer, chat, completion, plan_text, write_lines

COPIES = 3
BUCKETS = """\
max_length = 64
prefill = [[16, 3], [48, 2]]
decode_slots = 5
page = 8
steps_per_call = 4
score = true
"""
TEXT = "the water wheel turns"
REPEATED = {
    "greedy": completion("", TEXT, temperature=0, max_tokens=8, logprobs=2),
    "longer": completion("", TEXT, temperature=0, max_tokens=30, n=2),
    "seeded": completion("", TEXT, temperature=0.9, max_tokens=8, seed=3, n=2),
    "seed 4": completion("", TEXT, temperature=0.9, max_tokens=8, seed=4),
    "echoed": completion("", TEXT, temperature=0, max_tokens=4, echo=True, logprobs=1),
    "scored": completion("", TEXT, echo=True, max_tokens=0, logprobs=1),
    "chat": chat("", "turns", temperature=0, max_tokens=6, logprobs=True, top_logprobs=2),
}
OTHERS = {
    "sampled": completion("", TEXT, temperature=0.9, max_tokens=8),
    "refused": completion("", [5] * 500, temperature=0, max_tokens=4),
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    path.write_text(plan_text(BUCKETS))
    return path


def test_equal_rows_are_computed_once_with_the_answers_of_rows_that_run_alone(
    noria, plan, tmp_path
):
    copies = [
        [request | {"custom_id": f"{name} {copy}"} for name, request in (REPEATED | OTHERS).items()]
        for copy in range(COPIES)
    ]
    expected = {}
    for copy, rows in enumerate(copies):
        source = write_lines(tmp_path / f"{copy}.jsonl", rows)
        found, manifest = noria.batch(
            source, tmp_path / f"{copy}.out.jsonl", "--plan", plan, expect=1
        )
        assert manifest["rows"]["repeated"] == 0
        expected |= {row["custom_id"]: answer(row) for row in found}
    rows = [row for rows in copies for row in rows]
    random.Random(0).shuffle(rows)
    source = write_lines(tmp_path / "all.jsonl", rows)
    found, manifest = noria.batch(source, tmp_path / "all.out.jsonl", "--plan", plan, expect=1)
    assert [row["custom_id"] for row in found] == [row["custom_id"] for row in rows]
    assert {row["custom_id"]: answer(row) for row in found} == expected
    assert len({row["response"]["body"].get("id") for row in found}) > COPIES * len(REPEATED)
    assert manifest["rows"]["repeated"] == (COPIES - 1) * len(REPEATED)
    assert manifest["rows"]["errors_by_code"] == {"context_length_exceeded": COPIES}
    sampled = {str(expected[f"sampled {copy}"]) for copy in range(COPIES)}
    assert len(sampled) == COPIES
