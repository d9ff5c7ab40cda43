"""`noria plan --page`: a plan whose cache is a pool of pages, its report, and what is refused."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from model_on_disk import write_model

from noria.compile.plan import Plan
from noria.runtime.cli import main

MODELS = Path(__file__).parents[3] / "benchmarks/models"


@pytest.fixture
def plan(tmp_path, capsys):
    """A function that plans some rows; it returns the plan's table and what was said."""
    model, source, path = (tmp_path / name for name in ("model", "in.csv", "plan.toml"))
    write_model(model)
    rows = (f"{3 + i},{2 + i % 5}" for i in range(12))
    source.write_text("\n".join(["prompt_tokens,output_tokens", *rows]) + "\n")
    arguments = ["plan", "--model", model, "--workload", source, "-o", path, "--quiet"]

    def run(*options):
        code, said = main([*map(str, (*arguments, *options))]), capsys.readouterr()
        return (tomllib.loads(path.read_text()), said.out) if code == 0 else (None, said.err)

    return run


@pytest.mark.parametrize("chunks", ["never", "always"])
def test_a_plan_with_pages_says_what_its_cache_holds_and_that_reads_are_assumed(
    plan, tmp_path, chunks
):
    folder = tmp_path / "report"
    table, said = plan("--page", 4, "--chunks", chunks, "--tries", 2, "--report", folder)
    grid = table["buckets"]
    assert grid["page"] == 4 and "decode_spans" not in grid
    assert f"({grid['pages']} pages of 4 entries)" in said
    assert table["evidence"]["costs"].endswith("reads of pages assumed")
    report = json.loads((folder / "report.json").read_text())
    assert report["predicted"]["pages"] == grid["pages"]
    held = report["held"]
    assert 0 < held["pages"] <= grid["pages"] and 0 < held["slots"] <= grid["decode_slots"]
    assert f"rows hold at most {held['pages']} of {grid['pages']} pages" in said
    memory = report["memory_bytes"]
    assert memory["cache"] == grid["pages"] * memory["page"]


@pytest.mark.parametrize(
    ("target", "options", "page"),
    [
        ("cpu", (), 64),
        ("gpu:h200:1", ("--model", MODELS / "llama-3.1-8b"), 64),
        ("tpu:v6e:1x1", (), 64),
        # no kernel reads these pages
        ("gpu:h200:1", ("--model", MODELS / "llama-3.1-8b", "--cache", "int8"), 64),
        # the kernel reads codes in larger pages
        ("tpu:v6e:1x1", ("--cache", "int8"), 128),
    ],
)
def test_every_plan_has_pages_by_default(plan, target, options, page):
    table, said = plan("--target", target, "--tries", 1, *options)
    grid = table["buckets"]
    assert grid["page"] == page and "decode_spans" not in grid
    assert f"({grid['pages']} page" in said and "reads of pages assumed" in said


def test_a_layout_that_cannot_split_pages_is_refused(plan, tmp_path):
    """A page of 64 entries has no third."""
    layout = tmp_path / "mine.toml"
    rules = '[prefill.rules]\nlength = "sequence"\n[decode.rules]\ncache_length = "sequence"\n'
    layout.write_text(
        f'name = "mine"\nmax_replicated = 1.0\n[mesh]\nsequence = 3\n[rules]\n{rules}'
    )
    options = ("--target", "gpu:h200:3", "--layout", layout, "--tries", 1, "--chunks", "never")
    table, said = plan(*options)
    assert table is None and "buckets.page" in said


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (24, "--page: expected a power of two, got 24. Take 64, or another."),
        (0, "--page: expected a power of two, got 0. Take 64, or another."),
        (-2, "--page: expected a power of two, got -2. Take 64, or another."),
    ],
)
def test_a_page_that_cannot_be_is_refused(plan, page, message):
    table, said = plan("--page", page)
    assert table is None and message in said


def test_a_layout_that_splits_rows_has_a_group_of_slots_for_each_piece(plan):
    options = ("--target", "cpu:2", "--layout", "data-parallel@data=2")
    table, _ = plan("--page", 4, *options)
    buckets = table["buckets"]
    assert buckets["slot_groups"] == 2
    assert buckets["pages"] % 2 == buckets["decode_slots"] % 2 == 0


def test_grids_that_a_plan_is_compared_with_compile_under_its_layout(plan, tmp_path):
    """Two devices split the rows of a call: one prompt of 60 tokens has a call of two."""
    (tmp_path / "in.csv").write_text("prompt_tokens,output_tokens\n60,2\n9,2\n")
    options = ("--target", "cpu:2", "--layout", "data-parallel@data=2", "--report", tmp_path)
    table, _ = plan("--chunks", "never", "--tries", 1, *options)
    compared = json.loads((tmp_path / "report.json").read_text())["comparison"]
    assert set(compared) == {"powers of two", "multiples of 128"}
    for name, figures in compared.items():
        planned = Plan.from_table(table)
        buckets = replace(planned.buckets, prefill=figures["prefill"])
        path, bundle = tmp_path / "other.toml", tmp_path / name
        path.write_text(replace(planned, buckets=buckets).to_toml())
        model = ["--model", str(tmp_path / "model")]
        assert main(["compile", *model, "--plan", str(path), "-o", str(bundle), "--quiet"]) == 0
        # the comparison counts all graphs that are built
        assert len(json.loads((bundle / "bundle.json").read_text())["graphs"]) == figures["graphs"]


def test_more_memory_than_a_device_has_is_refused(plan):
    table, said = plan("--page", 4, "--max-memory-gb", 100)
    assert table is None
    assert "--max-memory-gb: expected at most 16 GB, the memory of a device of cpu, got 100" in said


def test_a_pool_that_holds_no_row_is_refused_with_what_would_fit(plan):
    table, said = plan("--page", 4, "--max-memory-gb", 1e-6)
    assert table is None and "weights and the smallest cache need" in said
