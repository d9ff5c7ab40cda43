"""Messages of jobs: `--quiet` hides progress alone, and `--progress-file` has it as JSON."""

import json
import shutil
import signal
from datetime import datetime

import pytest
from command import completion, wait_for_records, write_lines


@pytest.fixture
def model(noria, tmp_path):
    """A model whose configuration has a key that nothing reads."""
    folder = shutil.copytree(noria.model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"favourite_colour": "green"}))
    return folder


def rows(path, num_rows: int = 4, **body):
    return write_lines(path, [completion(f"row-{i}", [3, 4, 5], **body) for i in range(num_rows)])


def test_a_quiet_job_shows_the_first_error_and_ignored_keys_alone(noria, model, tmp_path):
    source = rows(tmp_path / "in.jsonl", max_tokens=4, favourite_number=7)
    source.write_text(source.read_text("utf-8") + "{broken\n")
    arguments = ("-i", source, "-o", tmp_path / "out.jsonl", "--model", model)
    said = noria.run("batch", *arguments, "--ignore-unknown", "--quiet", expect=1).stderr
    first, second, third = said.splitlines()
    assert "keys without effect" in first and "favourite_colour" in first
    assert second.startswith("first error: line 5: invalid_json")
    assert third == "ignored keys that noria does not know: 'favourite_number' in 4 rows"


def test_a_quiet_job_says_why_it_stops(noria, tmp_path):
    source = rows(tmp_path / "in.jsonl", 400, max_tokens=40, temperature=1.0, ignore_eos=True)
    output = tmp_path / "out.jsonl"
    options = ("--set", "buckets.decode_slots=2", "--quiet")
    process = noria.start("batch", "-i", source, "-o", output, "--model", noria.model, *options)
    wait_for_records(process, output, 6)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 75
    first, second = said.splitlines()
    assert first.startswith("SIGTERM: finishing")
    assert second.startswith("stopped by SIGTERM: ") and "run the same command again" in second


@pytest.mark.parametrize("command", ["convert", "plan"])
def test_other_commands_are_not_quiet_about_ignored_keys(noria, model, tmp_path, command):
    source = rows(tmp_path / "in.jsonl", max_tokens=4)
    options = ("--workload", source) if command == "plan" else ()
    arguments = (command, "--model", model, "-o", tmp_path / "made", *options, "--quiet")
    said = noria.refuse(*arguments, expect=0)
    assert "favourite_colour" in said and said.count("\n") == 1


def test_the_progress_file_has_every_phase_and_the_end(noria, tmp_path):
    source, output = rows(tmp_path / "in.jsonl", max_tokens=4), tmp_path / "out.jsonl"
    arguments = ("batch", "-i", source, "-o", output, "--model", noria.model, "--progress-file")
    progress = tmp_path / "progress.jsonl"
    noria.run(*arguments, progress)
    lines = [json.loads(line) for line in progress.read_text("utf-8").splitlines()]
    phases = [line["phase"] for line in lines]
    assert list(dict.fromkeys(phases)) == ["scan", "load", "build", "run", "end"]
    assert (lines[-1]["exit_code"], lines[-1]["rows_done"], lines[-1]["rows_total"]) == (0, 4, 4)
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)
    before = source.read_bytes()
    for path in (source, output, output.with_name("out.jsonl.journal")):
        said = noria.refuse(*arguments, path)
        assert "the progress file" in said
    assert source.read_bytes() == before
