"""Jobs with stages over a fake model: rows and errors, resuming, bounds, and files."""

import json
import os
import re
import signal
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import fake_model as fake
import pytest
from fake_model import masked, settings
from faulty_disk import Crash, FaultyDisk
from related_prompts import hash_tokens

from noria.runtime.batch import job_input
from noria.runtime.batch.job_runs import PhaseClock
from noria.runtime.batch.merge import merge
from noria.runtime.errors import ConfigError, JobError, UnusableFile
from noria.runtime.files.manifest import read_manifest
from noria.runtime.progress.progress import Progress
from noria.runtime.rows.part import WHOLE, Part
from noria.runtime.rows.row_files import OpenRows
from noria.runtime.rows.scan import ScanSummary
from noria.runtime.stages.pipeline_file import read_pipeline
from noria.runtime.stages.run_stages import run_stages
from noria.runtime.stages.stage_bounds import measure_stages
from noria.runtime.stages.stage_renderer import open_renderers
from noria.runtime.stages.stage_rows import StagedRows, StageFiles, read_rows
from noria.runtime.stages.staged_model import StagedModel

STAGES = """
[[stages]]
name = "draft"
max_tokens = 16

[[stages]]
name = "revise"
max_tokens = 4
prompt = "{{ row.prompt }}: {{ draft.answer }} {{ row.topic | default('none') }}"
"""
LINES = [
    *({"id": f"q{i}", "prompt": f"prompt {i}"} for i in range(6)),
    {"id": "null", "prompt": "x", "topic": None},
    {"id": "data", "question": "why?"},
    {"id": "nan", "prompt": "nan"},
    {"id": "q1", "prompt": "again"},
]


def run(
    source: Path,
    output: Path,
    model=None,
    disk=None,
    *,
    text=STAGES,
    keeps=False,
    is_quiet=True,
    **changes,
):
    path = source.with_name("stages.toml")
    path.write_text(text)
    pipeline = read_pipeline(path)
    configuration = {"model": "fake", "pipeline": pipeline.text}
    return run_stages(
        settings(source, output, **{"configuration": configuration, **changes}),
        StagedModel(model or fake.FakeModel(), 0, lambda: 512),
        pipeline,
        keeps_stages=keeps,
        progress=Progress(is_quiet=is_quiet),
        disk=disk,
    )


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "in.jsonl"
    lines = [json.dumps(line) for line in LINES]
    path.write_text("\n".join([*lines[:2], "{broken", "", *lines[2:]]))
    return path


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]


def codes(path: Path) -> list[str | None]:
    errors = [
        record["error"] or record["response"]["body"].get("error") or {} for record in records(path)
    ]
    return [error.get("code") for error in errors]


def test_each_row_is_its_last_answer_or_the_error_that_ended_it(source, tmp_path):
    output, model = tmp_path / "out.jsonl", fake.FakeModel()
    assert run(source, output, model, keeps=True) == 1
    bad = ["template_error", "invalid_line", "nonfinite_logits", "duplicate_custom_id"]
    assert codes(output) == [None, None, "invalid_json", *[None] * 4, *bad]
    assert model.num_builds == 1
    folder = tmp_path / "out.jsonl.stages"
    drafts = {record["custom_id"]: record for record in records(folder / "1-draft.jsonl")}
    asked = {record["custom_id"]: record for record in records(folder / "2-revise.in.jsonl")}
    draft = drafts["q3"]["response"]["body"]["choices"][0]["text"]
    assert asked["q3"]["body"]["prompt"] == f"prompt 3: {draft} none"
    assert list(asked) == [f"q{i}" for i in range(6)]
    revised = {record["custom_id"]: record for record in records(folder / "2-revise.jsonl")}
    answered = [record for record in records(output) if record["custom_id"] in revised]
    # the second row of this id is an error
    assert answered[:-1] == list(revised.values()) and answered[-1]["custom_id"] == "q1"


def test_prompts_of_all_stages_show_the_same_time(tmp_path, monkeypatch):
    times = (datetime(2026, 1, day) for day in range(1, 28))
    clock = SimpleNamespace(now=lambda: next(times), fromisoformat=datetime.fromisoformat)
    monkeypatch.setattr(job_input, "datetime", clock)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"id": "clock", "prompt": "what time is it?"}))
    assert run(source, output, keeps=True) == 0
    folder = tmp_path / "out.jsonl.stages"
    outputs = folder / "1-draft.jsonl", folder / "2-revise.jsonl", output
    shown = {read_manifest(path)["instant"] for path in outputs}
    assert shown == {"2026-01-01T00:00:00"}


def test_the_manifest_counts_rows_by_outcome_and_stage(source, tmp_path):
    output = tmp_path / "out.jsonl"
    run(source, output)
    manifest = read_manifest(output)
    assert (manifest["rows"]["total"], manifest["rows"]["ok"]) == (11, 6)
    draft, revise = manifest["stages"]
    assert draft["name"] == "draft" and revise["name"] == "revise"
    before = {"duplicate_custom_id": 1, "invalid_json": 1, "invalid_line": 1}
    assert draft["errors_before"] == before
    assert revise["errors_before"] == {"template_error": 1}
    assert draft["rows"]["errors_by_code"] == {"nonfinite_logits": 1}
    assert revise["rows"]["total"] == revise["rows"]["ok"] == 6
    assert manifest["output_tokens"] == draft["output_tokens"] + revise["output_tokens"]
    assert manifest["input"]["rows"] == 11
    assert list(tmp_path.glob("out.jsonl*")) == [output, tmp_path / "out.jsonl.manifest.json"]


def test_a_template_that_fails_ends_its_row_with_stage_and_field(source, tmp_path):
    output = tmp_path / "out.jsonl"
    text = STAGES.replace("row.topic | default('none')", "row.topic")
    run(source, output, text=text)
    error = records(output)[0]["response"]["body"]["error"]
    assert error["code"] == "template_error"
    assert error["message"].startswith("stage revise, prompt: the template failed: UndefinedError")
    assert "Change the row, or the template" in error["message"]
    assert read_manifest(output)["stages"][1]["errors_before"] == {"template_error": 7}


def test_a_crash_at_any_disk_operation_changes_nothing_in_the_end(source, tmp_path):
    run(source, tmp_path / "whole.jsonl")
    expected = masked(tmp_path / "whole.jsonl")
    counter = FaultyDisk(0)
    run(source, tmp_path / "count.jsonl", disk=counter)
    for at in range(1, counter.calls + 1, 7):
        output = tmp_path / f"{at}.jsonl"
        with pytest.raises(Crash):
            run(source, output, disk=FaultyDisk(at, Crash(), tear=at % 2 == 0))
        assert run(source, output) == 1
        assert masked(output) == expected, f"after a crash at operation {at}"
        assert not (tmp_path / f"{at}.jsonl.stages").exists()


def test_parts_merge_to_the_output_of_the_whole_job(source, tmp_path):
    parts = [tmp_path / f"part{i}.jsonl" for i in range(2)]
    for i, part in enumerate(parts):
        run(source, part, part=Part(i, 2))
    run(source, tmp_path / "whole.jsonl")
    merge(parts, tmp_path / "merged.jsonl", progress=Progress(is_quiet=True))
    assert masked(tmp_path / "merged.jsonl") == masked(tmp_path / "whole.jsonl")
    merged, whole = (read_manifest(tmp_path / f"{name}.jsonl") for name in ("merged", "whole"))
    assert merged["rows"] == whole["rows"]
    assert merged["plan"] == whole["plan"]


def test_a_complete_job_does_nothing_and_a_changed_one_is_refused(source, tmp_path):
    output, model = tmp_path / "out.jsonl", fake.FakeModel()
    run(source, output)
    before = output.read_bytes()
    assert run(source, output, model) == 1
    assert (model.num_texts, model.num_builds) == (0, 0) and output.read_bytes() == before
    changed = STAGES.replace("max_tokens = 4", "max_tokens = 5")
    with pytest.raises(
        UnusableFile, match=r"stages\.1\.max_tokens: there 4, now 5\n[\s\S]*--restart"
    ):
        run(source, output, text=changed)
    source.write_text(source.read_text() + '\n{"prompt": "new"}')
    with pytest.raises(UnusableFile, match=r"the input: there[\s\S]*output, or replace it with"):
        run(source, output)
    assert run(source, output, text=changed, restart=True) == 1


@pytest.mark.parametrize("operations", [44, 100])
def test_an_input_or_a_stage_that_changes_in_between_is_refused(source, tmp_path, operations):
    output = tmp_path / "out.jsonl"
    with pytest.raises(Crash):
        run(source, output, disk=FaultyDisk(operations, Crash()))
    with pytest.raises(UnusableFile, match=r"(?s)stages\.1\.prompt: there .*--restart"):
        run(source, output, text=STAGES.replace("none", "nothing"))
    lines = source.read_text().split("\n")
    source.write_text("\n".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(UnusableFile, match="input of the stages: there") as caught:
        run(source, output)
    assert str(caught.value).startswith(f"{source}: ")
    has_answers = read_manifest(tmp_path / "out.jsonl.stages" / "1-draft.jsonl") is not None
    assert has_answers == (operations == 100)


@pytest.mark.parametrize("operations", [44, 100])
def test_stages_of_another_part_are_refused(source, tmp_path, operations):
    output = tmp_path / "out.jsonl"
    with pytest.raises(Crash):
        run(source, output, disk=FaultyDisk(operations, Crash()))
    message = r"(?s)rows: there part 0 of 1, now part 1 of 2\n.*--restart"
    with pytest.raises(UnusableFile, match=message):
        run(source, output, part=Part(1, 2))
    assert run(source, output) == 1
    run(source, tmp_path / "whole.jsonl")
    assert masked(output) == masked(tmp_path / "whole.jsonl")


@pytest.mark.parametrize("change", [("row.prompt }}", "now }}"), ("max_tokens = 16", "")])
def test_a_refused_pipeline_leaves_no_folder(source, tmp_path, change):
    with pytest.raises(ConfigError):
        run(source, tmp_path / "out.jsonl", text=STAGES.replace(*change))
    assert not (tmp_path / "out.jsonl.stages").exists()


@pytest.mark.parametrize(
    ("failure", "options"), [(JobError("no memory", 4), {}), (None, {"on_error": "raise"})]
)
def test_an_error_before_the_first_row_leaves_no_folder(source, tmp_path, failure, options):
    with pytest.raises(JobError):
        run(source, tmp_path / "out.jsonl", fake.FakeModel(failure=failure), **options)
    assert not (tmp_path / "out.jsonl.stages").exists()


def test_parts_with_stages_are_told_to_have_one_time(tmp_path, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = json.dumps({"id": "clock", "prompt": "what time is it?"})
    source.write_text(f"{line}\n")
    run(source, output, is_quiet=False, part=Part(0, 2))
    assert "run every part with --now" in capsys.readouterr().err


def test_error_rows_may_have_a_file_of_their_own(source, tmp_path):
    output, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    run(source, output, error_file=errors)
    assert codes(output) == [None] * 6 and len(codes(errors)) == 5 and all(codes(errors))


@pytest.mark.parametrize("plan", [None, "max_length = 9\n", "[structured]\nstates = 2\n"])
def test_a_stored_plan_with_forms_measures_all_stages(plan):
    measured = SimpleNamespace(requirements=[SimpleNamespace(prompt_length=3)])
    model = fake.FakeModel()
    seen = []

    def build(summary, *others, **options):
        seen.append(summary)
        built = fake.FakeModel.build(model, summary, *others, **options)
        return replace(built, better_plan=lambda outputs, seconds: "a note on one stage")

    model.build = build
    own = SimpleNamespace(requirements=measured.requirements)
    staged = StagedModel(model, 0, lambda: 512, lambda: measured)
    built = staged.build(own, plan, phases=PhaseClock(), progress=Progress(is_quiet=True))
    assert built.better_plan({0: 1}, 1.0) is None
    assert seen == [own if plan == "max_length = 9\n" else measured]


def test_unknown_keys_that_are_ignored_are_planned_and_counted(source, tmp_path):
    lines = [json.dumps({"prompt": "a longer prompt", "extra": 1}), json.dumps({"prompt": "b"})]
    source.write_text("\n".join(lines))
    output, changes = tmp_path / "out.jsonl", {"ignores_unknown": True, "price_per_hour": 3600.0}
    run(source, output, **changes)
    manifest = read_manifest(output)
    assert manifest["rows"]["ok"] == 2 and manifest["ignored_keys"] == {"extra": 1}
    assert "max_length = 42" in manifest["plan"]  # the longest prompt of the second stage
    prices = [stage["price"] for stage in manifest["stages"]]
    assert manifest["price"] == pytest.approx(sum(prices)) and manifest["price"] > 0


def test_calls_are_part_of_the_answer_that_later_stages_read(source, tmp_path):
    files = StageFiles(tmp_path, 1, "draft")
    function = {"name": "now", "arguments": '{"zone": "\\"UTC\\""}'}
    call = {"id": "c", "type": "function", "function": function}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "assistant", "content": "No."},
    ]
    body = {"choices": [{"message": message} for message in messages]}
    line = {"custom_id": "q0", "response": {"status_code": 200, "body": body}, "error": None}
    files.output.write_text(json.dumps(line) + "\n")
    files.errors.touch()
    with source.open("rb") as file:
        followed = next(StagedRows(OpenRows(file), source, WHOLE, [files]).follow(1))
    # the arguments as they were generated, whose quotation marks need no escapes
    shown = '[{"name": "now", "arguments": {"zone": "\\"UTC\\""}}]'
    answers = [shown, f"Let me see.\n{shown}", "No."]
    assert followed.answers["draft"] == {"answer": shown, "answers": answers}


class Stopping(fake.FakeGenerator):
    """A generator whose process is asked to end in the second step, when it has all four rows."""

    def step(self):
        if self.num_steps == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step()


def test_a_signal_during_the_last_rows_of_a_stage_ends_the_job_before_the_next(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    # as many as there are slots, so all rows are in flight
    source.write_text("\n".join(json.dumps({"id": f"q{i}", "prompt": "x"}) for i in range(4)))
    assert run(source, tmp_path / "whole.jsonl") == 0
    model = fake.FakeModel(Stopping())
    assert run(source, output, model) == 75
    folder = tmp_path / "out.jsonl.stages"
    assert (folder / "1-draft.jsonl").exists() and not (folder / "2-revise.in.jsonl").exists()
    assert run(source, output) == 0
    assert masked(output) == masked(tmp_path / "whole.jsonl")


def test_an_error_file_that_cannot_be_written_is_refused(source, tmp_path):
    with pytest.raises(UnusableFile, match="which cannot hold answers"):
        run(source, tmp_path / "out.jsonl", error_file=tmp_path / "errors.csv")


def test_an_input_among_the_files_of_stages_is_refused(source, tmp_path):
    output, folder = tmp_path / "out.jsonl", tmp_path / "out.jsonl.stages"
    run(source, output, keeps=True)
    with pytest.raises(UnusableFile, match="in the folder for the files of stages"):
        run(folder / "1-draft.jsonl", output)


def bounds(source: Path, text: str, **changes) -> ScanSummary:
    """Measure the rows of all stages."""
    path = source.with_name("stages.toml")
    path.write_text(text)
    job = settings(source, source.with_name("out.jsonl"), **changes)
    with ExitStack() as opened:
        renderers = open_renderers(read_pipeline(path), opened)
        rows = read_rows(opened.enter_context(source.open("rb")))
        return measure_stages(job, fake.FakeModel(), renderers, rows, 512, lambda *counts: None)


def test_rows_of_an_adapter_share_the_prefixes_of_the_adapter(source):
    common = "a beginning of exactly 32 tokens"
    rows = [{"model": "tuned", "prompt": f"{common}{i}"} for i in range(2)]
    source.write_text("\n".join(map(json.dumps, rows)))
    summary = bounds(source, STAGES, models={"base": None, "tuned": "tuned"})
    digest = bytes.fromhex(hash_tokens(list(common.encode()), "tuned"))
    assert int.from_bytes(digest, "little") in summary.prefixes.hashes.tolist()


def test_bounds_count_the_answers_that_rows_ask_for(source):
    given = [3, None, 10**9]
    source.write_text("\n".join(json.dumps({"prompt": "x", "n": n}) for n in given))
    summary = bounds(source, STAGES.replace("{{ draft.answer }}", "{{ draft.answers | join }}"))
    lengths = [
        row.requirements.prompt_length
        for row in summary.rows
        if row.requirements and str(row.custom_id).endswith("revise")
    ]
    placeholder, longest_answer = 4, 16
    # the request with the last number is refused
    expected = [n * (placeholder + longest_answer) for n in (3, 1, 1)]
    assert lengths == [len("x:  none") + length for length in expected]


def test_bounds_count_the_name_of_a_tool_that_must_be_called(source):
    source.write_text(json.dumps({"question": "x"}))
    function = '{ name = "now", parameters = { type = "object" } }'
    draft = f"""
[[stages]]
name = "draft"
max_tokens = 16
tools = [{{ type = "function", function = {function} }}]
tool_choice = {{ type = "function", function = {{ name = "now" }} }}
messages = [{{ role = "user", content = "{{{{ row.question }}}}" }}]
"""
    summary = bounds(source, f"{draft}[[stages]]\nname = 'last'\nprompt = '{{{{ draft.answer }}}}'")
    (length,) = (
        row.requirements.prompt_length
        for row in summary.rows
        if row.requirements and str(row.custom_id).endswith("last")
    )
    placeholder, longest_answer = 4, 16
    assert length == len('[{"name": "now", "arguments": }]') + placeholder + longest_answer


@pytest.mark.parametrize("models", [None, {"base": None, "tuned": "tuned"}])
def test_every_stage_uses_the_adapter_of_a_row(source, tmp_path, models):
    source.write_text(json.dumps({"id": "q0", "prompt": "x", "model": "tuned"}))
    text = f"{STAGES}[[stages]]\nname = 'base'\nmodel = 'base'\nprompt = '{{{{ row.prompt }}}}'"
    run(source, tmp_path / "out.jsonl", text=text, keeps=True, models=models)
    folder = tmp_path / "out.jsonl.stages"
    names = ("1-draft", "2-revise", "3-base")
    asked = [records(folder / f"{name}.in.jsonl")[0]["body"].get("model") for name in names]
    # without adapters, `model` may be any key of a row
    assert asked == ["tuned", "tuned" if models else None, "base"]


def test_limits_of_a_stage_replace_both_limits_of_a_row(source, tmp_path):
    limits = {"max_tokens": 90, "max_completion_tokens": 80}
    source.write_text(json.dumps({"id": "q0", "prompt": "x", **limits}))
    run(source, tmp_path / "out.jsonl", keeps=True)
    (asked,) = records(tmp_path / "out.jsonl.stages" / "1-draft.in.jsonl")
    assert asked["body"] == {"prompt": "x", "max_tokens": 16}
    without = STAGES[: STAGES.index("[[stages]]", 20)].replace("max_tokens = 16", "n = 1")
    run(source, tmp_path / "own.jsonl", text=without, keeps=True)
    (asked,) = records(tmp_path / "own.jsonl.stages" / "1-draft.in.jsonl")
    assert asked["body"] == {"prompt": "x", **limits, "n": 1}


def test_an_echo_that_a_later_stage_would_read_is_an_error_row(source, tmp_path):
    source.write_text(json.dumps({"id": "q0", "prompt": "x", "echo": True}))
    output = tmp_path / "out.jsonl"
    assert run(source, output) == 1
    error = records(output)[0]["response"]["body"]["error"]
    assert error["message"].startswith("stage draft: echo: expected false, as a later stage reads")
    alone = STAGES.replace("{{ draft.answer }}", "")
    assert run(source, tmp_path / "unread.jsonl", text=alone) == 0
    off = STAGES.replace("max_tokens = 16", "max_tokens = 16\necho = false")
    assert run(source, tmp_path / "off.jsonl", text=off) == 0


@pytest.mark.parametrize("given", [None, 40])
def test_bounds_cover_the_prompts_that_stages_ask(source, given):
    text = STAGES.replace('"revise"', f'"revise"\nmax_prompt_tokens = {given}') if given else STAGES
    summary = bounds(source, text)
    need = {row.custom_id: row.requirements for row in summary.rows if row.requirements}
    assert need["q2 in stage draft"].prompt_length == len("prompt 2")
    placeholder, longest_answer = 4, 16
    expected = len("prompt 2: ") + placeholder + len(" none") + longest_answer
    assert need["q2 in stage revise"].prompt_length == given or expected
    lines = {row.custom_id: row.line_number for row in summary.rows}
    assert lines["q2 in stage revise"] == 5
    # all but the tokens directly before the answer count as shared
    table, place = summary.prefixes, [row.custom_id for row in summary.rows]
    assert all(
        shared == 0 or re.search("draft", place[row])
        for row, shared in zip(table.rows.tolist(), table.shared.tolist(), strict=True)
    )


FIELDS = STAGES.replace(
    "{{ draft.answer }}",
    "{% set d = draft.answer | from_json %}{{ d.mood }}{% if d.score > 3 %} high{% endif %}",
)


def test_bounds_count_the_answer_for_each_field_of_it(source):
    need = {row.custom_id: row.requirements for row in bounds(source, FIELDS).rows}
    placeholder, longest_answer = 4, 16
    expected = len("prompt 2: ") + placeholder + len(" none") + longest_answer
    assert need["q2 in stage revise"].prompt_length == expected


def test_an_answer_that_is_no_json_ends_its_row(source, tmp_path):
    output = tmp_path / "out.jsonl"
    assert run(source, output, text=FIELDS) == 1
    error = records(output)[0]["response"]["body"]["error"]
    assert error["code"] == "template_error"
    assert "stage revise, prompt: the template failed: from_json: expected a" in error["message"]
