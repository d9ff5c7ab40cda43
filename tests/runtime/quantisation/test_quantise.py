"""Quantised directories: transformers opens them, and scores as noria scores their values."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from compressed_folder import dequantised_tensors, stored_tensors, write_dequantised
from conformance import CASES, SHARED
from embedder_cases import EmbedderCase, write_modules
from model_on_disk import write_model
from quantised import dequantised
from safetensors.numpy import load_file, save_file
from tolerances import COMPRESSED_MODEL_LOGPROB

from noria.compile.abstract_model import AbstractModel
from noria.compile.weight_rules import WeightRules
from noria.modelzoo.families.registry import from_hf_config
from noria.modelzoo.pooling_config import Pooling
from noria.modelzoo.weights.weight_formats import WeightFormat
from noria.runtime.checkpoint import ModelFiles, open_model
from noria.runtime.checkpoint.formats.compressed_tensors import write_directory
from noria.runtime.checkpoint.loader import read_parameter
from noria.runtime.checkpoint.published_tensors import publish
from noria.runtime.cli import main
from noria.runtime.errors import InvalidConfig
from noria.runtime.quantisation import quantise
from noria.runtime.quantisation.published_form import PublishedForm

ROWS = [np.random.default_rng(n).integers(3, 11, 14).tolist() for n in range(6)]
"""Rows of few tokens, so that the inputs of products depend on each other."""


def quantize(model: Path, folder: Path, *options: object) -> int:
    """Run the command in this process."""
    return main(["quantize", "--model", str(model), "-o", str(folder), *map(str, options)])


def read_all(folder: Path) -> dict[str, np.ndarray]:
    """Return all parameters of a model in float32."""
    with open_model(folder) as files:
        shapes = AbstractModel(files.spec.config).abstract_parameters(jnp.float32)
        return {
            source.parameter: read_parameter(
                source,
                files.tensors,
                (slice(None),) * shapes[source.parameter].ndim,
                shapes[source.parameter].shape,
                np.float32,
            )
            for source in files.spec.sources
        }


def logprobs(folder: Path) -> np.ndarray:
    """Return the log-probabilities of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor(ROWS)).logits, -1).numpy()


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A small Llama; the inputs of its matrices have groups of 8."""
    folder = tmp_path_factory.mktemp("published") / "model"
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def calibration(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in ROWS))
    return path


@pytest.mark.reference
@pytest.mark.parametrize("numbers", ["int8", "int8:8", "float8", "int4", "int4:8"])
def test_transformers_scores_a_directory_as_its_values(published, numbers, tmp_path):
    assert quantize(published, tmp_path / "q", "--numbers", numbers, "--quiet") == 0
    write_dequantised(tmp_path / "q", tmp_path / "values")
    stored = stored_tensors(tmp_path / "q")
    matrix = "model.layers.0.mlp.down_proj.weight"
    assert (matrix in stored) == (not numbers.startswith("int4"))
    assert (f"{matrix}_packed" in stored) == numbers.startswith("int4")
    got, wanted = logprobs(tmp_path / "q"), logprobs(tmp_path / "values")
    assert np.abs(got - wanted).max() < COMPRESSED_MODEL_LOGPROB
    assert np.abs(got - logprobs(published)).max() > 10 * COMPRESSED_MODEL_LOGPROB


FLOAT8 = WeightFormat("float8_e4m3fn")


@pytest.mark.parametrize("form", [WeightFormat("int8"), FLOAT8, WeightFormat("int4", 8)], ids=str)
def test_nearest_has_the_values_of_weights_that_load_in_codes(published, form, tmp_path):
    numbers = f"{form.codes}:{form.group}" if form.group else form.codes.removesuffix("_e4m3fn")
    quantize(published, tmp_path / "q", "--numbers", numbers, "--quiet")
    write_dequantised(tmp_path / "q", tmp_path / "values")
    floats, got = read_all(published), read_all(tmp_path / "values")
    with open_model(published) as files:
        rules = WeightRules(form)
        quantisations = AbstractModel(files.spec.config, weight_rules=rules).quantisations
    for path, array in got.items():
        wanted = floats[path]
        if path in quantisations:
            wanted = dequantised(wanted, quantisations[path])
        np.testing.assert_array_equal(array, wanted)


def test_gptq_changes_the_products_of_calibration_rows_less(published, calibration, tmp_path):
    """The first layer is measured, as its input does not depend on the rounding of others."""
    table, name = "model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight"
    norm = "model.layers.0.input_layernorm.weight"
    floats = load_file(published / "model.safetensors")
    x_MD = floats[table][np.array(ROWS).ravel()]
    x_MD = x_MD / np.sqrt((x_MD**2).mean(axis=1, keepdims=True) + 1e-5) * floats[norm]
    errors = {}
    for method in ("nearest", "clip", "gptq"):
        options = ["--calibration", calibration] if method == "gptq" else []
        folder = tmp_path / method
        quantize(published, folder, "--numbers", "int4:8", "--method", method, "--quiet", *options)
        error = dequantised_tensors(folder)[name] - floats[name]
        errors[method] = float(np.square(x_MD @ error.T).sum())
    assert errors["gptq"] < 0.6 * min(errors["nearest"], errors["clip"])


CASE_OF = {case.family: case for case in reversed(CASES) if case.of is None}
"""The first case of each family that transformers has."""
NOT_WRITTEN = {
    "deepseek_v2": "alternating rows of several parts",
    "deepseek_v3": "alternating rows of several parts",
    "gpt_oss": "a matrix for each expert",
    "granitemoe": "a matrix for each expert",
    "granitemoeshared": "a matrix for each expert",
    "llama4_text": "a matrix for each expert",
}
"""The families that cannot be written in codes, and the reasons in errors."""


def config_of(family: str) -> dict[str, Any]:
    """Return config.json of the first case of a family."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    case = CASE_OF[family]
    table = AutoConfig.for_model(family, **{**SHARED, **case.options}).to_dict()
    if "partial_rotary_factor" in case.rope:
        table["rope_parameters"] |= case.rope
    return table | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]}


@pytest.mark.reference
@pytest.mark.parametrize("family", sorted(CASE_OF))
def test_every_family_is_written_in_codes_or_refused_with_a_reason(family):
    spec = from_hf_config(config_of(family))
    files = cast("ModelFiles", SimpleNamespace(name="m", kind="hf", spec=spec, published_config={}))
    form = PublishedForm(files, WeightFormat("int8"), "float32")
    paths = [source.parameter for source in spec.sources]
    if family not in NOT_WRITTEN:
        assert form.layout(paths)
        return
    wanted = f"family {family} with .* cannot be written in codes: .*{NOT_WRITTEN[family]}"
    with pytest.raises(InvalidConfig, match=wanted):
        form.layout(paths)


@pytest.mark.reference
def test_gptq_passes_over_a_router_beside_a_shared_expert(calibration, tmp_path):
    config, rng = config_of("qwen2_moe"), np.random.default_rng(0)
    spec = from_hf_config(config)
    shapes = AbstractModel(spec.config).abstract_parameters(jnp.float32)
    tensors = {
        name: np.ascontiguousarray(tensor)
        for source in spec.sources
        for name, tensor in publish(
            source, rng.normal(size=shapes[source.parameter].shape).astype(np.float32)
        ).items()
    }
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    options = ["--numbers", "int4:8", "--method", "gptq", "--calibration", calibration, "--quiet"]
    assert quantize(tmp_path / "m", tmp_path / "q", *options) == 0
    stored = load_file(tmp_path / "q" / "model.safetensors")
    assert any("mlp.shared_expert.up_proj.weight_packed" in name for name in stored)


def test_codes_of_four_bits_that_do_not_fill_words_are_refused(tmp_path, capsys):
    write_model(tmp_path / "model", mlp=44)
    assert quantize(tmp_path / "model", tmp_path / "q", "--numbers", "int4") != 0
    assert "down_proj.weight: expected a multiple of 8 inputs" in capsys.readouterr().err
    assert not (tmp_path / "q").exists()
    assert quantize(tmp_path / "model", tmp_path / "q", "--numbers", "int8") == 0


def test_experts_are_written_one_by_one_and_routers_stay_in_float(tmp_path):
    write_model(tmp_path / "model", num_experts=3)
    assert quantize(tmp_path / "model", tmp_path / "q", "--numbers", "int4:8", "--quiet") == 0
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    assert ignored == [
        "lm_head",
        "model.layers.0.block_sparse_moe.gate",
        "model.layers.1.block_sparse_moe.gate",
    ]
    stored = load_file(tmp_path / "q" / "model.safetensors")
    assert stored["model.layers.1.block_sparse_moe.experts.2.w1.weight_packed"].dtype == np.int32
    write_dequantised(tmp_path / "q", tmp_path / "values")
    floats, got = read_all(tmp_path / "model"), read_all(tmp_path / "values")
    assert floats.keys() == got.keys()
    np.testing.assert_array_equal(got["layers.1.mlp.router"], floats["layers.1.mlp.router"])


def test_the_directory_is_that_of_a_model(published, tmp_path):
    quantize(published, tmp_path / "q", "--numbers", "int8", "--quiet")
    write_dequantised(tmp_path / "q", tmp_path / "values")
    with open_model(published) as model, open_model(tmp_path / "values") as values:
        assert values.spec.config == model.spec.config
        assert values.generation_defaults == model.generation_defaults
    names = {path.name for path in (tmp_path / "q").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= names


def test_a_model_for_vectors_keeps_its_pooling(published, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(published, model)
    write_modules(model, EmbedderCase("last", "llama", "last"))
    assert quantize(model, tmp_path / "q", "--numbers", "int8", "--quiet") == 0
    with open_model(tmp_path / "q") as files:
        assert files.spec.config.pooling == Pooling("last", normalises=True)
    assert quantize(model, tmp_path / "r", "--numbers", "int8", "--rotate", "--quiet") == 3
    assert "got a pooling (last, length 1), whose vectors" in capsys.readouterr().err
    dense = tmp_path / "dense"
    shutil.copytree(published, dense)
    write_modules(dense, EmbedderCase("dense", "llama", "last", dense=((8, False, "Tanh"),)))
    assert quantize(dense, tmp_path / "d", "--numbers", "int8", "--quiet") == 3
    assert "expected a model without dense layers after its pooling" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--numbers", "float"], "expected a format of codes"),
        (["--numbers", "int4:5"], "expected a divisor of the"),
        (["--numbers", "weights=int8,dtype=bfloat16"], "expected weights and group alone"),
        (["--numbers", "float8", "--method", "clip"], "expected nearest for float8_e4m3fn"),
        (["--numbers", "float8:64"], "expected 0, as float8 weights have one scale"),
        (["--numbers", "int8", "--method", "gptq"], "Give --calibration"),
        (["--numbers", "int8", "--calibration", "ROWS"], "Give --calibration"),
        (["--numbers", "int8", "--rows", "2"], "--rows: expected only together with --calibration"),
    ],
)
def test_what_cannot_be_quantised_is_refused(
    published, calibration, options, message, tmp_path, capsys
):
    options = [calibration if option == "ROWS" else option for option in options]
    assert quantize(published, tmp_path / "q", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "q" / "config.json").exists()


def test_a_head_that_differs_from_a_tied_embedding_is_written_as_untied(published, tmp_path):
    model = shutil.copytree(published, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    written, expected = tmp_path / "written", tmp_path / "expected"
    for folder, output in ((model, written), (published, expected)):
        assert quantize(folder, output, "--numbers", "int8", "--quiet") == 0
    assert json.loads((written / "config.json").read_text())["tie_word_embeddings"] is False
    found = read_all(written)
    for name, array in read_all(expected).items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("number", [np.nan, -np.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(published, number, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(published, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = number
    save_file(tensors, model / "model.safetensors")
    options = ["--numbers", "int8", "--method", "clip", "--quiet"]
    assert quantize(model, tmp_path / "q", *options) == 3
    assert "layers.1.mlp.down: expected finite weights" in capsys.readouterr().err
    assert not (tmp_path / "q" / "config.json").exists()


@pytest.mark.reference
def test_a_rotated_and_smoothed_directory_has_a_head_of_its_own(published, calibration, tmp_path):
    tied = tmp_path / "tied"
    tied.mkdir()
    for path in published.iterdir():
        (tied / path.name).write_bytes(path.read_bytes())
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(tied / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["model.norm.weight"] *= np.linspace(0.5, 2, len(tensors["model.norm.weight"]))
    save_file(tensors, tied / "model.safetensors")
    options = ["--numbers", "int8", "--rotate", "--smooth", "--calibration", calibration]
    assert quantize(tied, tmp_path / "q", *options, "--quiet") == 0
    write_dequantised(tmp_path / "q", tmp_path / "values")
    written = json.loads((tmp_path / "values" / "config.json").read_text())
    assert written["tie_word_embeddings"] is False
    stored = read_all(tmp_path / "values")
    assert np.ptp(stored["layers.1.mlp_norm.scale"]) > 0
    assert np.abs(stored["head.table"] - stored["embedding.table"]).max() > 0.1
    assert quantize(tied, tmp_path / "plain", "--numbers", "int8", "--quiet") == 0
    wanted = logprobs(tied)
    errors = [
        float(np.abs(logprobs(folder) - wanted).mean())
        for folder in (tmp_path / "values", tmp_path / "plain")
    ]
    # the errors of codes of eight bits, and no others
    assert errors[0] < 2 * errors[1] < 0.2 * wanted.std()


def test_a_model_in_codes_keeps_the_dtype_of_its_other_tensors(published, tmp_path):
    options = ["--numbers", "int8", "--dtype", "bfloat16", "--quiet"]
    assert quantize(published, tmp_path / "int8", *options) == 0
    assert quantize(tmp_path / "int8", tmp_path / "int4", "--numbers", "int4", "--quiet") == 0
    stored = load_file(tmp_path / "int4" / "model.safetensors")
    matrix = "model.layers.0.mlp.down_proj.weight"
    assert stored[f"{matrix}_scale"].dtype == stored["model.norm.weight"].dtype == "bfloat16"


def write_again(path: Path) -> None:
    """Write a file with the same bytes, at another time."""
    path.write_bytes(path.read_bytes())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.safetensors", write_again, "expected the file as it was opened, got another one"),
        ("model.safetensors", Path.unlink, "expected the file as it was opened, got none"),
        ("tokenizer.json", Path.unlink, "expected the configuration and the tokenizer"),
        ("config.json", lambda path: path.write_text("{}"), "expected the configuration"),
    ],
)
@pytest.mark.parametrize("moment", ["first", "last"])
def test_a_model_that_changes_while_it_is_read_leaves_nothing(
    published, name, change, message, moment, tmp_path, capsys, monkeypatch
):
    """The file changes after the first or after the last weight has been read."""
    shutil.copytree(published, tmp_path / "model")
    layers = []

    def say(line, *, is_quiet) -> None:
        layers.append(line)
        if line == {"first": "layer 1 of 2", "last": "layer 2 of 2"}[moment]:
            change(tmp_path / "model" / name)

    monkeypatch.setattr("noria.runtime.commands.quantize_command.note", say)
    folder = tmp_path / "new" / "q"
    assert quantize(tmp_path / "model", folder, "--numbers", "int8") == 3, layers
    error = capsys.readouterr().err
    assert message in error and "start again" in error
    assert not folder.parent.exists()


def test_a_checkpoint_that_changes_after_its_last_tensor_leaves_nothing(
    published, tmp_path, capsys, monkeypatch
):
    """An orbax checkpoint does not compare its files with those that were opened."""
    assert main(["convert", "--model", str(published), "-o", str(tmp_path / "model")]) == 0
    stored = tmp_path / "model" / "params" / "_METADATA"
    read = quantise._Model._round

    def round_and_change(self, path, *rest):
        write_again(stored)
        return read(self, path, *rest)

    monkeypatch.setattr(quantise._Model, "_round", round_and_change)
    folder = tmp_path / "q"
    folder.mkdir()
    assert quantize(tmp_path / "model", folder, "--numbers", "int8", "--quiet") == 3
    assert "expected the file as it was opened, got another one" in capsys.readouterr().err
    assert not list(folder.iterdir())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_error_while_writing_leaves_nothing(published, error, tmp_path):
    def tensors():
        raise error
        yield

    (tmp_path / "q").mkdir()
    others = {"tokenizer.json": b"{}", "1_Pooling/config.json": b"{}"}
    with pytest.raises(type(error)):
        write_directory(tmp_path / "q", {}, others, {}, tensors())
    assert not list((tmp_path / "q").iterdir())


@pytest.mark.parametrize(
    "options", [["--numbers", "int8", "--smooth"], ["--numbers", "int4:8", "--method", "gptq"]]
)
def test_features_that_float32_cannot_square_are_refused(
    published, calibration, options, tmp_path, capsys
):
    """All weights are finite, and hidden features of about 1e30 too, but not their squares."""
    shutil.copytree(published, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    large = {n: x * np.float32(1e15) for n, x in tensors.items() if "gate_" in n or "up_" in n}
    save_file({**tensors, **large}, path)
    options = [*options, "--calibration", calibration, "--quiet"]
    assert quantize(tmp_path / "model", tmp_path / "q", *options) == 3
    message = "layers.0.mlp.down: expected calibration features with finite squares"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "q").exists()
