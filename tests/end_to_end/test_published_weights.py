"""Jobs that keep the weights of a checkpoint in its codes: their plan, answers and refusals."""

import json
import shutil
import tomllib
from dataclasses import replace

import pytest
from command import answer, completion, write_lines
from published_formats import FORMATS, write_model
from safetensors.numpy import load_file, save_file

from noria.compile.plan import Plan

KEEP = ("--dtype", "float32", "--set", "numbers.weights=as_published")


@pytest.fixture(scope="module")
def coded(noria, tmp_path_factory):
    """Return the model of the tests in AWQ's format."""
    (form,) = (form for form in FORMATS if form.name == "AWQ")
    path = tmp_path_factory.mktemp("coded") / "model"
    shutil.copytree(noria.model, path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = form.config
    (path / "config.json").write_text(json.dumps(config))
    stored = write_model(load_file(path / "model.safetensors"), form).stored
    save_file(stored, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    rows = [
        completion(f"row-{i}", list(range(5, 12 + i)), temperature=0, max_tokens=4)
        for i in range(3)
    ]
    return write_lines(tmp_path_factory.mktemp("rows") / "in.jsonl", rows)


def test_a_job_keeps_the_formats_in_its_plan_and_resumes_under_it(noria, coded, source):
    kept, manifest = replace(noria, model=coded).batch(
        source, source.with_name("kept.jsonl"), *KEEP
    )
    numbers = tomllib.loads(manifest["plan"])["numbers"]
    form = {"codes": "uint4", "group": 16, "scales": "float16", "offsets": True}
    names = ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")
    assert numbers["published"] == {f"layers.*.{name}": form for name in names}
    path = source.with_name("plan.toml")
    path.write_text(Plan.from_table(tomllib.loads(manifest["plan"])).to_toml(), encoding="utf-8")
    output = source.with_name("again.jsonl")
    again, _ = replace(noria, model=coded).batch(source, output, "--plan", path)
    assert [answer(row) for row in again] == [answer(row) for row in kept]


def test_a_checkpoint_of_floats_is_refused(noria, source):
    given = ("-i", source, "-o", source.with_name("refused.jsonl"), "--model", noria.model, *KEEP)
    said = noria.refuse("batch", *given)
    assert "numbers.weights: expected a checkpoint with weights in codes" in said
