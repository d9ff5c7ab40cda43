"""The models that every family must reproduce: small and random, each with special features.

A family takes part through an entry in `CASES`. Transformers, the published implementation, builds
each case, with weights so large that a swapped head or a missing norm changes the result, and saves
it as a directory. A model that is read from the directory must give the same log-probabilities.
Does not know how noria computes.
"""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import republished
from republished import Config, Tensors
from safetensors.numpy import load_file, save_file


@dataclass(frozen=True)
class Case:
    """One small model, with the options of its family's config.json."""

    name: str
    family: str
    options: Mapping[str, Any]
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Rope options in the new spelling."""
    is_old_spelling: bool = False
    """Whether config.json is rewritten with `rope_theta` and `rope_scaling`."""
    is_fused: bool = False
    """Whether experts are saved as transformers holds them in memory, not as published."""
    of: str | None = None
    """The family that builds the model, for a family that transformers lacks."""

    @property
    def publish(self) -> Callable[[Config, Tensors], None] | None:
        """The change of the saved model into the published form, for such a family."""
        return getattr(republished, self.family) if self.of else None


SHARED = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

LINEAR = {"rope_type": "linear", "factor": 2.5}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_SCALED = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def _heads(query: int, kv: int, head_dim: int | None = None) -> dict[str, Any]:
    heads = {"num_attention_heads": query, "num_key_value_heads": kv}
    return heads if head_dim is None else heads | {"head_dim": head_dim}


def _experts(count: int, chosen: int, key: str = "num_local_experts") -> dict[str, Any]:
    return {key: count, "num_experts_per_tok": chosen}


def _small_experts(count: int, chosen: int) -> dict[str, Any]:
    """Return options for experts with their own width, next to dense layers."""
    return _experts(count, chosen, "num_experts") | {"moe_intermediate_size": 24}


def _latent(heads: int, rank: int, plain: int, rotated: int, value: int) -> dict[str, Any]:
    """Return the sizes of latent attention."""
    return _heads(heads, heads) | {
        "kv_lora_rank": rank,
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
    }


def _routed(
    count: int, chosen: int, groups: tuple[int, int] | None = None, shared: int = 1, dense: int = 1
) -> dict[str, Any]:
    """Return DeepSeek's experts in groups; a token chooses from the best groups."""
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": chosen,
        "n_group": groups and groups[0],
        "topk_group": groups and groups[1],
        "n_shared_experts": shared,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": dense,
        "routed_scaling_factor": 1.0,
    }


def _chunks(size: int, **growth: Any) -> dict[str, Any]:
    """Return options for attention chunks, and for the query scale of layers without chunks."""
    return {"attention_chunk_size": size, **growth}


def by_kind(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    """Return rope options of layers without and with a window."""
    default = {"rope_type": "default"}
    return {"full_attention": default | full, "sliding_attention": default | sliding}


def long_rope(num_factors: int, original: int) -> dict[str, Any]:
    """Return factors up to the original length, and much larger factors beyond it."""
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.3 * i for i in range(num_factors)],
        "long_factor": [5.0 + 2.0 * i for i in range(num_factors)],
        "original_max_position_embeddings": original,
    }


CASES = (
    Case("llama-2", "llama", _heads(4, 4), is_old_spelling=True),
    Case("smollm2", "llama", _heads(6, 2) | {"tie_word_embeddings": True}, {"rope_theta": 1e5}),
    Case("llama-linear", "llama", _heads(4, 2), LINEAR, is_old_spelling=True),
    Case(
        "llama-3.1",
        "llama",
        _heads(8, 1, 10) | {"tie_word_embeddings": True},
        {"rope_theta": 5e5} | LLAMA3,
        is_old_spelling=True,
    ),
    Case("llama-3.2-new", "llama", _heads(3, 1, 16), {"rope_theta": 5e5} | LLAMA3),
    Case(
        "llama-biases-yarn",
        "llama",
        _heads(4, 2, 14) | {"attention_bias": True, "mlp_bias": True},
        YARN,
    ),
    Case(
        "llama4-scout",
        "llama4_text",
        _heads(10, 2, 6)
        | _chunks(5, floor_scale=3)
        | _experts(16, 1)
        | {"num_hidden_layers": 4, "intermediate_size_mlp": 40},
        {"rope_theta": 5e5} | LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 1.0},
        is_old_spelling=True,
    ),
    Case(
        "llama4-maverick-alternating",
        "llama4_text",
        _heads(5, 1, 14)
        | _chunks(8, floor_scale=5, attn_scale=0.7)
        | _experts(6, 2)
        | {
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 72,
            "use_qk_norm": False,
            "tie_word_embeddings": True,
        },
        {"rope_theta": 5e5},
    ),
    Case(
        "llama4-dense-biases",
        "llama4_text",
        _heads(3, 3, 12)
        | _chunks(3, floor_scale=2, attn_scale=1.5)
        | {
            "moe_layers": [],
            "no_rope_layers": [0, 1, 1],
            "num_hidden_layers": 3,
            "intermediate_size_mlp": 56,
            "attention_bias": True,
        },
        LINEAR,
        is_old_spelling=True,
    ),
    Case(
        "llama4-all-chosen-untuned",
        "llama4_text",
        _heads(6, 2, 10)
        | _chunks(64, floor_scale=2, attn_temperature_tuning=False)
        | _experts(3, 3)
        | {
            "no_rope_layers": [1, 0, 1],
            "moe_layers": [0, 2],
            "num_hidden_layers": 3,
            "intermediate_size_mlp": 24,
            "tie_word_embeddings": True,
        },
        YARN,
    ),
    Case("mistral-window", "mistral", _heads(6, 2) | {"sliding_window": 5}, is_old_spelling=True),
    Case("mistral-head-dim", "mistral", _heads(4, 2, 20) | {"sliding_window": None}),
    Case(
        "mistral-yarn",
        "mistral",
        _heads(8, 1, 6) | {"sliding_window": 3, "tie_word_embeddings": True},
        YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 0.5},
        is_old_spelling=True,
    ),
    Case(
        "mistral-odd-heads-tied",
        "mistral",
        _heads(5, 5, 12) | {"sliding_window": 11, "tie_word_embeddings": True},
        LINEAR,
    ),
    Case("mixtral", "mixtral", _heads(4, 2) | _experts(4, 2), is_old_spelling=True),
    Case(
        "mixtral-window-one-choice",
        "mixtral",
        _heads(6, 2, 10) | _experts(3, 1) | {"sliding_window": 5, "tie_word_embeddings": True},
    ),
    Case("mixtral-all-chosen", "mixtral", _heads(3, 3, 12) | _experts(5, 5)),
    Case(
        "mixtral-many-fused",
        "mixtral",
        _heads(8, 1, 6) | _experts(16, 3) | {"sliding_window": 3},
        is_fused=True,
    ),
    Case(
        "qwen1.5-moe",
        "qwen2_moe",
        _heads(4, 4) | _small_experts(6, 2) | {"shared_expert_intermediate_size": 40},
        {"rope_theta": 1e6},
        is_old_spelling=True,
    ),
    Case(
        "qwen2-moe-normalised-after-a-dense-layer",
        "qwen2_moe",
        _heads(6, 2)
        | _small_experts(5, 3)
        | {
            "shared_expert_intermediate_size": 20,
            "num_hidden_layers": 3,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    ),
    Case(
        "qwen2-moe-each-second-one-choice-window",
        "qwen2_moe",
        _heads(8, 1, 10)
        | _small_experts(3, 1)
        | {
            "shared_expert_intermediate_size": 12,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
        },
        is_old_spelling=True,
    ),
    Case(
        "qwen2-moe-all-chosen-fused-yarn",
        "qwen2_moe",
        _heads(3, 1, 14)
        | _small_experts(4, 4)
        | {
            "shared_expert_intermediate_size": 36,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        YARN,
        is_fused=True,
    ),
    Case(
        "qwen3-moe",
        "qwen3_moe",
        _heads(8, 1, 16) | _small_experts(8, 3) | {"norm_topk_prob": True},
        {"rope_theta": 1e6},
        is_old_spelling=True,
    ),
    Case(
        "qwen3-moe-one-choice-window-before-a-dense-layer",
        "qwen3_moe",
        _heads(3, 3, 12)
        | _small_experts(5, 1)
        | {
            "num_hidden_layers": 3,
            "mlp_only_layers": [2],
            "use_sliding_window": True,
            "sliding_window": 5,
            "tie_word_embeddings": True,
        },
        is_old_spelling=True,
    ),
    Case(
        "qwen3-moe-each-second-all-chosen-biases",
        "qwen3_moe",
        _heads(4, 2, 10)
        | _small_experts(4, 4)
        | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "attention_bias": True},
        LINEAR,
    ),
    Case(
        "qwen3-moe-many-fused-yarn",
        "qwen3_moe",
        _heads(6, 2, 6) | _small_experts(16, 5) | {"norm_topk_prob": True},
        {"rope_theta": 1e6} | YARN,
        is_fused=True,
    ),
    Case("olmoe", "olmoe", _heads(4, 4) | _experts(8, 2, "num_experts"), is_old_spelling=True),
    Case(
        "olmoe-all-chosen-biases-yarn",
        "olmoe",
        _heads(6, 2)
        | _experts(3, 3, "num_experts")
        | {"attention_bias": True, "norm_topk_prob": True, "tie_word_embeddings": True},
        YARN,
    ),
    Case(
        "olmoe-one-choice",
        "olmoe",
        _heads(3, 1) | _experts(7, 1, "num_experts"),
        {"rope_theta": 300.0},
    ),
    Case(
        "olmoe-many-fused-linear",
        "olmoe",
        _heads(12, 2) | _experts(12, 5, "num_experts"),
        LINEAR,
        is_fused=True,
    ),
    Case(
        "granite-moe",
        "granitemoe",
        _heads(6, 2)
        | _experts(8, 2)
        | {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.25,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
        is_old_spelling=True,
    ),
    Case(
        "granite-moe-all-chosen-biases-yarn",
        "granitemoe",
        _heads(4, 1, 14)
        | _experts(5, 5)
        | {"attention_bias": True, "embedding_multiplier": 3, "residual_multiplier": 0.7},
        YARN,
    ),
    Case(
        "granite-moe-one-choice-linear",
        "granitemoe",
        _heads(3, 3) | _experts(4, 1) | {"logits_scaling": 0.5},
        LINEAR,
    ),
    Case(
        "granite-moe-many-fused",
        "granitemoe",
        _heads(8, 1) | _experts(16, 6) | {"attention_multiplier": 0.3},
        is_old_spelling=True,
        is_fused=True,
    ),
    Case("qwen2", "qwen2", _heads(4, 2) | {"tie_word_embeddings": True}, {"rope_theta": 1e6}, True),
    Case(
        "qwen2-latter-window",
        "qwen2",
        _heads(2, 2)
        | {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "tie_word_embeddings": False,
        },
        is_old_spelling=True,
    ),
    Case(
        "qwen2.5-yarn",
        "qwen2",
        _heads(6, 2)
        | {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {"rope_theta": 1e6} | YARN,
        is_old_spelling=True,
    ),
    Case("qwen2-odd-heads", "qwen2", _heads(3, 1) | {"tie_word_embeddings": False}, LINEAR),
    Case("qwen3", "qwen3", _heads(8, 1, 16) | {"tie_word_embeddings": True}, {"rope_theta": 1e6}),
    Case(
        "qwen3-biases-linear",
        "qwen3",
        _heads(4, 2, 10) | {"attention_bias": True},
        LINEAR,
        is_old_spelling=True,
    ),
    Case(
        "qwen3-yarn-window",
        "qwen3",
        _heads(3, 3, 12)
        | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
        {"rope_theta": 1e6} | YARN | {"truncate": False},
    ),
    Case("qwen3-odd-heads", "qwen3", _heads(5, 1, 8) | {"tie_word_embeddings": False}),
    Case("olmo2", "olmo2", _heads(4, 4), {"rope_theta": 5e5}, is_old_spelling=True),
    Case(
        "olmo2-32b-biases-yarn",
        "olmo2",
        _heads(10, 2, 6) | {"attention_bias": True, "tie_word_embeddings": True},
        {"rope_theta": 5e5} | YARN,
    ),
    Case("olmo2-linear", "olmo2", _heads(6, 1, 14), LINEAR, is_old_spelling=True),
    Case("olmo2-odd-heads", "olmo2", _heads(3, 3, 10) | {"tie_word_embeddings": True}),
    Case(
        "granite-3",
        "granite",
        _heads(6, 2)
        | {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
        {"rope_theta": 5e6},
        is_old_spelling=True,
    ),
    Case(
        "granite-biases-yarn",
        "granite",
        _heads(4, 1, 14)
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 3,
            "residual_multiplier": 0.7,
        },
        YARN,
    ),
    Case(
        "granite-odd-heads-linear",
        "granite",
        _heads(3, 1, 12) | {"attention_multiplier": 0.3, "logits_scaling": 2.0},
        LINEAR,
        is_old_spelling=True,
    ),
    Case(
        "granite-all-heads",
        "granite",
        _heads(5, 5, 8) | {"residual_multiplier": 0.4, "tie_word_embeddings": True},
    ),
    Case(
        "gemma2",
        "gemma2",
        _heads(4, 2, 14)
        | {
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
        is_old_spelling=True,
    ),
    Case(
        "gemma2-27b-untied",
        "gemma2",
        _heads(8, 1, 10)
        | {
            "sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention", "sliding_attention"],
            "tie_word_embeddings": False,
        },
        LINEAR,
    ),
    Case(
        "gemma2-biases-uncapped",
        "gemma2",
        _heads(3, 3, 16)
        | {"attention_bias": True, "attn_logit_softcapping": None, "sliding_window": 7},
        YARN,
        is_old_spelling=True,
    ),
    Case("gemma2-odd-heads", "gemma2", _heads(3, 1, 8) | {"sliding_window": 3}),
    Case(
        "gemma3-1b",
        "gemma3_text",
        _heads(4, 1, 14)
        | {
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 20,
        },
        by_kind({"rope_theta": 1e6}, {"rope_theta": 1e4}),
        is_old_spelling=True,
    ),
    Case(
        "gemma3-4b-linear",
        "gemma3_text",
        _heads(8, 2, 6)
        | {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
        by_kind({"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}, {"rope_theta": 300.0}),
    ),
    Case(
        "gemma3-biases-capped",
        "gemma3_text",
        _heads(3, 3, 12)
        | {
            "attention_bias": True,
            "final_logit_softcapping": 2.0,
            "sliding_window": 3,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": False,
        },
        by_kind({"rope_theta": 500.0} | YARN, {"rope_theta": 1e4}),
        is_old_spelling=True,
    ),
    Case(
        "gemma3-odd-heads",
        "gemma3_text",
        _heads(3, 1, 10) | {"sliding_window": 9, "sliding_window_pattern": 2},
        by_kind({"rope_theta": 1e5}, {"rope_theta": 1e3}),
    ),
    Case("phi3-mini-4k", "phi3", _heads(4, 4) | {"sliding_window": 5}, is_old_spelling=True),
    Case(
        "phi3.5-mini",
        "phi3",
        _heads(4, 4) | {"original_max_position_embeddings": 32, "sliding_window": 9},
        long_rope(6, 32),
        is_old_spelling=True,
    ),
    Case(
        "phi4-mini",
        "phi3",
        _heads(3, 1) | {"original_max_position_embeddings": 24, "tie_word_embeddings": True},
        long_rope(6, 24) | {"partial_rotary_factor": 0.75, "rope_theta": 500.0},
    ),
    Case(
        "phi3-partial",
        "phi3",
        _heads(6, 2) | {"original_max_position_embeddings": 40},
        long_rope(2, 40) | {"partial_rotary_factor": 0.5, "attention_factor": 1.2},
        is_old_spelling=True,
    ),
    Case("command-r", "cohere", _heads(4, 4) | {"logit_scale": 0.5}, is_old_spelling=True),
    Case(
        "command-r-plus",
        "cohere",
        _heads(6, 2, 10) | {"use_qk_norm": True, "logit_scale": 2.0, "tie_word_embeddings": False},
        {"rope_theta": 1e6},
    ),
    Case("command-r-odd-heads", "cohere", _heads(3, 1, 8) | {"tie_word_embeddings": False}),
    Case(
        "command-r-biases-linear",
        "cohere",
        _heads(8, 1, 6) | {"attention_bias": True, "use_qk_norm": True},
        LINEAR,
        is_old_spelling=True,
    ),
    Case(
        "deepseek-v2-lite",
        "deepseek_v2",
        _latent(4, 12, 10, 6, 14) | _routed(8, 3, (1, 1), shared=2) | {"q_lora_rank": None},
    ),
    Case(
        "deepseek-v2",
        "deepseek_v2",
        _latent(3, 20, 6, 8, 10)
        | _routed(12, 4, (4, 2))
        | {"q_lora_rank": 15, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
        YARN_SCALED | {"mscale": 0.707, "mscale_all_dim": 0.707},
        is_old_spelling=True,
    ),
    Case(
        "deepseek-v2-mscales-differ",
        "deepseek_v2",
        _latent(6, 18, 16, 4, 6)
        | _routed(6, 1, dense=0)
        | {"q_lora_rank": None, "tie_word_embeddings": True, "rms_norm_eps": 0.3},
        YARN_SCALED | {"mscale": 1.4, "mscale_all_dim": 0.6},
    ),
    Case(
        "deepseek-v2-linear",
        "deepseek_v2",
        _latent(1, 8, 4, 2, 3)
        | _routed(9, 2, (3, 1), shared=3)
        | {"q_lora_rank": 11, "topk_method": "group_limited_greedy", "num_hidden_layers": 3},
        LINEAR,
        is_old_spelling=True,
    ),
    Case(
        "deepseek-v3",
        "deepseek_v3",
        _latent(8, 16, 8, 4, 8)
        | _routed(16, 4, (4, 2))
        | {"q_lora_rank": 24, "rms_norm_eps": 0.3, "routed_scaling_factor": 2.5},
        YARN_SCALED | {"mscale": 1.0, "mscale_all_dim": 1.0},
        is_old_spelling=True,
    ),
    Case(
        "deepseek-v3-halves",
        "deepseek_v3",
        _latent(5, 10, 3, 6, 9)
        | _routed(6, 2, (1, 1), dense=0)
        | {"q_lora_rank": 13, "rope_interleave": False},
        {"rope_theta": 500.0},
    ),
    Case(
        "deepseek-v3-mscale-alone",
        "deepseek_v3",
        _latent(2, 13, 12, 10, 20)
        | _routed(12, 5, (3, 2), shared=2)
        | {"q_lora_rank": None, "tie_word_embeddings": True, "norm_topk_prob": False},
        YARN_SCALED | {"mscale_all_dim": 0.8, "beta_fast": 8.0},
    ),
    Case(
        "deepseek-v3-attention-factor",
        "deepseek_v3",
        _latent(3, 7, 4, 8, 5) | _routed(8, 2, (4, 1)) | {"q_lora_rank": 6, "num_hidden_layers": 3},
        YARN_SCALED | {"mscale": 0.5, "mscale_all_dim": 0.9, "attention_factor": 1.3},
    ),
    Case(
        "gpt-oss",
        "gpt_oss",
        _heads(4, 2, 12) | _experts(4, 2) | {"num_hidden_layers": 4, "sliding_window": 5},
        {"rope_theta": 15e4} | YARN | {"truncate": False},
        is_old_spelling=True,
    ),
    Case(
        "gpt-oss-clamped",
        "gpt_oss",
        # odd numbers of heads, units that the limit often clips, a ramp that rounding would change
        _heads(9, 3, 16) | _experts(7, 3) | {"sliding_window": 3, "swiglu_limit": 0.5},
        {"rope_theta": 500.0} | YARN | {"truncate": False, "original_max_position_embeddings": 32},
    ),
    Case(
        "gpt-oss-one-choice",
        "gpt_oss",
        _heads(5, 1, 6)
        | _experts(3, 1)
        | {"attention_bias": False, "sliding_window": 9, "swiglu_alpha": 0.8},
    ),
    Case(
        "gpt-oss-all-chosen-linear",
        "gpt_oss",
        _heads(3, 3)
        | _experts(5, 5)
        | {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 2,
            "tie_word_embeddings": True,
        },
        LINEAR,
        is_old_spelling=True,
    ),
    Case("granite-linear", "granite", _heads(3, 3) | {"logits_scaling": 0.5}, LINEAR),
    Case(
        "gemma-2b-biases",
        "gemma",
        _heads(4, 1, 14) | {"attention_bias": True},
        is_old_spelling=True,
    ),
    Case(
        "vaultgemma",
        "vaultgemma",
        _heads(4, 2, 14)
        | {"num_hidden_layers": 3, "sliding_window": 5, "query_pre_attn_scalar": 20}
        | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": None},
    ),
    Case(
        "command-r7b-biases",
        "cohere2",
        _heads(6, 2)
        | {"num_hidden_layers": 4, "sliding_window": 5, "logit_scale": 0.5}
        | {"attention_bias": True},
        {"rope_theta": 5e4},
        is_old_spelling=True,
    ),
    Case(
        "olmo3-yarn-old",
        "olmo3",
        _heads(6, 2) | {"num_hidden_layers": 4, "sliding_window": 5},
        by_kind({"rope_theta": 5e5} | YARN, {"rope_theta": 5e5}),
        is_old_spelling=True,
    ),
    Case(
        "olmo3-by-kind-biases",
        "olmo3",
        _heads(4, 4)
        | {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
        | {"attention_bias": True, "tie_word_embeddings": True},
        by_kind({"rope_theta": 5e5} | YARN, {"rope_theta": 300.0}),
    ),
    Case(
        "flex-olmo",
        "flex_olmo",
        _heads(6, 2) | _experts(6, 3, "num_experts") | {"norm_topk_prob": True},
        {"rope_theta": 5e5},
    ),
    Case(
        "ministral-8b",
        "ministral",
        _heads(4, 2, 10)
        | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    Case(
        "ministral3-growth",
        "ministral3",
        _heads(6, 2, 10),
        {"rope_theta": 1e6, "llama_4_scaling_beta": 0.3}
        | {"mscale": 1.0, "mscale_all_dim": 1.0}
        | YARN
        | {"original_max_position_embeddings": 6},
    ),
    Case("ernie4.5", "ernie4_5", _heads(6, 2, 10), {"rope_theta": 5e5}, is_old_spelling=True),
    Case(
        "ernie4.5-moe",
        "ernie4_5_moe",
        _heads(6, 2)
        | {"num_hidden_layers": 4, "moe_intermediate_size": 20, "moe_num_experts": 5, "moe_k": 2}
        | {"moe_layer_end_index": 2},
    ),
    Case(
        "exaone4-windows",
        "exaone4",
        _heads(4, 2, 10) | {"num_hidden_layers": 4, "sliding_window": 5},
        LLAMA3,
        is_old_spelling=True,
    ),
    Case(
        "exaone4-no-window",
        "exaone4",
        _heads(6, 1, 8)
        | {"sliding_window": None, "tie_word_embeddings": True}
        | {"layer_types": ["full_attention"] * 2},
        LLAMA3,
    ),
    Case("starcoder2", "starcoder2", _heads(4, 2) | {"sliding_window": 5}, is_old_spelling=True),
    Case(
        "kimi-k2",
        "kimi_k2",
        _latent(3, 16, 8, 4, 8) | _routed(8, 3, (1, 1)) | {"q_lora_rank": 24},
        YARN_SCALED | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0, "beta_slow": 1.0},
        is_old_spelling=True,
        of="deepseek_v3",
    ),
    Case(
        "dots1-windows",
        "dots1",
        _heads(4, 2, 10)
        | _routed(8, 3, (4, 2), shared=2)
        | {"num_hidden_layers": 3, "sliding_window": 5, "max_window_layers": 2}
        | {"attention_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
    Case(
        "glm4-moe-half",
        "glm4_moe",
        _heads(6, 2, 12)
        | _routed(8, 3, (4, 2))
        | {"attention_bias": True, "use_qk_norm": True, "num_mtp_layers": 0},
        {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
        is_old_spelling=True,
    ),
    Case(
        "minimax-m2-half",
        "minimax_m2",
        _heads(6, 2, 12) | _experts(6, 2) | {"rotary_dim": 6},
        {"rope_theta": 5e6},
        is_old_spelling=True,
    ),
    Case(
        "solar-open",
        "solar_open",
        _heads(6, 2, 10) | _routed(6, 2, (1, 1), dense=0) | {"routed_scaling_factor": 1.5},
        {"rope_theta": 1e6} | YARN,
        is_old_spelling=True,
    ),
    Case(
        "deepseek-moe",
        "deepseek",
        _heads(4, 4)
        | _small_experts(6, 2)
        | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [0], "qkv_bias": False},
        is_old_spelling=True,
        of="qwen2_moe",
    ),
    Case(
        "granite-moe-shared",
        "granitemoeshared",
        _heads(6, 2)
        | _experts(5, 2)
        | {"shared_intermediate_size": 40, "residual_multiplier": 0.25, "logits_scaling": 8.0},
    ),
    Case(
        "granite4-dense-unrotated",
        "granitemoehybrid",
        _heads(6, 2)
        | _experts(0, 0)
        | {"shared_intermediate_size": 40, "embedding_multiplier": 3, "mamba_n_heads": 4}
        | {"layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
    ),
    Case(
        "granite4-moe-rotated",
        "granitemoehybrid",
        _heads(4, 1, None)
        | _experts(5, 2)
        | {"shared_intermediate_size": 40, "attention_multiplier": 0.3, "mamba_n_heads": 4}
        | {"layer_types": ["full_attention"] * 2, "position_embedding_type": "rope"},
    ),
    Case(
        "seed-oss-biases",
        "seed_oss",
        _heads(6, 2, 10) | {"attention_out_bias": True, "mlp_bias": True},
        {"rope_theta": 1e7},
        is_old_spelling=True,
    ),
    Case("helium-biases", "helium", _heads(6, 2, 8) | {"attention_bias": True, "mlp_bias": True}),
    Case(
        "cwm",
        "cwm",
        _heads(6, 2, 10) | {"num_hidden_layers": 5, "sliding_window": 5},
        {"rope_theta": 1e6} | LLAMA3,
        is_old_spelling=True,
    ),
    Case(
        "stablelm-biases",
        "stablelm",
        _heads(4, 2) | {"use_qkv_bias": True},
        {"partial_rotary_factor": 0.5},
        is_old_spelling=True,
    ),
    Case(
        "orion",
        "orion",
        _heads(4, 4) | {"use_qkv_bias": False, "tie_word_embeddings": False},
        {"partial_rotary_factor": 1.0},
        of="stablelm",
    ),
    Case(
        "internlm2-biases",
        "internlm2",
        _heads(6, 2) | {"attention_bias": True},
        {"rope_theta": 1e6, "rope_type": "dynamic", "factor": 2.0},
        is_old_spelling=True,
        of="llama",
    ),
    Case("mimo", "mimo", _heads(6, 2), {"rope_theta": 64e4}, is_old_spelling=True, of="qwen2"),
    Case(
        "minicpm",
        "minicpm",
        _heads(6, 6)
        | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 3.0}
        | {"attention_multiplier": 8**-0.5, "tie_word_embeddings": True},
        is_old_spelling=True,
        of="granite",
    ),
)

TRUE_LENGTHS = (23, 13, 1)
"""Prompt lengths of every case: two that are longer than each window, and a single token."""


def prompts(case: Case) -> list[list[int]]:
    """Return random prompts, the same in every run of a case."""
    rng = np.random.default_rng(len(case.name))
    vocab_size = SHARED["vocab_size"]
    return [rng.integers(0, vocab_size, length).tolist() for length in TRUE_LENGTHS]


def save_reference(case: Case, directory: Path) -> list[np.ndarray]:
    """Save the model of a case; return transformers' log-probabilities `[T, V]` of each prompt."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(len(case.name))
    rope = dict(case.rope)
    if "full_attention" not in rope:
        rope = {"rope_type": "default", "rope_theta": 10_000.0} | rope
    config = AutoConfig.for_model(
        case.of or case.family, **{**SHARED, **case.options}, rope_parameters=copy.deepcopy(rope)
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # norms start at one and biases at zero, where mistakes hide
            if parameter.ndim == 1 or "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            if case.family == "deepseek" and "shared_expert_gate" in name:
                parameter.zero_()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn_like(buffer))
        model.save_pretrained(directory, save_original_format=not case.is_fused)
        logits = [model(torch.tensor([prompt])).logits[0] for prompt in prompts(case)]
    if case.is_old_spelling:
        _write_old_spelling(case, directory / "config.json", rope)
    if case.publish is not None:
        _publish(case.publish, directory)
    return [torch.log_softmax(each, dim=-1).numpy() for each in logits]


def _publish(publish: Callable[[Config, Tensors], None], directory: Path) -> None:
    path, file = directory / "config.json", directory / "model.safetensors"
    config, tensors = json.loads(path.read_text()), load_file(file)
    publish(config, tensors)
    path.write_text(json.dumps(config))
    save_file(tensors, file)


def _write_old_spelling(case: Case, path: Path, rope: dict[str, Any]) -> None:
    config = json.loads(path.read_text())
    if "layer_types" not in case.options:
        config.pop("layer_types", None)  # these keys follow from other options
    del config["rope_parameters"]
    if "_sliding_window_pattern" in config:
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
    if "full_attention" in rope:
        local = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        if local != rope["rope_theta"]:
            config["rope_local_base_freq"] = local
    config["rope_theta"] = rope.pop("rope_theta")
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        if key in rope and (case.family == "phi3" or key == "partial_rotary_factor"):
            config[key] = rope.pop(key)
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if rope["rope_type"] == "linear":
        rope["type"] = rope.pop("rope_type")  # the oldest form
    config["torch_dtype"] = config.pop("dtype", "float32")
    path.write_text(json.dumps(config))
