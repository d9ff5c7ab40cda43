"""A small random model of Llama's shape, as a published directory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 5,
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return published shapes by name, for one layer and tied embeddings."""
    D, F, V = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    keys = D * config["num_key_value_heads"] // config["num_attention_heads"]
    return {
        "model.embed_tokens.weight": (V, D),
        "model.layers.0.input_layernorm.weight": (D,),
        "model.layers.0.self_attn.q_proj.weight": (D, D),
        "model.layers.0.self_attn.k_proj.weight": (keys, D),
        "model.layers.0.self_attn.v_proj.weight": (keys, D),
        "model.layers.0.self_attn.o_proj.weight": (D, D),
        "model.layers.0.post_attention_layernorm.weight": (D,),
        "model.layers.0.mlp.gate_proj.weight": (F, D),
        "model.layers.0.mlp.up_proj.weight": (F, D),
        "model.layers.0.mlp.down_proj.weight": (D, F),
        "model.norm.weight": (D,),
    }


def random_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return published tensors, the same in each call."""
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes(config).items()}


def save(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """Write config.json and one file of weights."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path
