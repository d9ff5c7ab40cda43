"""Rows without `max_tokens`: a plan states their limit, and accepts a length from the user."""

import json
import tomllib

import pytest
from model_on_disk import MAX_POSITION, write_model

from noria.runtime.cli import main


@pytest.fixture
def plan(tmp_path, capsys):
    """A function that plans rows without max_tokens; it returns the plan's table and stdout."""
    model, source, path = (tmp_path / name for name in ("model", "in.jsonl", "plan.toml"))
    write_model(model)
    config = model / "config.json"
    config.write_text(config.read_text().replace(str(MAX_POSITION), "4096"))
    source.write_text('{"prompt": [5, 6, 7]}\n' + json.dumps({"prompt": [5], "max_tokens": 9}))
    arguments = ["plan", "--model", model, "--workload", source, "-o", path, "--quiet"]
    arguments += ["--chunks", "never"]

    def run(*options):
        code, said = main([*map(str, (*arguments, *options))]), capsys.readouterr()
        return (tomllib.loads(path.read_text()), said.out) if code == 0 else (None, said.err)

    return run


def test_a_plan_says_where_rows_without_max_tokens_end(plan):
    table, said = plan()
    limit = table["buckets"]["max_length"]
    assert f"rows without max_tokens end at {limit} tokens of 4096: noria plan expected" in said
    assert "--max-length plans for more" in table["max_length_reason"]
    table, said = plan("--max-length", 3000)
    assert table["buckets"]["max_length"] >= 3000 and "max_length_reason" not in table
    assert "rows without max_tokens" not in said


def test_a_length_below_that_of_a_row_is_refused(plan, tmp_path):
    table, said = plan("--max-length", 9)
    assert table is None
    assert "--max-length: expected at least 10 tokens, as many as a row of" in said
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt_tokens,output_tokens\n100,50\n")
    table, said = plan("--workload", lengths, "--max-length", 120)
    assert table is None and "expected at least 150 tokens" in said and "got 120" in said
    table, _ = plan("--workload", lengths, "--max-length", 500)
    assert table is not None and 500 <= table["buckets"]["max_length"] < 564


def test_a_length_beyond_the_context_is_refused(plan):
    table, said = plan("--max-length", 4097)
    assert table is None and "--max-length: expected at most 4096 tokens" in said
