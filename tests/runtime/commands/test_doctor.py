"""`noria doctor`: its reports on a sound machine and on broken machines."""

import importlib.metadata
from argparse import Namespace

import pytest

from noria.runtime.commands import doctor_command as doctor


def _findings() -> dict[str, doctor.Finding]:
    return {finding.subject: finding for finding in doctor.examine()}


def test_the_machine_that_runs_the_tests_is_sound(capsys):
    assert doctor.run(Namespace(json=False)) == 0
    report = capsys.readouterr().out
    assert f"jax                {importlib.metadata.version('jax')}" in report
    assert "8 x cpu, platform cpu" in report
    assert "Broken" not in report


def test_every_subject_is_reported_once():
    subjects = [finding.subject for finding in doctor.examine()]
    assert len(set(subjects)) == len(subjects)
    wanted = {"python", "jax", "jaxlib", "flax", "smollm2", "devices", "compilation cache"}
    assert wanted <= set(subjects)


def test_a_version_outside_the_supported_range_is_broken_and_names_the_range(monkeypatch, capsys):
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "0.9.1" if name == "jax" else real(name))
    assert doctor.run(Namespace(json=False)) == 2
    report = capsys.readouterr().out
    assert "! jax " in report
    assert "0.9.1: expected" in report and ">=0.10.2" in report


def test_a_missing_extra_is_no_failure_and_names_its_command(monkeypatch):
    real = doctor._version
    monkeypatch.setattr(
        doctor, "_version", lambda name: None if name == "safetensors" else real(name)
    )
    finding = _findings()["extra hf"]
    assert finding.ok
    assert finding.text == "lacks safetensors; pip install 'noria[hf]'"


def test_a_cache_directory_below_a_file_is_broken(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    finding = _findings()["compilation cache"]
    assert not finding.ok
    assert "XDG_CACHE_HOME" in finding.text


def test_the_check_of_the_cache_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _findings()["compilation cache"].ok
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("version", "admitted"),
    [("0.10.1", False), ("0.10.2", True), ("0.12.9rc1", True), ("0.13", False), ("0.9", False)],
)
def test_a_range_admits_what_lies_inside_it(version, admitted):
    (requirement,) = doctor.parse_requirements(["jax<0.13,>=0.10.2"])
    assert requirement.admits(version) == admitted


def test_requirements_are_read_with_their_extra():
    plain, marked = doctor.parse_requirements(["numpy>=2", 'jax[tpu]; extra == "tpu"'])
    assert (plain.name, plain.range, plain.extra) == ("numpy", ">=2", None)
    assert (marked.name, marked.range, marked.extra) == ("jax", "", "tpu")


@pytest.mark.parametrize("name", [".", "xla", "graphs"])
def test_a_cache_that_others_can_write_is_broken(tmp_path, monkeypatch, name):
    folder = tmp_path / "noria" / name
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    finding = _findings()["compilation cache"]
    assert not finding.ok
    assert "can be written by others" in finding.text and "chmod go-w" in finding.text


def test_the_check_of_the_cache_changes_no_rights(tmp_path, monkeypatch):
    folder = tmp_path / "noria" / "xla"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _findings()["compilation cache"].ok
    assert folder.stat().st_mode & 0o777 == 0o755
