"""Outputs of `noria bench`, `noria layouts` and `noria compile` are checked before the work."""

import os

import pytest
from tiny import GRID

from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.runtime.cli import main


def refusal(capsys, *arguments) -> str:
    """Return the error for an impossible path; it comes before the error of the missing model."""
    assert main([*map(str, arguments), "--model", "nowhere"]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--calibration"])
def test_a_file_of_figures_that_cannot_be_written(capsys, tmp_path, monkeypatch, option):
    def said_of(path, *others) -> str:
        return refusal(capsys, "bench", option, path, *others)

    assert "expected its directory to exist" in said_of(tmp_path / "no" / "file.json")
    assert "expected a file to write, got a directory" in said_of(tmp_path)
    assert "pipe or device" in said_of("/dev/null")
    layout = tmp_path / "layout.toml"
    assert "is an input too" in said_of(layout, "--layout", layout)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert f"got {tmp_path}, where this user may not write" in said_of(tmp_path / "file.json")


def test_a_folder_of_layouts_that_cannot_be_written(capsys, tmp_path, monkeypatch):
    def said_of(path) -> str:
        return refusal(capsys, "layouts", "--target", "cpu:4", "-o", path)

    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "report"):
        assert f"expected a folder, got the file {file}" in said_of(folder)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert f"got {tmp_path}, where this user may not write" in said_of(tmp_path / "report")


def test_a_table_or_picture_of_layouts_is_no_file_that_is_read(capsys, tmp_path):
    (tmp_path / "mine.toml").write_text("mine")
    for name in ("layouts.json", "layouts.png", "layouts.json.tmp"):
        (tmp_path / name).symlink_to("mine.toml")
        arguments = ("--target", "cpu:4", "-o", tmp_path, "--layouts", tmp_path / "mine.toml")
        assert "is an input too" in refusal(capsys, "layouts", *arguments)
        (tmp_path / name).unlink()
    assert (tmp_path / "mine.toml").read_text() == "mine"


def test_a_plan_is_not_replaced_by_the_bundle_that_is_made_of_it(capsys, tmp_path):
    text = (
        "# mine\n"
        + Plan("cpu", PlannedModel("nowhere", "sha256:"), Numbers("float32"), GRID).to_toml()
    )
    for plan in (tmp_path / "plan.toml", tmp_path / "bundle.json"):
        plan.write_text(text)
        said = refusal(capsys, "compile", "--plan", plan, "-o", tmp_path)
        assert f"{plan}: the bundle's" in said and "is the plan that is read too" in said
        assert plan.read_text() == text
        plan.unlink()
