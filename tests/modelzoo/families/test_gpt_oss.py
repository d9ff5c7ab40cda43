"""GPT-OSS as published: config.json, GGUF metadata, and the tensors of its experts."""

import jax.numpy as jnp
import numpy as np
import pytest
from alike import alike
from memory_tensors import Arrays

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.families.family import ModelSpec
from noria.modelzoo.families.registry import UnsupportedModel, from_gguf_metadata, from_hf_config
from noria.modelzoo.moe_config import ClampedUnit, Routing
from noria.modelzoo.rope_config import RopeConfig, YarnScaling
from noria.runtime.checkpoint.axis_pattern import AxisPattern

YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}
PUBLISHED = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": YARN,
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
"""The `config.json` of the model with 20 billion parameters."""
GGUF = {
    "general.architecture": "gpt-oss",
    "gpt-oss.block_count": 2,
    "gpt-oss.context_length": 256,
    "gpt-oss.embedding_length": 32,
    "gpt-oss.feed_forward_length": 48,
    "gpt-oss.attention.head_count": 4,
    "gpt-oss.attention.head_count_kv": 2,
    "gpt-oss.attention.key_length": 8,
    "gpt-oss.attention.value_length": 8,
    "gpt-oss.attention.sliding_window": 16,
    "gpt-oss.attention.layer_norm_rms_epsilon": 1e-5,
    "gpt-oss.expert_count": 5,
    "gpt-oss.expert_used_count": 2,
    "gpt-oss.expert_feed_forward_length": 48,
    "gpt-oss.rope.freq_base": 150000.0,
    "gpt-oss.rope.scaling.type": "yarn",
    "gpt-oss.rope.scaling.factor": 32.0,
    "gpt-oss.rope.scaling.original_context_length": 64,
    "gpt-oss.vocab_size": 101,
}
UNTIED = ("token_embd.weight", "output.weight")


def assert_sources_fill_the_decoder(spec: ModelSpec) -> None:
    filled = [source.parameter for source in spec.sources]
    assert sorted(filled) == sorted(AbstractModel(spec.config).abstract_parameters(jnp.float32))


def test_the_published_model_is_read_whole():
    spec = from_hf_config(PUBLISHED)
    config = spec.config
    assert alike(config).windows == (128, None) * 12
    assert alike(config).rope == RopeConfig(150_000.0, YarnScaling(32.0, 4096, truncate=False))
    options = alike(config)
    assert (options.qkv_bias, options.output_bias, options.mlp_bias, options.sinks) == (
        True, True, False, True,
    )  # fmt: skip
    assert config.moe.routing == Routing(32, 4, scoring="softmax_of_chosen", has_bias=True)
    assert (config.moe.mlp, config.moe.has_bias) == (2880, True)
    assert config.moe.clamped == ClampedUnit(1.702, 7.0)
    assert_sources_fill_the_decoder(spec)


def test_what_the_file_leaves_out_is_what_the_reference_assumes():
    optional = ("attention_bias", "head_dim", "layer_types", "num_local_experts", "rope_theta",
                "sliding_window", "swiglu_limit", "num_experts_per_tok")  # fmt: skip
    config = from_hf_config({k: v for k, v in PUBLISHED.items() if k not in optional}).config
    published = from_hf_config(PUBLISHED | {"num_local_experts": 128}).config
    assert config == published


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": None}, "rope_scaling: expected a table of rotary options, got None"),
        ({"sliding_window": None}, "sliding_window: expected a size"),
        ({"swiglu_limit": 0.0}, "swiglu_limit: expected a finite number above 0"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok: expected an integer from 1 to 32"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        from_hf_config(PUBLISHED | changes)


def test_gguf_is_read_as_llama_cpp_does_with_the_ramp_as_published():
    spec = from_gguf_metadata(GGUF, UNTIED)
    config = spec.config
    assert alike(config).windows == (16, None)
    assert alike(config).rope == RopeConfig(150_000.0, YarnScaling(32.0, 64, truncate=False))
    assert (alike(config).qkv_bias, alike(config).output_bias, alike(config).sinks) == (
        True,
        True,
        True,
    )
    assert config.moe.routing == Routing(5, 2, scoring="softmax_of_chosen", has_bias=True)
    assert (config.moe.mlp, config.moe.has_bias) == (48, True)
    assert config.moe.clamped == ClampedUnit(1.702, 7.0)
    assert_sources_fill_the_decoder(spec)


def test_gguf_tensors_have_the_names_of_llama_cpp():
    used = {part.tensor for source in from_gguf_metadata(GGUF, UNTIED).sources
            for part in source.parts if ".1." in part.tensor}  # fmt: skip
    with_bias = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_exps",
                 "ffn_up_exps", "ffn_down_exps")  # fmt: skip
    alone = ("attn_norm", "post_attention_norm", "attn_sinks")
    expected = {f"blk.1.{name}.weight" for name in (*with_bias, *alone)}
    assert used == expected | {f"blk.1.{name}.bias" for name in with_bias}


def filled(spec: ModelSpec, parameter: str, tensors: dict[str, np.ndarray]) -> np.ndarray:
    (source,) = (s for s in spec.sources if s.parameter == f"layers.0.{parameter}")
    parts = [AxisPattern.of(p).read(Arrays(tensors), p.tensor) for p in source.parts]
    return np.concatenate(parts, axis=source.concat_axis)


def test_gate_and_up_take_turns_in_one_tensor_and_are_two_in_gguf():
    E, D, F = 5, 3, 4
    rng = np.random.default_rng(0)
    gate_up, bias = rng.normal(size=(E, D, 2 * F)), rng.normal(size=(E, 2 * F))
    down = rng.normal(size=(E, F, D))
    experts = "model.layers.0.mlp.experts"
    published = {
        f"{experts}.gate_up_proj": gate_up,
        f"{experts}.gate_up_proj_bias": bias,
        f"{experts}.down_proj": down,
    }
    converted = {
        "blk.0.ffn_gate_exps.weight": gate_up[:, :, ::2].swapaxes(1, 2),
        "blk.0.ffn_up_exps.weight": gate_up[:, :, 1::2].swapaxes(1, 2),
        "blk.0.ffn_gate_exps.bias": bias[:, ::2],
        "blk.0.ffn_up_exps.bias": bias[:, 1::2],
        "blk.0.ffn_down_exps.weight": down.swapaxes(1, 2),
    }
    expected = {
        "mlp.gate_up": np.stack([gate_up[:, :, ::2], gate_up[:, :, 1::2]], axis=1),
        "mlp.gate_up_bias": np.stack([bias[:, ::2], bias[:, 1::2]], axis=1),
        "mlp.down": down,
    }
    for parameter, array in expected.items():
        np.testing.assert_array_equal(
            filled(from_hf_config(PUBLISHED), parameter, published), array
        )
        of_gguf = filled(from_gguf_metadata(GGUF, UNTIED), parameter, converted)
        np.testing.assert_array_equal(of_gguf, array)
