"""`scripts/test` and `.ci/run` with stand-ins for programs: which tests they run and require."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = ".ci/run"
WORKERS = "-n logical --maxprocesses 8 --no-loadscope-reorder --dist"
SUITE = f"{WORKERS} loadfile"
STAND_IN = f"""#!/bin/sh
case "$*" in
    "-m pytest"*) echo "$*" >>"$LOG"; exit ;;
    *purelib*) dirname "$LOG"; exit ;;
    *'version("jax")'*) echo 1.0; exit ;;
    *"-m pip"*" fsspec"* | *"-m pip"*" ray"*) [ -z "$NO_PACKAGES" ]; exit ;;
    "-m pip"*) exit ;;
    "-c import sys; sys.exit(sys.version_info"*12*) [ -z "$NO_PYTHON" ]; exit ;;
esac
exec {sys.executable} -I -S "$@"
"""
"""Notes every run of pytest, and installs nothing."""
PYTHONS = ("python3", "python", *(f"python3.{minor}" for minor in range(11, 15)))


@pytest.fixture
def checkout(tmp_path):
    """A copy of the scripts, in which every Python is a stand-in, with a commit."""
    folder = tmp_path / "checkout"
    for name in ("scripts/test", "scripts/environment.sh", RUN, "pyproject.toml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    golden = "tests/compile/programs/golden_programs.toml"
    (folder / golden).parent.mkdir(parents=True)
    shutil.copy(ROOT / golden, folder / golden)
    venvs = [folder / ".venv" / name for name in ("", "third-party", "newest")]
    paths = [venv / "bin/python" for venv in venvs]
    paths += [tmp_path / "bin" / name for name in PYTHONS]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STAND_IN)
        path.chmod(0o755)
    for name in ("ruff", "basedpyright"):
        (folder / ".venv/bin" / name).symlink_to("/bin/true")
    subprocess.run(["git", "-C", folder, "init", "-q"], check=True)
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    """Make an empty commit."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a", "-C", folder]
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "Change"], check=True)


def head(folder: Path) -> str:
    """Return the hash of the last commit."""
    git = ["git", "-C", folder, "rev-parse", "HEAD"]
    return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()


def run(folder: Path, script: str, *arguments: str, **variables: str):
    """Run a script; return its exit code, its runs of pytest and what it printed."""
    log = folder / "log.txt"
    environment = {
        **{key: value for key, value in os.environ.items() if key != "CI"},
        "PATH": f"{folder.parent / 'bin'}:{os.environ['PATH']}",
        "PYENV_ROOT": str(folder / "none"),
        "LOG": str(log),
        **variables,
    }
    done = subprocess.run(
        [folder / script, *arguments], env=environment, capture_output=True, text=True
    )
    runs = [line.removeprefix("-m pytest").strip() for line in log.read_text().splitlines()]
    return done.returncode, runs, done.stdout + done.stderr


CPU_KERNELS = (
    f"{SUITE} -m cpu_kernels tests/modelzoo tests/runtime/bundles tests/compile tests/end_to_end "
    "tests/scripts"
)


def test_a_run_of_ci_takes_the_suite_and_all_others(checkout):
    code, runs, said = run(checkout, RUN)
    assert code == 0, said
    assert runs[:6] == [
        SUITE,
        CPU_KERNELS,
        f"{WORKERS} load tests/end_to_end/test_embedded_model.py",
        f"{WORKERS} load -m gpu_compile tests/compile",
        "tests/compile/test_targets.py",
        "-m newest_libtpu tests/compile",
    ]
    assert runs[6].endswith("tests/third_party") and "test_golden.py" in runs[7]
    part = f"{WORKERS} load --slow-part {int(head(checkout)[:8], 16) % 10}/10"
    assert runs[8:] == [part] and "Not tested" not in said


def test_the_commit_decides_which_slow_tests_run_and_named_tests_take_none(checkout):
    for _ in range(3):
        commit(checkout)
        part = int(head(checkout)[:8], 16) % 10
        assert run(checkout, RUN)[1][-1].endswith(f"--slow-part {part}/10")
    assert "--slow-part" not in run(checkout, RUN, "tests/compile")[1][-1]


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        (["--slow"], f"{SUITE} --slow"),
        (["tests/compile", "-k", "grid"], "tests/compile -k grid"),
    ],
    ids=["slow", "some"],
)
def test_a_run_that_says_which_tests_takes_no_other_slow_ones(checkout, arguments, first):
    _, runs, _ = run(checkout, "scripts/test", *arguments)
    assert runs[:2] == [first, CPU_KERNELS]


@pytest.mark.parametrize(
    ("arguments", "only"),
    [
        (["--fast"], f"{SUITE} --fast"),
        (["--slow-part", "3/10"], f"{WORKERS} load --slow-part 3/10"),
    ],
    ids=["fast", "a part"],
)
def test_a_fast_run_and_a_part_of_the_slow_tests_take_nothing_else(checkout, arguments, only):
    assert run(checkout, "scripts/test", *arguments)[1] == [only]


MISSING = {
    "NO_PACKAGES": "lm-eval, Ray, S3 and openai",
    "NO_PYTHON": "jax",
}


@pytest.mark.parametrize("missing", MISSING)
def test_what_cannot_be_tested_is_an_error_in_ci_and_a_note_elsewhere(checkout, missing):
    code, _, said = run(checkout, "scripts/test", **{missing: "1"})
    assert code == 0 and f"Not tested with {MISSING[missing]}" in said
    code, _, said = run(checkout, RUN, **{missing: "1"})
    assert code == 1
    assert f"error: expected to test with {MISSING[missing]}" in said and "Not tested" not in said
