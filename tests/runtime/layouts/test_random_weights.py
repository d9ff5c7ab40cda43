"""`noria layouts --verify` of a model that has a config.json alone, with random weights."""

import json

import numpy as np
import pytest
from model_on_disk import write_model

from noria.modelzoo.config import Arrangement
from noria.runtime.checkpoint import open_model
from noria.runtime.checkpoint.random_model import RandomTensors, has_no_weights, with_random_weights
from noria.runtime.cli import main

SHAPES = ["--slots", "8", "--length", "48", "--prompt", "16", "--prompts", "4"]
OPTIONS = ["--target", "cpu:4", *SHAPES, "--quiet"]


def config_alone(folder, **changes):
    """Write a directory with nothing but a config.json."""
    write_model(folder / "whole", num_experts=changes.pop("num_experts", 0))
    (folder / "alone").mkdir()
    config = json.loads((folder / "whole" / "config.json").read_text())
    (folder / "alone" / "config.json").write_text(json.dumps(config | changes))
    return str(folder / "alone")


def test_layouts_of_a_model_without_weights_are_compared_with_random_ones(tmp_path, capsys):
    arguments = ["--model", config_alone(tmp_path), "-o", str(tmp_path), *OPTIONS]
    layouts = ["--layouts", "data-tensor", "--layers", "1"]
    assert main(["layouts", *arguments, *layouts, "--verify"]) == 0
    assert "alone: has no weights, so --verify takes random ones" in capsys.readouterr().err
    (result,) = json.loads((tmp_path / "layouts.json").read_text())
    assert (result["agreement"], result["weights"]) == ("equal", "random")
    assert 0 < result["max_abs_diff"] < result["tolerance"]


@pytest.mark.parametrize(
    ("heads", "copies"), [(2, 1), (4, 2)], ids=["as published", "copies of heads"]
)
def test_random_weights_depend_on_their_names_alone(tmp_path, heads, copies):
    with open_model(config_alone(tmp_path), needs_weights=False) as files:
        spec = with_random_weights(files).spec
        tensors = RandomTensors(spec.config)
        arranged = tensors.arranged(Arrangement(head_shards=heads, padded_vocab=304))
    assert tensors.tensors.keys() == {source.parameter for source in spec.sources}
    for name, info in arranged.tensors.items():
        drawn, again = (RandomTensors(spec.config).read(name) for _ in range(2))
        assert np.array_equal(drawn, again) and np.unique(drawn).size > 0.9 * drawn.size
        assert arranged.read(name).shape == info.shape
    qkv = "layers.0.attention.qkv"
    assert arranged.tensors[qkv].shape[1] == copies * tensors.tensors[qkv].shape[1]
    table = "embedding.table"
    assert arranged.tensors[table].shape[0] == 304 > tensors.tensors[table].shape[0]
    rows = tensors.read(table)
    assert np.array_equal(arranged.read(table)[: len(rows)], rows)
    first = tensors.read("layers.0.mlp.down")
    assert not np.array_equal(first, tensors.read("layers.1.mlp.down"))
    assert np.array_equal(tensors.read(qkv, (slice(1, 3),)), tensors.read(qkv)[1:3])


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin", "m.gguf"])
def test_weights_that_cannot_be_read_are_not_replaced_by_random_ones(tmp_path, name):
    model = config_alone(tmp_path)
    assert has_no_weights(tmp_path / "alone")
    assert not has_no_weights(tmp_path / "alone" / "config.json")
    (tmp_path / "alone" / name).write_text("{}")
    assert not has_no_weights(tmp_path / "alone")
    arguments = ["--model", model, "-o", str(tmp_path / "out"), *OPTIONS, "--verify"]
    assert main(["layouts", *arguments]) == 3


# others are compared in every run, in test_layouts_command.py
OWN_LAYOUTS = (
    "data-tensor-batch-attention",
    "gpu-host@data=2,tensor=2",
    "ring-tensor",
    "v5p-slice@data=2,tensor=2",
    "weight-gathered-all",
    "weight-stationary-1d-batch-attention@tensor=4",
    "weight-stationary-1d-kv-copies@tensor=4",
    "weight-stationary-2d@data=2,tensor=2",
)
OF_MIXTURES = "expert-parallel expert-tensor data-parallel"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "changes"),
    [
        (" ".join(OWN_LAYOUTS), {}),
        (OF_MIXTURES, {"num_experts": 4}),
        (
            OF_MIXTURES,
            {
                "num_experts": 4,
                "model_type": "qwen3_moe",
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 48,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            },
        ),
    ],
    ids=["dense", "mixtral", "qwen3-moe"],
)
def test_right_layouts_are_equal_to_one_device(tmp_path, layouts, changes):
    arguments = ["--model", config_alone(tmp_path, **changes), "-o", str(tmp_path), *OPTIONS]
    code = main(["layouts", *arguments, "--layouts", layouts, "--verify"])
    results = json.loads((tmp_path / "layouts.json").read_text())
    assert [result["findings"] for result in results] == [[]] * len(layouts.split())
    assert {result["agreement"] for result in results} == {"equal"}
    assert code == 0
