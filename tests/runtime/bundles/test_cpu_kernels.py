"""Kernels for the CPU: kept, loaded without numba, compiled anew, refused by name."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
from cpu_kernels import loaded
from tiny import CONFIG

from noria.compile.targets import find_target
from noria.modelzoo.cpu import MULTIPLY, PUT_LINES, objects
from noria.modelzoo.cpu.objects import Processor
from noria.runtime.bundles import cpu_kernels, kernel_checks, key
from noria.runtime.bundles.cpu_kernels import load_kernels, read, refusal, write
from noria.runtime.commands import doctor_command


@pytest.fixture
def notes(monkeypatch, tmp_path) -> list[str]:
    """The lines that a load says; the process has no kernels, and an empty folder for them."""
    monkeypatch.setattr(objects, "_is_used", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return []


@pytest.fixture
def compiled(monkeypatch) -> list[Processor]:
    """The processors for which kernels were compiled; nothing compiles or is loaded."""
    found: list[Processor] = []

    def compile_all(processor: Processor) -> bytes:
        found.append(processor)
        return b"code"

    monkeypatch.setattr(cpu_kernels, "compile_all", compile_all)
    monkeypatch.setattr(cpu_kernels, "register", lambda code: None)
    monkeypatch.setattr(cpu_kernels, "refusal", lambda: None)
    monkeypatch.setattr(cpu_kernels, "TOOLS", ("jax", "numpy"))
    monkeypatch.setattr(Processor, "here", lambda: Processor("own", "+avx2"))
    return found


def test_object_code_is_kept_for_the_user_alone(notes, compiled, tmp_path):
    load_kernels("cpu", notes.append)
    assert len(compiled) == 1
    assert notes == ["compiling kernels for this processor, which takes about 15 s, once"]
    folder = tmp_path / "noria" / "kernels"
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]
    load_kernels("cpu", pytest.fail)
    assert len(compiled) == 1


@pytest.mark.parametrize("damage", ["short", "changed", "empty", "no head"])
def test_damaged_object_code_is_compiled_anew(notes, compiled, tmp_path, damage):
    load_kernels("cpu", notes.append)
    (path,) = (tmp_path / "noria" / "kernels").iterdir()
    whole = path.read_bytes()
    damaged = {"short": whole[:-1], "changed": whole[:-1] + b"x", "empty": b"", "no head": b"\n["}
    path.write_bytes(damaged[damage])
    load_kernels("cpu", notes.append)
    assert len(compiled) == 2 and path.read_bytes() == whole


def test_object_code_of_another_processor_or_version_is_not_read(notes, compiled, monkeypatch):
    load_kernels("cpu", notes.append)
    monkeypatch.setattr(Processor, "here", lambda: Processor("own", "+avx2,+avx512f"))
    load_kernels("cpu", notes.append)
    monkeypatch.setattr(cpu_kernels, "TOOLS", ("jax", "flax"))
    load_kernels("cpu", notes.append)
    assert len(compiled) == 3


def test_a_file_under_another_key_is_not_read(tmp_path):
    write(tmp_path / "file", "one", b"code\nof two lines")
    assert read(tmp_path / "file", "one") == b"code\nof two lines"
    assert read(tmp_path / "file", "two") is None
    assert read(tmp_path / "none", "one") is None


def test_without_a_folder_kernels_compile_each_time(notes, compiled, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    for _ in range(2):
        load_kernels("cpu", notes.append)
    assert len(compiled) == 2


def test_other_targets_load_none(notes):
    for target in ("tpu:v5e:2x2", "gpu:h100:1", "gpu:8"):
        load_kernels(target, pytest.fail)


def test_a_job_is_continued_with_the_kernels_that_began_it(monkeypatch):
    """The order of sums differs, so these words are among what a journal must have in common."""
    monkeypatch.setattr(cpu_kernels, "refusal", lambda: None)
    assert cpu_kernels.kernels_of("cpu:8") == " with kernels"
    assert cpu_kernels.kernels_of("tpu:v5e:2x2") == ""
    monkeypatch.setattr(cpu_kernels, "refusal", lambda: "they need numba")
    assert cpu_kernels.kernels_of("cpu:8") == ""


def test_without_numba_one_line_says_what_is_lost(notes, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "find_spec", lambda name: None)
    load_kernels("cpu:8", notes.append)
    (note,) = notes
    assert note == (
        "calls without the kernels for the CPU, which takes longer: they need numba "
        "(pip install 'noria[cpu]')"
    )


def test_what_kernels_do_not_serve_is_named(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "find_spec", lambda name: name)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert refusal() == "they serve x86-64 and ARM of 64 bits, got riscv64"
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(Processor, "here", lambda: Processor("old", "+sse2,-avx2"))
    assert "avx2 and fma, got none with avx2" in (refusal() or "")
    monkeypatch.setattr(Processor, "here", lambda: Processor("new", "+avx2,+fma"))
    monkeypatch.setattr(cpu_kernels, "_interface_version", lambda: (1, 0))
    assert "versions 0.3, 0.4, 0.5 of XLA's interface, got 1.0" in (refusal() or "")
    monkeypatch.setattr(cpu_kernels, "_interface_version", lambda: None)
    assert "got none" in (refusal() or "")
    monkeypatch.undo()
    assert cpu_kernels._interface_version() in cpu_kernels.cpu.VERSIONS


def test_executables_depend_on_the_kernels(notes, compiled, monkeypatch):
    target = find_target("cpu")
    without = key.surroundings(target, CONFIG)["kernels for the CPU"]
    monkeypatch.setattr(objects, "_is_used", True)
    monkeypatch.setattr(key, "is_loaded", lambda: True)
    first = key.surroundings(target, CONFIG)["kernels for the CPU"]
    monkeypatch.setattr(Processor, "here", lambda: Processor("own", "+avx2,+avx512f"))
    assert len({without, first, key.surroundings(target, CONFIG)["kernels for the CPU"]}) == 3


@pytest.mark.cpu_kernels
@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
def test_a_second_process_loads_them_without_numba(notes, tmp_path):
    program = (
        "import sys; from noria.runtime.bundles.cpu_kernels import load_kernels;"
        "from noria.modelzoo.cpu.objects import is_loaded; notes = [];"
        "load_kernels('cpu', notes.append); "
        "print(len(notes), is_loaded(), 'numba' in sys.modules)"
    )
    outputs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert outputs == ["1 True True\n", "0 True False\n"]
    (path,) = (tmp_path / "noria" / "kernels").iterdir()
    assert len(json.loads(path.read_bytes().partition(b"\n")[0])) == 2


@pytest.mark.cpu_kernels
@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
def test_each_kernel_is_checked_and_a_wrong_one_is_named(monkeypatch):
    with loaded():
        names = objects.kernel_names()
        assert {name for name, *_ in kernel_checks._results()} == set(names)
        assert kernel_checks.wrong_kernels() == {}
        found = doctor_command._cpu_kernels()
        assert found.ok and found.text.startswith(f"{len(names)}, each near its reference")
        # a weight in the wrong order, and entries that are not those of the reference
        monkeypatch.setattr(kernel_checks, "pack", lambda weight, inputs, columns: weight)
        monkeypatch.setattr(kernel_checks, "put_lines", lambda pool, *_: pool)
        wrong = {name for name in names if name.startswith(MULTIPLY)} | {PUT_LINES}
        assert set(kernel_checks.wrong_kernels()) == wrong
        found = doctor_command._cpu_kernels()
        assert not found.ok and all(name in found.text for name in wrong)


def test_doctor_says_why_there_are_no_kernels(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "find_spec", lambda name: None)
    found = doctor_command._cpu_kernels()
    assert found.ok and found.text == "none: they need numba (pip install 'noria[cpu]')"
