"""Files of `noria plan`: forbidden outputs are refused before the work, and no file is lost."""

import os

import pytest

from noria.runtime.cli import main

ROWS = "prompt_tokens,output_tokens\n5,3\n"


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(ROWS)
    return path


def refusal(capsys, table, output, *options) -> str:
    """Return the error for an impossible path; it comes before the error of the missing model."""
    arguments = ("plan", "--model", "nowhere", "--workload", table, "-o", output, *options)
    assert main([*map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_no_input_is_overwritten(capsys, table):
    assert "is an input too" in refusal(capsys, table, table)
    others = ("--hardware", "--calibration", "--from-output", "--layout")
    for option in others:
        mine = table.with_name("mine")
        mine.write_text("mine")
        assert "is an input too" in refusal(capsys, table, mine, option, mine)
        assert mine.read_text() == "mine"
    assert table.read_text() == ROWS


def test_layouts_are_inputs_however_they_are_spelled(capsys, table):
    mine = table.with_name("my own layout.toml")
    mine.write_text("mine")
    for spelling in (mine, f"'{mine}'", f"data-parallel '{mine}'"):
        assert "is an input too" in refusal(capsys, table, mine, "--layout", spelling)
        assert mine.read_text() == "mine"


def test_no_file_of_a_model_is_overwritten(capsys, table, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    config = model / "config.json"
    config.write_text("mine")
    assert "is an input too" in refusal(capsys, table, config, "--model", model)
    assert config.read_text() == "mine"


def test_what_cannot_be_written_is_refused_before_the_work(capsys, table, monkeypatch):
    folder = table.parent
    assert "expected its directory to exist" in refusal(capsys, table, folder / "no" / "plan.toml")
    assert "expected a file to write, got a directory" in refusal(capsys, table, folder)
    assert "pipe or device" in refusal(capsys, table, "/dev/null")
    plan = folder / "plan.toml"
    for report in (table, table / "report"):
        said = refusal(capsys, table, plan, "--report", report)
        assert f"expected a folder, got the file {table}" in said
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert f"got {folder}, where this user may not write" in refusal(capsys, table, plan)


def test_a_report_that_cannot_be_written_is_refused_before_the_work(capsys, table, monkeypatch):
    shut = table.parent / "shut"
    shut.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != shut)
    said = refusal(capsys, table, table.with_name("plan.toml"), "--report", shut / "a" / "b")
    assert f"got {shut}, where this user may not write" in said
