"""The table of figures: every figure of a job, resumed, updated, in parts and in stages."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import fake_model as fake
import numpy as np
import pytest
from faulty_disk import Crash, FaultyDisk

from noria.runtime.batch import row_runner
from noria.runtime.batch.merge import merge
from noria.runtime.batch.output import add_figures, summarise
from noria.runtime.engine.metrics import DecodeUse, EngineMetrics, PageUse, PrefillUse, Scale
from noria.runtime.errors import JobError
from noria.runtime.files.manifest import COMMON_KEYS, manifest_path
from noria.runtime.progress.progress import Progress
from noria.runtime.rows.figures import FIGURES, OF_ROWS, OTHERS, PERCENTILES
from noria.runtime.rows.part import Part
from noria.runtime.stages.pipeline_file import read_pipeline
from noria.runtime.stages.run_stages import run_stages
from noria.runtime.stages.staged_model import StagedModel

FACTS = {*COMMON_KEYS, "platform", "setups", "outputs"}
"""The keys of a manifest that say what ran, and not how much."""
OUTCOMES = {"total", "ok", "errors", "errors_by_code"}
SPREADS = {
    "time_to_first_token_seconds": "time_to_first_token",
    "inter_token_latency_seconds": "inter_token_latency",
    "end_to_end_latency_seconds": "latency",
    "output_tokens_per_second_per_row": "output_tokens_per_second",
}
OF_ONE_JOB = {*SPREADS, "generator", "bundle"}
"""Figures that each part states for itself."""
ROW_KEYS = [
    *("prompt_tokens", "output_tokens", "prompt_tokens_cut", "texts_cut", "stopped_samples"),
    *("tokens_left", "dropped_expert_choices", "at_max_length", "latency"),
    *("time_to_first_token", "inter_token_latency", "output_tokens_per_second"),
]
SUMS = ROW_KEYS[:6]
NUM_ROWS = 6


def metrics_of(index: int) -> dict[str, int]:
    """Different figures for every row, and none that is zero."""
    return {key: 100 * number + index for number, key in enumerate(ROW_KEYS, start=1)}


@pytest.fixture
def given(monkeypatch) -> None:
    """Every row has every figure."""

    def metrics(row, output):
        return metrics_of(int(row.custom_id))

    monkeypatch.setattr(row_runner, "row_metrics", metrics)


@pytest.fixture
def source(tmp_path) -> Path:
    # the last row repeats the third, which is in the same part
    prompts = [f"text {i}" for i in (*range(NUM_ROWS - 1), 2)]
    both = {"temperature": 0, "hint": "x"}
    rows = [{"id": str(i), "prompt": text, **both} for i, text in enumerate(prompts)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(source: Path, output: Path, **changes) -> dict:
    model = fake.FakeModel(fake.FakeGenerator(num_compiles=1))
    changes = {"ignores_unknown": True, "price_per_hour": 2.0, **changes}
    with suppress(JobError):  # it compiles during the run
        fake.run(source, output, model, **changes)
    return manifest_of(output)


def run_twice(source: Path, output: Path, **changes) -> dict:
    """Run a job that stops when all rows are in its journal, and run it again."""
    counter = FaultyDisk(0)
    run(source, output.with_name(f"first-{output.name}"), disk=counter, **changes)
    with pytest.raises(Crash):
        # before the output is written
        run(source, output, disk=FaultyDisk(counter.calls - 10, Crash()), **changes)
    return run(source, output, **changes)


def manifest_of(output: Path) -> dict:
    return json.loads(manifest_path(output).read_text())


def of_rows(manifest: Mapping) -> dict:
    """Return the figures that rows make, or that one run adds to them."""
    others = [x.name for x in FIGURES if x not in OF_ROWS and x.over_rows]
    rows = {x.name: manifest["rows"][x.name] for x in OF_ROWS}
    return rows | {name: manifest[name] for name in others if name in manifest}


def test_a_job_has_every_figure_of_the_table_and_no_other(source, tmp_path, given):
    manifest = run(source, tmp_path / "out.jsonl")
    assert manifest.keys() == FACTS | {"rows", "runs"} | {x.name for x in OTHERS}
    assert manifest["rows"].keys() == OUTCOMES | {x.name for x in OF_ROWS}
    columns = {key: [metrics_of(i)[key] for i in range(NUM_ROWS)] for key in ROW_KEYS}
    for name in SUMS:
        assert manifest[name] == sum(columns[name])
    for name, key in SPREADS.items():
        ranks = {
            f"p{p}": np.percentile(columns[key], p, method="inverted_cdf") for p in PERCENTILES
        }
        assert manifest[name] == {"mean": pytest.approx(np.mean(columns[key])), **ranks}
    counts = {x.name: manifest["rows"][x.name] for x in OF_ROWS if x.over_rows == "count"}
    assert counts.pop("repeated") == 1 and set(counts.values()) == {NUM_ROWS}
    assert manifest["ignored_keys"] == {"hint": NUM_ROWS} and manifest["compiles_during_run"] == 1
    assert all(manifest[x.name] is not None for x in FIGURES if x.over_parts == "runs")


def test_a_resumed_job_has_the_figures_of_the_whole(source, tmp_path, given):
    whole = of_rows(run(source, tmp_path / "whole.jsonl"))
    output = tmp_path / "out.jsonl"
    resumed = of_rows(run_twice(source, output))
    assert resumed.pop("kept_from_earlier_runs") == NUM_ROWS
    assert not whole.pop("kept_from_earlier_runs") and resumed == whole


def test_a_merge_has_every_figure_but_those_that_each_part_states(source, tmp_path, given):
    whole = run(source, tmp_path / "whole.jsonl")
    outputs = [tmp_path / f"{i}.jsonl" for i in range(3)]
    run_twice(source, outputs[0], part=Part(0, 3))
    parts = [run(source, path, part=Part(i, 3)) for i, path in enumerate(outputs)]
    merge(outputs, tmp_path / "out.jsonl", progress=Progress(is_quiet=True))
    merged = manifest_of(tmp_path / "out.jsonl")
    names = {x.name for x in OTHERS}
    assert merged.keys() & names == names - OF_ONE_JOB
    assert merged["rows"].keys() == whole["rows"].keys()
    assert merged["rows"] == {**whole["rows"], "kept_from_earlier_runs": 2}
    for name in SUMS:
        assert merged[name] == whole[name] != 0
    # the part that was resumed had nothing left to run
    assert merged["compiles_during_run"] == 2 and merged["ignored_keys"] == {"hint": NUM_ROWS}
    for part, stated in zip(parts, merged["parts"], strict=True):
        assert {name: stated[name] for name in OF_ONE_JOB} == {n: part[n] for n in OF_ONE_JOB}
    for phase in ("scan", "load", "build", "run", "wall"):
        total = sum(part[f"{phase}_seconds"] for part in parts)
        assert merged[f"{phase}_seconds"] == pytest.approx(total)
    assert merged["price"] == pytest.approx(sum(part["price"] for part in parts))
    assert merged["elapsed_seconds"] >= max(part["elapsed_seconds"] for part in parts)
    tokens = sum(r["output_tokens"] for part in parts for r in part["runs"])
    rate = tokens / merged["run_seconds"]
    assert merged["output_tokens_per_second"] == pytest.approx(rate)


def test_a_job_with_stages_adds_them_and_counts_the_rows_of_the_last(source, tmp_path, given):
    text = '[[stages]]\nname = "{}"\nprompt = "{{{{ row.prompt }}}}"\n'
    path = tmp_path / "stages.toml"
    path.write_text(text.format("one") + text.format("two"))
    pipeline = read_pipeline(path)
    output = tmp_path / "out.jsonl"
    configuration = {"model": "fake", "pipeline": pipeline.text}
    run_stages(
        fake.settings(source, output, configuration=configuration, price_per_hour=2.0),
        StagedModel(fake.FakeModel(), 0, lambda: 512),
        pipeline,
        keeps_stages=True,
        progress=Progress(is_quiet=True),
    )
    manifest = manifest_of(output)
    stages = manifest["stages"]
    names = {x.name for x in OTHERS}
    assert manifest.keys() & names == names - OF_ONE_JOB
    for name in SUMS:
        one_stage = sum(metrics_of(i)[name] for i in range(NUM_ROWS))
        assert [stage[name] for stage in stages] == [one_stage] * 2
        assert manifest[name] == 2 * one_stage
    for x in OF_ROWS:
        assert manifest["rows"][x.name] == stages[-1]["rows"][x.name]
    assert manifest["rows"]["ok_at_max_length"] == NUM_ROWS
    assert all(stage.keys() >= OF_ONE_JOB for stage in stages)
    total = sum(stage["run_seconds"] for stage in stages)
    assert manifest["run_seconds"] == pytest.approx(total)


def test_an_update_reads_from_an_answer_what_its_row_had(source, tmp_path, monkeypatch):
    def changed(request):
        output = answer(request)
        output.outputs[0].finish_reason = "length"
        output.dropped_expert_choices = 3
        return output

    answer = fake.answer
    monkeypatch.setattr(fake, "answer", changed)
    output = tmp_path / "out.jsonl"
    whole = run(source, output)
    source.write_text(source.read_text() + '{"id": "new", "prompt": "text", "max_tokens": 3}\n')
    updated = run(source, output, updates=True)
    figures = [x for x in FIGURES if x.of_answer]
    assert len(figures) == 4
    for x in figures:
        before, after = ((m["rows"] if x in OF_ROWS else m)[x.name] for m in (whole, updated))
        added = {"ok_at_max_length": 0, "ok_with_dropped_choices": 1}.get(x.name)
        assert after - before == added if added is not None else after > before > 0


def test_the_last_line_of_a_job_shows_the_figures_that_are_shown(source, tmp_path, given):
    manifest = run(source, tmp_path / "out.jsonl")
    line = summarise(tmp_path / "out.jsonl", manifest)
    assert f", {NUM_ROWS} with dropped choices of experts, {NUM_ROWS} without max_tokens" in line
    shown = [x for x in OF_ROWS if x.shown]
    assert [f", {NUM_ROWS} {x.shown}" in line for x in shown] == [True] * 3
    assert "tokens/s with prefill" in line and f"run {manifest['run_seconds']:.1f} s" in line


def test_the_figures_of_parts_that_lack_them_are_those_of_no_rows():
    added = add_figures([{"runs": []}, {"runs": []}])
    assert added["ignored_keys"] == {}
    assert add_figures([added | {"runs": []}, {"runs": [], "ignored_keys": {"a": 2}}])[
        "ignored_keys"
    ] == {"a": 2}


def test_counters_are_scaled_with_all_of_their_fields():
    """Every counter of an engine has a value of its own here."""
    metrics = EngineMetrics()
    metrics.prefill["graph"] = PrefillUse(*range(1, 1 + len(fields(PrefillUse))))
    metrics.decode = DecodeUse(*range(10, 10 + len(fields(DecodeUse))))
    metrics.pages = PageUse(*range(20, 20 + len(fields(PageUse))))
    numbers = [f.name for f in fields(EngineMetrics) if f.type in (int, float)]
    for value, name in enumerate(numbers, start=30):
        setattr(metrics, name, value)
    scaled, factor = metrics.scaled(Scale(3, 3, 3)), 3
    for use, other in [
        *((getattr(metrics, n), getattr(scaled, n)) for n in ("decode", "pages")),
        (metrics.prefill["graph"], scaled.prefill["graph"]),
    ]:
        assert vars(other) == {name: factor * value for name, value in vars(use).items()}
    assert all(getattr(scaled, n) == factor * getattr(metrics, n) != 0 for n in numbers)
    assert len(numbers) == 5 and scaled.prefill["another"] == PrefillUse()
