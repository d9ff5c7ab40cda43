"""An adapter with unchanged copies of embedding and head is the adapter without them."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from noria.runtime.adapters.adapter_set import AdapterSet
from noria.runtime.adapters.merged_model import open_merged
from noria.runtime.checkpoint import open_model
from noria.runtime.errors import InvalidAdapter

V, D, F, R = 32, 16, 24, 2
EMBEDDING, HEAD, QUERY = "model.embed_tokens", "lm_head", "model.layers.0.self_attn.q_proj"
SHAPES = {
    EMBEDDING: (V, D),
    "model.layers.0.input_layernorm": (D,),
    QUERY: (D, D),
    "model.layers.0.self_attn.k_proj": (8, D),
    "model.layers.0.self_attn.v_proj": (8, D),
    "model.layers.0.self_attn.o_proj": (D, D),
    "model.layers.0.post_attention_layernorm": (D,),
    "model.layers.0.mlp.gate_proj": (F, D),
    "model.layers.0.mlp.up_proj": (F, D),
    "model.layers.0.mlp.down_proj": (D, F),
    "model.norm": (D,),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
NO_CHANGE = "expected no change of 'lm_head', as embedding and head of the model are one weight"


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request, tmp_path):
    rng = np.random.default_rng(0)
    shapes = SHAPES if request.param else {**SHAPES, HEAD: (V, D)}
    tensors = {f"{k}.weight": rng.standard_normal(s, np.float32) for k, s in shapes.items()}
    config = CONFIG | {"tie_word_embeddings": request.param}
    path = write(tmp_path / "model", "config.json", config, "model.safetensors", tensors)
    return path, tensors


def write(path, config_name, config, weights_name, tensors):
    path.mkdir()
    (path / config_name).write_text(json.dumps(config))
    save_file(tensors, path / weights_name)
    return path


def write_adapter(path, saved, **tables):
    """Write an adapter of the queries, with whole tables."""
    rng = np.random.default_rng(1)
    config = {"peft_type": "LORA", "r": R, "lora_alpha": 4, "target_modules": ["q_proj"]}
    tensors = {
        f"base_model.model.{QUERY}.lora_A.weight": rng.standard_normal((R, D), np.float32),
        f"base_model.model.{QUERY}.lora_B.weight": rng.standard_normal((D, R), np.float32),
    }
    tensors |= {f"base_model.model.{name}.weight": table for name, table in tables.items()}
    config |= {"modules_to_save": saved}
    return write(path, "adapter_config.json", config, "adapter_model.safetensors", tensors)


@pytest.mark.parametrize("saved", [None, ["embed_tokens", "lm_head"]], ids=["beside", "saved"])
def test_copies_change_nothing(model, tmp_path, saved):
    base, tensors = model
    embedding = tensors[f"{EMBEDDING}.weight"]
    tables = {EMBEDDING: embedding.copy(), HEAD: tensors.get(f"{HEAD}.weight", embedding).copy()}
    plain = write_adapter(tmp_path / "plain", None)
    copies = write_adapter(tmp_path / "copies", saved, **tables)
    with open_merged(base, plain) as expected, open_merged(base, copies) as found:
        assert found.tensors.tensors == expected.tensors.tensors
        for name in expected.tensors.tensors:
            np.testing.assert_array_equal(found.tensors.read(name), expected.tensors.read(name))
        assert not np.array_equal(found.tensors.read(f"{QUERY}.weight"), tensors[f"{QUERY}.weight"])
    with open_model(base) as files:
        grids = [AdapterSet.open(files, {"a": path}).grid() for path in (plain, copies)]
    assert grids[0] == grids[1]


@pytest.mark.parametrize("saved", [None, ["lm_head"]], ids=["beside", "saved"])
def test_a_head_that_is_no_copy_changes_the_model_or_is_refused(model, tmp_path, saved):
    base, tensors = model
    changed = tensors[f"{EMBEDDING}.weight"].copy()
    changed[-1, -1] += 1
    adapter = write_adapter(tmp_path / "a", saved, **{HEAD: changed})
    with open_merged(base, adapter) as files:
        if files.spec.config.tie_embeddings:
            with pytest.raises(InvalidAdapter, match=NO_CHANGE):
                _ = files.tensors
        else:
            np.testing.assert_array_equal(files.tensors.read(f"{HEAD}.weight"), changed)
