"""Weights that change behind an unchanged configuration, through the command and `LLM`."""

import shutil
from pathlib import Path

import pytest
from command import completion, plan_text, read_manifest, write_lines
from model_on_disk import write_model

from noria.runtime.cli import main

PLAN = plan_text(
    """\
max_length = 32
prefill = [[8, 2]]
decode_slots = 2
page = 8
steps_per_call = 4
"""
)


def overwrite_the_middle(model: Path) -> None:
    """Change a quarter of the bytes, far from both ends of the file."""
    weights = model / "model.safetensors"
    size = weights.stat().st_size
    assert size > 6 * 2**20
    with weights.open("r+b") as file:
        file.seek(size * 3 // 8)
        file.write(bytes(size // 4))


def batch(source: Path, model: Path, output: Path, *options: object) -> int:
    return main(
        [*map(str, ("batch", "-i", source, "-o", output, "--model", model, "--quiet", *options))]
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a model, an input, a plan, a finished job and a bundle."""
    folder = tmp_path_factory.mktemp("weights")
    write_model(folder / "model", mlp=8192)
    rows = [completion(f"row-{i}", [3 + i, 4, 5], max_tokens=6, temperature=0) for i in range(3)]
    source = write_lines(folder / "in.jsonl", rows)
    (folder / "plan.toml").write_text(PLAN)
    given = ("--model", folder / "model", "--plan", folder / "plan.toml")
    assert main([*map(str, ("compile", *given, "-o", folder / "bundle"))]) == 0
    options = ("--plan", folder / "bundle")
    assert batch(source, folder / "model", folder / "out.jsonl", *options) == 0
    return folder


@pytest.fixture
def model(made, tmp_path) -> Path:
    return Path(shutil.copytree(made / "model", tmp_path / "model"))


@pytest.fixture
def output(made, tmp_path) -> Path:
    """Return the output of a finished job that the current model answered."""
    for name in ("out.jsonl", "out.jsonl.manifest.json"):
        shutil.copy(made / name, tmp_path / name)
    return tmp_path / "out.jsonl"


def test_a_finished_job_is_none_after_the_middle_layers_were_overwritten(
    made, model, output, capsys
):
    job = (made / "in.jsonl", model, output, "--plan", made / "bundle")
    assert batch(*job) == 0, "nothing to do for a copy of the model"
    overwrite_the_middle(model)
    before = output.read_bytes()
    assert batch(*job) == 3
    assert "expected the weights that its rows were answered with" in capsys.readouterr().err
    assert output.read_bytes() == before


def test_a_moved_and_renamed_model_is_the_same_model(made, model, output):
    moved = model.rename(model.with_name("another name"))
    assert batch(made / "in.jsonl", moved, output, "--plan", made / "bundle") == 0


def test_a_pin_is_what_inspect_prints_and_refuses_all_other_weights(made, model, tmp_path, capsys):
    def digest() -> str:
        capsys.readouterr()
        assert main(["inspect", str(model), "--weights-digest"]) == 0
        report = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
        return report["weights"]

    pin = digest()
    assert pin == read_manifest(made / "out.jsonl")["weights"]
    overwrite_the_middle(model)
    job = (made / "in.jsonl", model, tmp_path / "out.jsonl", "--plan", made / "bundle")
    assert batch(*job, "--expect-weights", pin) == 3
    said, found = capsys.readouterr().err, digest()
    assert f"expected weights with the digest {pin}, got {found}" in said
    assert not (tmp_path / "out.jsonl").exists()
    assert batch(*job, "--expect-weights", found) == 0


@pytest.mark.parametrize("pin", ["sha256:12", "", "md5:" + 64 * "a", 64 * "a"])
def test_a_malformed_pin_is_refused_at_once_by_name(made, pin, capsys):
    with pytest.raises(SystemExit) as caught:
        batch(made / "no.jsonl", made / "no", made / "no.jsonl", "--expect-weights", pin)
    assert caught.value.code == 2
    assert "--expect-weights: expected sha256: and 64" in capsys.readouterr().err
