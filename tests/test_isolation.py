"""Test files leave no state behind, neither for other test files nor for the user."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from noria.runtime.files.file_checks import default_directory

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["NOT_OPTIMIZED", "READ", "OWN_CACHE", "FAST"])
def test_settings_name_tests_that_exist(name):
    files = {path.relative_to(HERE).as_posix() for path in HERE.rglob("test_*.py")}
    statements = ast.parse((HERE / "conftest.py").read_text("utf-8")).body
    assigned = {ast.unparse(x.targets[0]): x.value for x in statements if isinstance(x, ast.Assign)}
    paths = [path.partition("::")[0] for path in ast.literal_eval(assigned[name])]
    assert [path for path in paths if not any(file.startswith(path) for file in files)] == []


def test_programs_are_not_kept_in_the_users_cache():
    assert Path.home() not in default_directory().parents


def test_a_file_that_turns_on_the_compile_cache_leaves_it_off(tmp_path):
    leaving, after = tmp_path / "test_1.py", tmp_path / "test_2.py"
    leaving.write_text(
        "def test():\n"
        "    from noria.runtime.bundles import compilation_cache\n"
        "    compilation_cache.enable(print)\n"
    )
    after.write_text(
        "def test():\n"
        "    import jax\n"
        "    assert jax.config.values['jax_compilation_cache_dir'] is None\n"
    )
    (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text("utf-8"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    run = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
