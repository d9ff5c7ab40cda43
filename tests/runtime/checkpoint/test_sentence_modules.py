"""Module files of sentence-transformers: known ones are read, others are refused by name."""

import json
from pathlib import Path

import pytest

from noria.modelzoo.pooling_config import Pooling, Projection
from noria.runtime.checkpoint.formats.safetensors import module_weight_files
from noria.runtime.checkpoint.sentence_modules import dense_folders, module_files, read_pooling
from noria.runtime.errors import InvalidConfig, ModelNotFound

EMBED = 32
MEAN = {"pooling_mode_mean_tokens": True}
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


DENSE = {"in_features": EMBED, "out_features": 8}


def write_dense(directory: Path, *layers: dict) -> None:
    modules = json.loads((directory / "modules.json").read_text())
    for i, layer in enumerate(layers, start=len(modules)):
        modules.append({"path": f"{i}_Dense", "type": "sentence_transformers.models.Dense"})
        (directory / f"{i}_Dense").mkdir()
        (directory / f"{i}_Dense" / "config.json").write_text(json.dumps(layer))
    (directory / "modules.json").write_text(json.dumps(modules))


def test_dense_layers_are_read_in_their_order(tmp_path):
    identity = {"activation_function": "torch.nn.modules.linear.Identity", "bias": False}
    last = {"in_features": 8, "out_features": 5, "module_input_name": "sentence_embedding"}
    write(tmp_path, MEAN, "Transformer", "Pooling")
    write_dense(tmp_path, DENSE | identity, last)
    layers = (Projection(8, has_bias=False), Projection(5, activation="tanh"))
    assert read_pooling(tmp_path, EMBED) == Pooling("mean", layers)
    assert dense_folders(tmp_path) == ("2_Dense", "3_Dense")
    assert [name for name, _ in module_files(tmp_path)][-1] == "3_Dense/config.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "torch.nn.modules.activation.SiLU"}, "GELU, got .*SiLU"),
        ({"activation_function": "mine.Tanh"}, "got 'mine.Tanh'"),
        ({"in_features": 9}, "in_features: expected 32"),
        ({"module_input_name": "token_embeddings"}, "expected 'sentence_embedding'"),
        ({"use_residual": True}, "use_residual: expected False"),
        ({"zeta": 1}, "zeta = 1"),
    ],
)
def test_other_dense_layers_are_refused(change, message, tmp_path):
    write(tmp_path, MEAN, "Transformer", "Pooling")
    write_dense(tmp_path, DENSE | change)
    with pytest.raises(InvalidConfig, match=message):
        read_pooling(tmp_path, EMBED)


def write_prompts(directory: Path, **content) -> None:
    (directory / "config_sentence_transformers.json").write_text(json.dumps(content))


def test_the_default_prompt_is_read(tmp_path):
    write(tmp_path, MEAN, "Transformer", "Pooling")
    for prompts in ({"query": "find: ", "document": ""}, None):
        write_prompts(tmp_path, prompts=prompts, default_prompt_name=None)
        assert read_pooling(tmp_path, EMBED) == Pooling("mean")
    write_prompts(tmp_path, prompts={"query": "find: "}, default_prompt_name="query")
    pooling = read_pooling(tmp_path, EMBED)
    assert pooling == Pooling("mean", prompt="find: ")
    assert str(pooling) == "mean, after the prompt 'find: '"
    names = [name for name, _ in module_files(tmp_path)]
    assert "config_sentence_transformers.json" in names


def test_a_default_prompt_that_cannot_be_followed_is_refused(tmp_path):
    write(tmp_path, MEAN | {"include_prompt": False}, "Transformer", "Pooling")
    write_prompts(tmp_path, prompts={"query": "find: "}, default_prompt_name="query")
    with pytest.raises(InvalidConfig, match=r"include_prompt: expected True, .* a default prompt"):
        read_pooling(tmp_path, EMBED)
    write_prompts(tmp_path, prompts={"query": ""}, default_prompt_name="query")
    assert read_pooling(tmp_path, EMBED) == Pooling("mean")
    write_prompts(tmp_path, prompts={"query": ""}, default_prompt_name="other")
    with pytest.raises(InvalidConfig, match="got none for 'other'"):
        read_pooling(tmp_path, EMBED)


def test_a_pickle_of_a_dense_layer_is_refused(tmp_path):
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"got pytorch_model.bin\. noria never opens a pickle"):
        module_weight_files(tmp_path, ["2_Dense"])


def test_a_directory_without_modules_has_no_pooling(tmp_path):
    assert read_pooling(tmp_path, EMBED) is None and not list(module_files(tmp_path))


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
