"""The command line: exit codes, one-line errors, nothing heavy imported."""

import signal
import subprocess
import sys

import pytest
from jax.errors import JaxRuntimeError

from noria.runtime import cli
from noria.runtime.commands import inspect_command
from noria.runtime.errors import UserError
from noria.runtime.process.stop_signals import StopNow

_IMPORTS = """
import sys
import noria.runtime.cli, noria.runtime.batch.run, noria.runtime.commands.batch_job
import noria.runtime.batch.merge
heavy = {"jax", "flax", "optax", "orbax", "transformers", "tokenizers", "jinja2", "gguf"}
print(sorted(heavy & set(sys.modules)))
"""


def batch(tmp_path, *extra, model="/nonexistent/model"):
    arguments = ["batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    return [*arguments, "--model", model, *extra]


def test_the_batch_and_merge_commands_import_nothing_heavy():
    result = subprocess.run(
        [sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_model_that_is_not_there_is_exit_code_3_and_one_line(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    assert cli.main(batch(tmp_path)) == 3
    error = capsys.readouterr().err
    assert error.startswith("noria: ") and error.count("\n") == 1 and "Traceback" not in error


@pytest.mark.parametrize("option", ["--model", "--plan", "--pipeline"])
def test_a_url_is_refused_as_it_was_typed(tmp_path, capsys, option):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    for url in ("s3://bucket/rows.jsonl", "gs://bucket//rows", "https://host/model", "file:///x"):
        for arguments in ([option, url], [f"{option}={url}"]):
            assert cli.main(batch(tmp_path, *arguments)) == 2
            said = capsys.readouterr().err
            assert said.startswith(f"noria: {url}: expected a path on this machine, as this")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("arguments", [["inspect", "hf://m"], ["bench", "--model", "s3://m/x"]])
def test_every_subcommand_refuses_a_url(arguments, capsys):
    assert cli.main(arguments) == 2
    assert f"noria: {arguments[-1]}: expected a path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("-i", "-"), "--pipeline: expected a file as input"),
        (("--update",), "--update: expected no --pipeline"),
    ],
)
def test_options_that_pipelines_do_not_have_are_refused(tmp_path, capsys, extra, message):
    assert cli.main(batch(tmp_path, "--pipeline", "stages.toml", *extra)) == 2
    assert message in capsys.readouterr().err


def test_debug_shows_the_traceback(tmp_path, capsys):
    assert cli.main(["--debug", *batch(tmp_path)]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_inspecting_nothing_is_exit_code_3(tmp_path):
    assert cli.main(["inspect", str(tmp_path / "absent")]) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["bath"],
        ["batch"],
        ["batch", "--frobnicate"],
        ["merge", "a"],
        ["compile", "--model", "m", "--plan", "plan.toml"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize("seconds", ["nan", "-1", "soon"])
def test_grace_seconds_are_at_least_0(tmp_path, capsys, seconds):
    with pytest.raises(SystemExit) as caught:
        cli.main(batch(tmp_path, "--grace-seconds", seconds))
    assert caught.value.code == 2
    message = f"--grace-seconds: expected a number of at least 0, got '{seconds}'"
    assert message in capsys.readouterr().err


def test_an_unreadable_plan_is_exit_code_2_and_named(tmp_path, capsys):
    plan = tmp_path / "plan.toml"
    plan.write_text("= nonsense")
    assert cli.main(batch(tmp_path, "--plan", str(plan))) == 2
    assert str(plan) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("x"), 2),
        (OSError("x"), 2),
        (ModuleNotFoundError("x"), 2),
        (MemoryError("x"), 4),
        (JaxRuntimeError("x"), 4),
    ],
    ids=repr,
)
def test_an_error_that_is_expected_is_one_line_and_a_code(monkeypatch, capsys, error, code):
    monkeypatch.setattr(inspect_command, "run", raising(error))
    assert cli.main(["inspect", "x"]) == code
    assert capsys.readouterr().err == "noria: x\n"


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError, IndexError, RuntimeError])
def test_another_error_is_a_bug_with_its_traceback_and_what_to_report(monkeypatch, capsys, kind):
    monkeypatch.setattr(inspect_command, "run", raising(kind("shapes")))
    assert cli.main(["inspect", "x"]) == 70
    *lines, last = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and f"{kind.__name__}: " in lines[-1]
    assert last.startswith("noria: this is a bug of noria") and "report the lines above" in last


def raising(error: BaseException):
    def fail(options):
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (StopNow(signal.SIGTERM), 75)]
)
def test_after_a_signal_the_process_leaves_at_once_with_its_code(monkeypatch, capsys, error, code):
    class Left(BaseException):
        pass

    def stop(options):
        raise error

    def leave(code):
        raise Left(code)

    monkeypatch.setattr(inspect_command, "run", stop)
    monkeypatch.setattr(cli.errors, "leave_at_once", leave)
    with pytest.raises(Left, match=f"^{code}$"):
        cli.main(["inspect", "x"])
    assert capsys.readouterr().err.startswith("noria: ")
