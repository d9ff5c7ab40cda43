"""Models of families that transformers lacks: models of equal families in the published form.

Each function changes the config.json and the tensors of a model of the other family in place, as
the code published with the weights has them. Does not know how noria reads them.
"""

import math
from typing import Any

import numpy as np

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]


def kimi_k2(config: Config, tensors: Tensors) -> None:
    """DeepSeek-V3 under another name."""
    del tensors
    config["model_type"] = "kimi_k2"


def mimo(config: Config, tensors: Tensors) -> None:
    """Qwen2 with a layer that predicts further tokens."""
    config |= {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
    }
    tensors["model.mtp_layers.0.input_proj.weight"] = np.ones((2, 2), np.float32)


def internlm2(config: Config, tensors: Tensors) -> None:
    """Llama with one tensor of queries, keys and values, ordered by key/value head."""
    bias = config.pop("attention_bias")
    config |= {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"], "bias": bias}
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    K = config["num_key_value_heads"]
    for name in [name for name in tensors if "q_proj" in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        groups = [part.reshape(K, -1, *part.shape[1:]) for part in parts]
        fused = np.concatenate(groups, axis=1)
        name = name.replace("self_attn.q_proj", "attention.wqkv")
        tensors[name] = fused.reshape(-1, *fused.shape[2:])
    for name in list(tensors):
        x = tensors.pop(name)
        for theirs, published in names.items():
            name = name.replace(theirs, published)
        tensors[name] = x


def orion(config: Config, tensors: Tensors) -> None:
    """StableLM whose heads rotate whole."""
    del tensors
    epsilon = config.pop("layer_norm_eps")
    config |= {"model_type": "orion", "architectures": ["OrionForCausalLM"]}
    config["rms_norm_eps"] = epsilon


def minicpm(config: Config, tensors: Tensors) -> None:
    """Granite with other names of its factors."""
    del tensors
    residual, logits = config.pop("residual_multiplier"), config.pop("logits_scaling")
    config |= {
        "model_type": "minicpm",
        "architectures": ["MiniCPMForCausalLM"],
        "scale_emb": config.pop("embedding_multiplier"),
        "scale_depth": residual * math.sqrt(config["num_hidden_layers"]),
        "dim_model_base": config["hidden_size"] / logits,
    }


def deepseek(config: Config, tensors: Tensors) -> None:
    """Qwen2-MoE without biases, whose gate of the shared expert is always a half."""
    config |= {
        "model_type": "deepseek",
        "architectures": ["DeepseekForCausalLM"],
        "n_routed_experts": config.pop("num_experts"),
        "n_shared_experts": config["shared_expert_intermediate_size"]
        // config["moe_intermediate_size"],
        "first_k_dense_replace": len(config.pop("mlp_only_layers")),
        "scoring_func": "softmax",
    }
    del config["sliding_window"]
    for name in list(tensors):
        x = tensors.pop(name)
        if "shared_expert_gate" in name:
            assert not x.any()
            continue
        half = 0.5 if "shared_expert.down_proj" in name else 1.0
        tensors[name.replace("shared_expert.", "shared_experts.")] = half * x
