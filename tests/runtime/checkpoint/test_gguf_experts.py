"""GGUF files of models with experts equal the published directories of the same models.

The package `gguf`, which has llama.cpp's names of keys and tensors, writes the files.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import CASES, save_reference

from noria.compile.abstract_model import AbstractModel
from noria.runtime.checkpoint import load_params, open_model
from noria.runtime.checkpoint.formats.safetensors import SafetensorsDirectory

pytestmark = pytest.mark.reference

ARCHITECTURES = {
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen1.5-moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3-moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "granite-moe": gguf.MODEL_ARCH.GRANITE_MOE,
}
KEYS = {
    "num_hidden_layers": gguf.Keys.LLM.BLOCK_COUNT,
    "max_position_embeddings": gguf.Keys.LLM.CONTEXT_LENGTH,
    "hidden_size": gguf.Keys.LLM.EMBEDDING_LENGTH,
    "intermediate_size": gguf.Keys.LLM.FEED_FORWARD_LENGTH,
    "moe_intermediate_size": gguf.Keys.LLM.EXPERT_FEED_FORWARD_LENGTH,
    "shared_expert_intermediate_size": gguf.Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH,
    "num_experts": gguf.Keys.LLM.EXPERT_COUNT,
    "num_local_experts": gguf.Keys.LLM.EXPERT_COUNT,
    "num_experts_per_tok": gguf.Keys.LLM.EXPERT_USED_COUNT,
    "num_attention_heads": gguf.Keys.Attention.HEAD_COUNT,
    "num_key_value_heads": gguf.Keys.Attention.HEAD_COUNT_KV,
    "head_dim": gguf.Keys.Attention.KEY_LENGTH,
    "vocab_size": gguf.Keys.LLM.VOCAB_SIZE,
    "rms_norm_eps": gguf.Keys.Attention.LAYERNORM_RMS_EPS,
    "rope_theta": gguf.Keys.Rope.FREQ_BASE,
    "attention_multiplier": gguf.Keys.Attention.SCALE,
    "embedding_multiplier": gguf.Keys.LLM.EMBEDDING_SCALE,
    "residual_multiplier": gguf.Keys.LLM.RESIDUAL_SCALE,
    "logits_scaling": gguf.Keys.LLM.LOGIT_SCALE,
}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def converted(config: dict[str, Any], published: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors in the form of llama.cpp's converter, with their published names."""
    tensors, experts = {}, {}
    for name, array in published.items():
        if found := EXPERT.fullmatch(name):
            experts.setdefault(f"{found[1]}.{found[3]}.weight", {})[int(found[2])] = array
        elif "input_linear" in name:
            for side, half in zip(("w1", "w3"), np.split(array, 2, axis=1), strict=True):
                tensors[name.replace("input_linear", f"experts.{side}")] = half
        elif "shared_expert_gate" in name:
            tensors[name] = array[0]
        else:
            tensors[name] = array
    for name, of_expert in experts.items():
        tensors[name] = np.stack([of_expert[e] for e in range(len(of_expert))])
    if config["model_type"] in ("mixtral", "granitemoe"):
        for name in tensors:
            for side, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
                if f"{side}_proj" in name:
                    tensors[name] = side_by_side(tensors[name], config[heads])
    return tensors


def side_by_side(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head so that rotary pairs are neighbours."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write(path: Path, directory: Path, kind: gguf.MODEL_ARCH, *, is_old: bool = False) -> Path:
    """Write a directory's model as a GGUF file; old files have a tensor for each expert."""
    config = json.loads((directory / "config.json").read_text())
    architecture = gguf.MODEL_ARCH_NAMES[kind]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in config.items():
        if key in KEYS and value is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(KEYS[key].format(arch=architecture), value)
    source = SafetensorsDirectory(directory)
    published = {name: source.read(name) for name in source.tensors}
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for name, array in converted(config, published).items():
        name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert name is not None
        if is_old and "_exps" in name:
            for e, of_expert in enumerate(array):
                writer.add_tensor(name.replace("_exps", f".{e}"), np.ascontiguousarray(of_expert))
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path):
    with open_model(path) as model:
        abstract = AbstractModel(model.spec.config).abstract_parameters(jnp.float32)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return model.spec.config, load_params(model.spec, model.tensors, abstract, device)


@pytest.mark.parametrize("is_old", [False, True], ids=["stacked", "one tensor an expert"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gguf_file_with_experts_is_the_model_that_it_was_made_from(tmp_path, name, is_old):
    (case,) = (case for case in CASES if case.name == name)
    save_reference(case, tmp_path / "published")
    path = write(tmp_path / "m.gguf", tmp_path / "published", ARCHITECTURES[name], is_old=is_old)
    config, params = load(path)
    published_config, published = load(tmp_path / "published")
    # a number of 32 bits in GGUF
    config = replace(config, norm_epsilon=published_config.norm_epsilon)
    assert config == published_config
    assert params.keys() == published.keys()
    for parameter, value in published.items():
        np.testing.assert_array_equal(params[parameter], value)
