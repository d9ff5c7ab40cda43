"""What `noria bench` and `noria layouts` write: what may not be is said before the work."""

import os

import pytest

from noria.runtime.cli import main


def refusal(capsys, *arguments) -> str:
    """What is said of a path that cannot be; the model is not there, so nothing else can be."""
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
