"""Module files of sentence-transformers: known ones are read, others are refused by name."""

import json
from pathlib import Path

import pytest

from noria.modelzoo.pooling_config import Pooling
from noria.runtime.checkpoint.sentence_modules import module_files, read_pooling
from noria.runtime.errors import InvalidConfig

EMBED = 32
FLAGS = {"first": "cls_token", "last": "lasttoken", "max": "max_tokens", "mean": "mean_tokens"}


def write(directory: Path, pooling: dict | None, *names: str) -> Path:
    folders = ["", *(f"{i}_{name}" for i, name in enumerate(names[1:], start=1))]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(names, folders, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


@pytest.mark.parametrize("kind", FLAGS)
def test_a_pooling_is_read_from_flags_or_from_a_name(kind, tmp_path):
    flags = {f"pooling_mode_{flag}": name == kind for name, flag in FLAGS.items()}
    flags |= {"word_embedding_dimension": EMBED, "include_prompt": True}
    write(tmp_path, flags, "Transformer", "Pooling", "Normalize")
    assert read_pooling(tmp_path, EMBED) == Pooling(kind, normalises=True)
    name = {"first": "cls", "last": "lasttoken"}.get(kind, kind)
    (tmp_path / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode": name, "embedding_dimension": EMBED})
    )
    assert read_pooling(tmp_path, EMBED) == Pooling(kind, normalises=True)
    assert [name for name, _ in module_files(tmp_path)] == ["modules.json", "1_Pooling/config.json"]


def test_a_directory_without_modules_has_no_pooling(tmp_path):
    assert read_pooling(tmp_path, EMBED) is None and not list(module_files(tmp_path))


MEAN = {"pooling_mode_mean_tokens": True}
REFUSED = {
    "an unknown module": (MEAN, ("Transformer", "Pooling", "LSTM"), "got 'LSTM' as module 2"),
    "another order": (MEAN, ("Pooling", "Transformer"), "got 'Pooling' as module 0"),
    "no pooling": (None, ("Transformer",), "expected a module Pooling"),
    "two normalisations": (MEAN, ("Transformer", "Pooling", "Normalize", "Normalize"), "module 3"),
    "two poolings at once": (
        MEAN | {"pooling_mode_cls_token": True}, ("Transformer", "Pooling"), "expected one pooling",
    ),
    "another pooling": (
        {"pooling_mode_weightedmean_tokens": True}, ("Transformer", "Pooling"), "weightedmean",
    ),
    "another size": (
        MEAN | {"word_embedding_dimension": 7}, ("Transformer", "Pooling"), "expected 32",
    ),
    "an unknown option": (MEAN | {"zeta": 1}, ("Transformer", "Pooling"), "zeta = 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_modules_and_options_are_refused(case, tmp_path):
    pooling, names, message = REFUSED[case]
    write(tmp_path, pooling, *names)
    with pytest.raises(InvalidConfig, match=message):
        read_pooling(tmp_path, EMBED)


@pytest.mark.parametrize(
    "content", ["{}", '[{"type": "a.Transformer"}]', '[{"type": "a.X", "path": "../up"}]', "[1]"]
)
def test_malformed_files_are_refused(content, tmp_path):
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(InvalidConfig, match=r"modules\.json"):
        read_pooling(tmp_path, EMBED)
