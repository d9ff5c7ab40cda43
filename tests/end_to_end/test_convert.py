"""`noria convert`: the checkpoint holds the model's bits, and jobs on it give the same answers."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from command import answer, completion, write_lines
from model_on_disk import write_model
from safetensors.numpy import load_file, save_file

from noria.compile.targets import find_target
from noria.runtime import session
from noria.runtime.checkpoint import open_model
from noria.runtime.cli import main


def convert(*arguments: object) -> int:
    """Run the command in this process."""
    return main(["convert", *map(str, arguments)])


def parameters_of(path: Path, dtype: str) -> dict[str, np.ndarray]:
    with open_model(path) as files:
        loaded = session.load_model(files, find_target("cpu"), session.LoadOptions(dtype))
    return {name: np.asarray(array) for name, array in loaded.parameters.items()}


def assert_same_bits(found: Path, model: Path, dtype: str) -> None:
    got, expected = (parameters_of(path, dtype) for path in (found, model))
    assert got.keys() == expected.keys()
    for name, array in got.items():
        assert array.dtype == expected[name].dtype and array.tobytes() == expected[name].tobytes()


def stored_dtypes(folder: Path) -> set[str]:
    with open_model(folder) as files:
        assert files.kind == "orbax"
        return {info.dtype.name for info in files.tensors.tensors.values()}


@pytest.fixture(scope="module")
def converted(noria, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "checkpoint"
    before = {path.name: path.read_bytes() for path in noria.model.iterdir()}
    said = noria.run("convert", "--model", noria.model, "-o", folder).stdout
    assert said.startswith(f"{folder}: ") and "arrays in float32" in said
    assert {path.name: path.read_bytes() for path in noria.model.iterdir()} == before
    return folder


def test_the_parameters_are_those_of_the_model_bit_for_bit(noria, converted):
    assert stored_dtypes(converted) == {"float32"}
    assert_same_bits(converted, noria.model, "float32")


def test_generation_defaults_and_name_go_along(noria, converted):
    with open_model(noria.model) as published, open_model(converted) as files:
        assert published.generation_defaults.eos_ids
        assert files.generation_defaults == published.generation_defaults
        assert files.name == published.name


def test_a_job_gives_the_same_answers_on_the_checkpoint(noria, converted, tmp_path):
    """The rows have text and token ids, with end tokens and sampling defaults."""
    rows = [
        completion("text", "the water wheel", max_tokens=8),
        completion("ids", list(range(3, 20)), max_tokens=40, temperature=0),
        {"custom_id": "chat", "messages": [{"role": "user", "content": "driven"}], "max_tokens": 8},
    ]
    source = write_lines(tmp_path / "in.jsonl", rows)
    answers = []
    for number, model in enumerate((noria.model, converted)):
        options = ("--model", model, "--seed", 3)
        found, manifest = noria.batch(source, tmp_path / f"out{number}.jsonl", *options)
        assert manifest["compiles_during_run"] == 0
        answers.append([answer(row) for row in found])
    assert answers[0] == answers[1]


def test_a_model_in_bfloat16_is_stored_so_and_rounds_no_number(noria, tmp_path):
    model, folder = tmp_path / "model", tmp_path / "checkpoint"
    write_model(model, kv_heads=4, num_experts=4)
    weights = model / "model.safetensors"
    save_file({k: x.astype(ml_dtypes.bfloat16) for k, x in load_file(weights).items()}, weights)
    assert convert("--model", model, "-o", folder) == 0
    assert stored_dtypes(folder) == {"bfloat16"}
    for dtype in ("bfloat16", "float32"):
        assert_same_bits(folder, model, dtype)


def test_a_checkpoint_is_converted_to_another_dtype(noria, converted, tmp_path):
    folder = tmp_path / "narrow"
    assert convert("--model", converted, "-o", folder, "--dtype", "bfloat16") == 0
    assert stored_dtypes(folder) == {"bfloat16"}
    assert_same_bits(folder, noria.model, "bfloat16")


def test_nothing_is_overwritten_and_no_model_is_written_into(noria, converted, tmp_path):
    for folder in (converted, noria.model.parent):
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        said = noria.refuse("convert", "--model", noria.model, "-o", folder)
        assert f"{folder}: expected a new or empty folder" in said
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    for folder in (noria.model, noria.model / "checkpoint"):
        said = noria.refuse("convert", "--model", noria.model, "-o", folder)
        assert "expected a folder outside the model's directory" in said
    assert not (noria.model / "checkpoint").exists()
    file = tmp_path / "file"
    file.touch()
    assert "got the file" in noria.refuse("convert", "--model", noria.model, "-o", file)


def test_a_model_that_cannot_be_loaded_leaves_nothing_behind(noria, tmp_path):
    folder, model = tmp_path / "checkpoint", tmp_path / "model"
    said = noria.refuse("convert", "--model", tmp_path / "absent", "-o", folder, expect=3)
    assert "got nothing at this path" in said
    write_model(model)
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors")
    said = noria.refuse("convert", "--model", model, "-o", folder, expect=3)
    assert "model.norm.weight" in said
    assert not folder.exists()
