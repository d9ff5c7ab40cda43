"""The folder of compiled programs: used only if it is the user's own."""

import os
from pathlib import Path

import jax
import pytest

from noria.runtime.bundles import compilation_cache
from noria.runtime.files.file_checks import default_directory

DIRECTORY = "jax_compilation_cache_dir"


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
    """Record jax's settings without changing them."""
    found = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return found


@pytest.fixture
def cache(tmp_path) -> Path:
    compilation_cache.enable(pytest.fail)
    return tmp_path / "noria" / "xla"


def refusal(settings) -> str:
    """The one line that a job says before it goes on without a cache."""
    settings.clear()
    notes = []
    compilation_cache.enable(notes.append)
    assert not settings
    (note,) = notes
    assert (
        note.startswith("no compile cache, so every run compiles all graphs: ") and "\n" not in note
    )
    return note


def test_a_folder_of_the_users_own_is_made_for_the_user_alone(settings, cache):
    assert settings[DIRECTORY] == str(cache)
    assert [path.stat().st_mode & 0o777 for path in (cache, cache.parent)] == [0o700, 0o700]


@pytest.mark.parametrize("root", ["/dev/null", "/proc", "/proc/version"])
def test_a_home_that_cannot_be_written_is_done_without(settings, monkeypatch, root):
    monkeypatch.setenv("XDG_CACHE_HOME", root)
    assert "set XDG_CACHE_HOME to a folder that can be written" in refusal(settings)


def test_a_user_without_a_home_is_told_to_name_a_folder(settings, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert "there is no home folder; set XDG_CACHE_HOME" in refusal(settings)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("which", ["itself", "parent"])
def test_a_folder_that_others_can_write_is_not_used(settings, cache, which, mode):
    folder = cache if which == "itself" else cache.parent
    folder.chmod(mode)
    assert f"{folder.name} can be written by others" in refusal(settings)
    assert "chmod go-w" in refusal(settings)
    folder.chmod(0o755)
    compilation_cache.enable(pytest.fail)


def test_a_folder_of_another_user_is_not_used(settings, cache, monkeypatch):
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert "belongs to another user" in refusal(settings)


def test_a_link_to_a_folder_is_not_followed(settings, cache, tmp_path):
    cache.rename(tmp_path / "elsewhere")
    cache.symlink_to(tmp_path / "elsewhere")
    assert f"{cache}: expected a folder, not a link" in refusal(settings)


def test_others_cannot_reach_an_entry_whatever_its_mode(settings, cache):
    entry = cache / "jit_f-0123-cache"
    entry.write_bytes(b"program")
    entry.chmod(0o666)
    cache.chmod(0o755)
    compilation_cache.enable(pytest.fail)
    assert default_directory().stat().st_mode & 0o777 == 0o700
