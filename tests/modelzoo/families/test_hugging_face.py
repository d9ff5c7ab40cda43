"""config.json of every family: published files are read completely, and others are refused."""

import math
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest
from alike import alike

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.config import Multipliers
from noria.modelzoo.families.config_reader import ConfigReader
from noria.modelzoo.families.hugging_face import (
    MAX_EMBED,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_MLP,
    MAX_VOCAB,
)
from noria.modelzoo.families.quantisation import BlockFloat8, Mxfp4, read_quantisation
from noria.modelzoo.families.registry import UnsupportedModel, from_hf_config
from noria.modelzoo.families.rope_options import MAX_POSITION
from noria.modelzoo.latent_config import LatentAttention
from noria.modelzoo.layer_config import Scores
from noria.modelzoo.moe_config import ExpertGroups, Routing
from noria.modelzoo.rope_config import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 256,
    "rope_type": "llama3",
}
SMOLLM2_EXTRAS = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.041666666666666664,
    "is_llama_config": True,
    "mlp_bias": False,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
}


LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": False,
    "routed_scaling_factor": 2.5,
}


def family(name: str, **changes: object) -> dict[str, object]:
    needed = {
        "mistral": {"sliding_window": None},
        "gemma2": {"hidden_act": "gelu_pytorch_tanh", "head_dim": 16},
        "gemma3_text": {"hidden_act": "gelu_pytorch_tanh"},
    }
    architecture = f"{name.removesuffix('_text').title().replace('_', '')}ForCausalLM"
    names = {"model_type": name, "architectures": [architecture]}
    shared = dict(LLAMA) | (LATENT if name.startswith("deepseek") else {})
    if name == "cohere":
        shared["layer_norm_eps"] = shared.pop("rms_norm_eps")
    return shared | names | needed.get(name, {}) | changes


CONFIGS = {
    "llama": LLAMA,
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
    "mistral": family("mistral", sliding_window=7),
    "qwen2": family("qwen2"),
    "qwen3": family("qwen3"),
    "qwen3-biases": family("qwen3", attention_bias=True, tie_word_embeddings=True),
    "olmo2": family("olmo2"),
    "olmo2-biases": family("olmo2", attention_bias=True),
    "granite": family("granite", residual_multiplier=0.22),
    "granite-biases": family("granite", attention_bias=True, mlp_bias=True),
    "gemma2": family("gemma2"),
    "phi3": family("phi3"),
    "phi3-partial": family("phi3", partial_rotary_factor=0.5, tie_word_embeddings=True),
    "cohere": family("cohere"),
    "cohere-normed": family("cohere", use_qk_norm=True, attention_bias=True),
    "gemma3": family("gemma3_text"),
    "gemma3-untied": family("gemma3_text", tie_word_embeddings=False, head_dim=12),
    "deepseek-v2": family("deepseek_v2"),
    "deepseek-v2-lite": family("deepseek_v2", q_lora_rank=None),
    "deepseek-v3": family("deepseek_v3", tie_word_embeddings=True),
    "gemma2-untied": family("gemma2", tie_word_embeddings=False, attention_bias=True),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_sources_fill_exactly_the_parameters_of_the_decoder(config):
    spec = from_hf_config(config)
    filled = [source.parameter for source in spec.sources]
    assert sorted(filled) == sorted(AbstractModel(spec.config).abstract_parameters(jnp.float32))


def test_reading_a_model_imports_no_jax():
    code = (
        "import sys; from noria.modelzoo.families.registry import from_hf_config; "
        f"from_hf_config({LLAMA!r}); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_keys_that_cannot_change_the_answer_are_accepted():
    spec = from_hf_config(LLAMA | SMOLLM2_EXTRAS)
    assert spec.config.tie_embeddings
    assert alike(spec.config).rope == RopeConfig(100_000.0)
    assert spec.ignored_keys == ()


NOTHING_ASKED = {
    "gemma2": {"sliding_window": 100, "sliding_window_size": 100},
    "qwen3_moe": {
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 0, "use_qk_norm": True
    },
    "mixtral": {"moe_frequency": 1, "move_model_to_device": False, "sliding_window": None},
    "llama": {
        "_model_name_or_path": "m.gguf", "unk_token_id": 0, "internal_version": "7b-alpha",
        "max_sequence_length": 2048, "selective_checkpoint_enabled": True,
        "use_flash_attention": True, "zeta": None, "eta": False, "theta": 0, "iota": "",
        "kappa": [], "lambda": {}, "mlp_bias": False, "qkv_bias": None, "use_mrope": 0,
        "layer_types": ["full_attention"] * 3, "per_layer_config": None,
        "partial_rotary_factor": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING_ASKED)
def test_keys_that_ask_for_nothing_are_accepted_without_a_word(name):
    options = NOTHING_ASKED[name]
    assert from_hf_config(family(name, **options)).ignored_keys == ()


def test_keys_that_the_reference_does_not_read_are_noted_with_their_values():
    options = {"zeta": 1, "alpha_scale": [0.5], "attention_multiplier": 0.5}
    table = {"rope_type": "linear", "factor": 2.0, "note": "ours"}
    spec = from_hf_config(LLAMA | options | {"rope_scaling": table})
    noted = ("alpha_scale = [0.5]", "attention_multiplier = 0.5", "zeta = 1")
    assert spec.ignored_keys == ("rope_scaling.note = 'ours'", *noted)
    without = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert spec.config == from_hf_config(LLAMA | without).config


def test_a_key_that_no_terminal_should_see_is_shown_by_its_escapes():
    spec = from_hf_config(LLAMA | {"\x1b[31m": 1, "k" * 100: 2})
    assert spec.ignored_keys == ("'\\x1b[31m' = 1", f"'{'k' * 76}... = 2")


def test_old_files_of_llama_mean_2048_positions_and_spell_its_class_in_capitals():
    old = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    spec = from_hf_config(old | {"architectures": ["LLaMAForCausalLM"]})
    assert spec.config.max_position == 2048
    with pytest.raises(UnsupportedModel, match=r"max_position_embeddings: expected .*got None"):
        from_hf_config(LLAMA | {"max_position_embeddings": None})


def test_remote_code_named_in_a_config_is_not_followed():
    remote = {"auto_map": {"AutoModelForCausalLM": "evil--modeling.Evil"}}
    assert from_hf_config(LLAMA | remote) == from_hf_config(LLAMA)


def test_defaults_are_those_of_the_reference():
    minimal = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    config = from_hf_config(minimal).config
    assert (alike(config).num_kv_heads, alike(config).head_dim, config.tie_embeddings) == (
        8,
        8,
        False,
    )
    assert alike(config).rope == RopeConfig(10_000.0)
    assert alike(from_hf_config(family("qwen3")).config).head_dim == 128


def test_the_sizes_of_latent_attention_are_read():
    config = from_hf_config(family("deepseek_v3")).config
    assert alike(config).latent == LatentAttention(16, 10, 6, 12, query_rank=24, norm_epsilon=1e-6)
    assert (alike(config).num_kv_heads, alike(config).head_dim) == (8, 16)
    assert alike(from_hf_config(CONFIGS["deepseek-v2-lite"]).config).latent.query_rank is None


def test_deepseek_chooses_experts_within_its_best_groups():
    limited = family("deepseek_v2", topk_method="group_limited_greedy", moe_layer_freq=1)
    config = from_hf_config(limited).config
    moe = config.moe
    assert (moe.mlp, moe.shared_mlp, config.sparse_layers) == (20, 40, (1, 2))
    groups = ExpertGroups(count=4, chosen=2, best=1)
    assert moe.routing == Routing(12, 3, is_normalized=False, scale=2.5, groups=groups)
    assert from_hf_config(family("deepseek_v2", n_group=None)).config.moe.routing.groups is None

    moe = from_hf_config(family("deepseek_v3", norm_topk_prob=True)).config.moe
    groups = ExpertGroups(count=4, chosen=2, best=2)
    sigmoid = {"scoring": "sigmoid", "has_choice_bias": True}
    assert moe.routing == Routing(12, 3, scale=2.5, groups=groups, **sigmoid)


def test_layers_that_predict_further_tokens_are_ignored_by_name():
    published = family("deepseek_v3", num_nextn_predict_layers=1)
    beyond = {"model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight"}
    last = "model.layers.2.mlp.experts.0.up_proj.weight"
    names = {*beyond, last, "model.layers.30.eh_proj.weight"}
    assert beyond == names & set(from_hf_config(published, names).ignored_tensors)
    assert not names & set(from_hf_config(family("deepseek_v3"), names).ignored_tensors)


def test_yarn_scales_rotations_by_one_ratio_and_scores_by_a_square():
    """With DeepSeek-V2's numbers, the temperature applies to all entries, not only to rotations."""
    table = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 16}
    scaled = table | {"mscale": 0.707, "mscale_all_dim": 0.707}
    config = from_hf_config(family("deepseek_v2", rope_scaling=scaled)).config
    assert alike(config).rope.scaling.attention_factor == 1.0
    assert alike(config).scores.scale == pytest.approx(0.25 * (0.0707 * math.log(40) + 1) ** 2)
    # without a scale for all entries, the paper's temperature applies to the rotated entries
    config = from_hf_config(family("deepseek_v2", rope_scaling=table)).config
    assert alike(config).rope.scaling.attention_factor is None
    assert alike(config).scores.scale == 0.25


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": True}, "norm_topk_prob: expected False"),
        ({"topk_method": "noaux_tc"}, "topk_method: expected greedy or group_limited_greedy"),
        ({"scoring_func": "sigmoid"}, "scoring_func: expected 'softmax'"),
    ],
    ids=str,
)
def test_options_of_v2_that_are_not_implemented_are_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        from_hf_config(family("deepseek_v2", **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads: expected 8, the only one implemented"),
        ({"attention_bias": True}, "attention_bias: expected False"),
        ({"head_dim": 16}, "head_dim: expected 6"),
        ({"qk_head_dim": 15}, "qk_head_dim: expected 16"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim: expected an even number"),
        ({"kv_lora_rank": None}, "kv_lora_rank: expected an integer"),
        ({"q_lora_rank": 0}, "q_lora_rank: expected an integer"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace: expected an integer from 0 to 2"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: expected 1"),
        ({"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method: expected 'noaux_tc'"),
        ({"n_group": 5}, "n_group: expected a divisor of n_routed_experts with 2 experts a group"),
        ({"n_group": 12}, "n_group: expected a divisor of n_routed_experts with 2 experts a group"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok: expected an integer from 1 to 6"),
        ({"n_group": None}, "n_group: expected an integer"),
        ({"topk_group": 5}, "topk_group: expected an integer from 1 to 4"),
        ({"rope_interleave": "no"}, "rope_interleave: expected true or false"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}}, "mscale_all"),
    ],
    ids=str,
)
def test_options_of_v3_that_are_not_implemented_are_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        from_hf_config(family("deepseek_v3", **changes))


def test_olmo2_norms_what_attention_and_mlp_write_and_all_heads_as_one():
    spec = from_hf_config(family("olmo2"))
    assert (alike(spec.config).norm_placement, alike(spec.config).qk_norm) == (
        "after",
        "projection",
    )
    tensors = {source.parameter: source.parts[0].tensor for source in spec.sources}
    norm = "model.layers.2.post_{}_layernorm.weight"
    assert tensors["layers.2.attention_post_norm.scale"] == norm.format("attention")
    assert tensors["layers.2.mlp_post_norm.scale"] == norm.format("feedforward")
    shapes = AbstractModel(spec.config).abstract_parameters(jnp.float32)
    assert shapes["layers.0.attention.query_norm.scale"].shape == (64,)
    assert shapes["layers.0.attention.key_norm.scale"].shape == (16,)


def test_the_factors_of_granite_are_read_and_logits_are_divided():
    factors = {"embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 8.0}
    config = from_hf_config(family("granite", attention_multiplier=0.25, **factors)).config
    assert config.multipliers == Multipliers(embedding=12.0, residual=0.22, logits=0.125)
    assert alike(config).scores == Scores(scale=0.25)
    # the reference's default is 1, not 1 over the root of the head size
    assert alike(from_hf_config(family("granite")).config).scores == Scores(scale=1.0)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, "12"])
def test_an_impossible_factor_of_granite_is_an_error_that_names_the_key(value):
    with pytest.raises(UnsupportedModel, match="logits_scaling: expected a finite number above"):
        from_hf_config(family("granite", logits_scaling=value))


def test_gemma2_is_read_as_published():
    published = {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 144,
        "sliding_window": 100,
        "hidden_activation": "gelu_pytorch_tanh",
        "cache_implementation": "hybrid",
    }
    config = from_hf_config(family("gemma2", **published)).config
    assert alike(config).windows == (100, None, 100)
    assert alike(config).scores == Scores(scale=1 / 12, cap=50.0)
    assert (config.logit_cap, config.norm_offset, alike(config).activation) == (
        30.0,
        1.0,
        "gelu_tanh",
    )
    assert config.multipliers == Multipliers(embedding=8.0)
    assert config.tie_embeddings


def test_gelu_of_gemma_is_its_approximation_only_under_the_old_key():
    options = {"hidden_act": "gelu", "head_dim": 16}
    assert alike(from_hf_config(family("gemma", **options)).config).activation == "gelu_tanh"
    with pytest.raises(UnsupportedModel, match=r"hidden_activation: expected 'gelu_pytorch_tanh'"):
        from_hf_config(family("gemma", **options, hidden_activation="gelu"))


def test_what_gemma2_leaves_out_is_what_the_reference_assumes():
    sizes = {k: v for k, v in family("gemma2").items() if k != "head_dim"}
    config = from_hf_config(sizes).config
    assert (alike(config).head_dim, alike(config).windows[0]) == (256, 4096)
    assert (alike(config).scores, config.logit_cap) == (Scores(scale=1 / 16, cap=50.0), 30.0)
    nulls = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = from_hf_config(family("gemma2", **nulls)).config
    assert (alike(config).scores.cap, config.logit_cap) == (None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act: expected 'gelu_pytorch_tanh'"),
        ({"hidden_activation": "gelu"}, "hidden_activation: expected 'gelu_pytorch_tanh'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: expected False"),
        ({"num_key_value_heads": None}, "num_key_value_heads: expected a number of heads"),
        ({"sliding_window": None}, "sliding_window: expected a size, as some layers"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping: expected a finite number"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types: expected 3 entries"),
    ],
)
def test_what_gemma2_does_not_implement_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        from_hf_config(family("gemma2", **changes))


GEMMA3_ROPES = {
    "old": {"rope_theta": 1e6, "rope_local_base_freq": 2e4,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "new": {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}},
    "by default": {"rope_local_base_freq": 2e4,
                   "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
}  # fmt: skip


@pytest.mark.parametrize("options", GEMMA3_ROPES.values(), ids=GEMMA3_ROPES.keys())
def test_layers_of_gemma3_rotate_by_their_kind(options):
    published = {"sliding_window": 9, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64}
    config = from_hf_config(family("gemma3_text", **published, **options)).config
    full, local = RopeConfig(1e6, LinearScaling(8.0)), RopeConfig(2e4)
    assert alike(config).windows == (9, None, 9)
    assert [layer.attention.rope for layer in config.layers] == [local, full, local]
    assert (alike(config).scores, config.logit_cap, alike(config).qk_norm) == (
        Scores(scale=1 / 8),
        None,
        "head",
    )


def test_five_layers_of_six_slide_a_window_in_gemma3_where_nothing_else_is_said():
    config = from_hf_config(family("gemma3_text", num_hidden_layers=13)).config
    assert alike(config).windows == ((4096,) * 5 + (None,)) * 2 + (4096,)
    assert (alike(config).rope, alike(config).local_rope) == (RopeConfig(1e6), RopeConfig(1e4))
    assert alike(config).head_dim == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected null"),
        ({"_sliding_window_pattern": 3}, "_sliding_window_pattern: expected 6"),
        ({"num_key_value_heads": None}, "num_key_value_heads: expected a number of heads"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
            r"rope_parameters\.factor = 8.0",
        ),
        (
            {
                "rope_local_base_freq": 1e4,
                "rope_parameters": {"sliding_attention": {"rope_theta": 2e4}},
            },
            "sliding_attention.rope_theta: expected the same value as the outer rope_local_base",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "longrope", "factor": 2.0}}},
            "full_attention.rope_type: expected default",
        ),
    ],
)
def test_what_gemma3_does_not_implement_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        from_hf_config(family("gemma3_text", **changes))


def long_rope(rotated: int = 8, **changes: object) -> dict[str, object]:
    factors = {"short_factor": [1.5] * (rotated // 2), "long_factor": [4] * (rotated // 2)}
    return {"type": "longrope"} | factors | changes


ORIGINAL = {"original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "options",
    [
        ORIGINAL | {"rope_scaling": long_rope()},
        ORIGINAL | {"rope_scaling": long_rope(type="su")},
        ORIGINAL | {"rope_parameters": long_rope(**ORIGINAL)},
    ],
    ids=["old", "older", "new"],
)
def test_long_phi3_serves_the_length_of_its_pretraining_by_short_factors(options):
    config = from_hf_config(family("phi3", **options)).config
    factor = math.sqrt(1 + math.log(512 / 128) / math.log(128))
    assert alike(config).rope == RopeConfig(1e4, FactorScaling((1.5,) * 4, factor), rotated=8)
    assert config.max_position == 128


def test_phi3_serves_its_whole_length_where_both_sets_of_factors_are_the_same():
    same = long_rope(long_factor=[1.5] * 4)
    assert from_hf_config(family("phi3", **ORIGINAL, rope_scaling=same)).config.max_position == 512
    assert from_hf_config(family("phi3")).config.max_position == 512


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_phi4_mini_rotates_a_part_of_each_head(where):
    share = {"partial_rotary_factor": 0.75, "rope_theta": 5e5}
    table = long_rope(rotated=12, factor=2.0, attention_factor=1.25)
    options = {"head_dim": 16, **ORIGINAL}
    if where == "outside":
        options |= share | {"rope_scaling": table}
    else:
        options |= {"rope_parameters": table | share}
    config = from_hf_config(family("phi3", **options)).config
    assert alike(config).rope == RopeConfig(5e5, FactorScaling((1.5,) * 6, 1.25), rotated=12)


def test_tensors_of_phi3_are_fused():
    spec = from_hf_config(family("phi3", sliding_window=9))
    parts = {source.parameter: source.parts for source in spec.sources}
    qkv, gate_up = parts["layers.1.attention.qkv"], parts["layers.1.mlp.gate_up"]
    assert {part.tensor for part in qkv} == {"model.layers.1.self_attn.qkv_proj.weight"}
    assert [part.rows for part in qkv] == [(0, 64), (64, 80), (80, 96)]
    assert {part.tensor for part in gate_up} == {"model.layers.1.mlp.gate_up_proj.weight"}
    assert [part.rows for part in gate_up] == [(0, 96), (96, 192)]
    assert alike(spec.config).windows == (9, 9, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": long_rope(type="yarn")}, "rope_type: expected default, longrope or su"),
        ({"rope_scaling": long_rope(rotated=6)}, "short_factor: expected a list of 4 numbers"),
        ({"rope_scaling": long_rope(long_factor=[1, 1, 0, 1])}, "long_factor.2: expected a finite"),
        ({"rope_scaling": long_rope(mscale=1.0)}, r"rope_scaling\.mscale = 1.0"),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor: expected an even number"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor: expected a finite number"),
        (
            ORIGINAL | {"rope_parameters": long_rope(original_max_position_embeddings=64)},
            "embeddings: expected the same value as the outer .*128",
        ),
        ({"lm_head_bias": True}, "lm_head_bias: expected False"),
        ({"full_attn_mod": 2}, "full_attn_mod: expected 1"),
    ],
)
def test_what_phi3_does_not_implement_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        from_hf_config(family("phi3", **changes))


def test_command_r_is_read_as_published():
    config = from_hf_config(family("cohere", use_qk_norm=True, logit_scale=0.25)).config
    assert (config.norm, alike(config).is_parallel, config.tie_embeddings) == ("layer", True, True)
    assert alike(config).qk_norm == "heads"
    assert config.multipliers == Multipliers(logits=0.25)
    plain = from_hf_config(family("cohere")).config
    assert (alike(plain).qk_norm, alike(plain).rope) == (None, RopeConfig(5e5))
    assert plain.multipliers.logits == 0.0625


def test_command_r_stores_rotated_pairs_side_by_side_in_weights_and_norms():
    spec = from_hf_config(family("cohere", use_qk_norm=True))
    parts = {source.parameter: source.parts[0] for source in spec.sources}
    assert parts["layers.0.attention.qkv"].axes == "(k g pair side) d -> d k g (side pair)"
    assert parts["layers.0.attention.key_norm.scale"].axes == "n (pair side) -> (n side pair)"
    assert parts["layers.2.norm.scale"].tensor == "model.layers.2.input_layernorm.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_scale": None}, "logit_scale: expected a number, got None"),
        ({"logit_scale": 0.0}, "logit_scale: expected a finite number above 0"),
        ({"use_qk_norm": 1}, "use_qk_norm: expected true or false"),
        ({"layer_norm_eps": None}, "layer_norm_eps: expected a finite number"),
    ],
)
def test_what_command_r_does_not_implement_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        from_hf_config(family("cohere", **changes))


def test_a_null_window_of_mistral_is_none_and_an_absent_one_is_refused():
    assert alike(from_hf_config(family("mistral", sliding_window=7)).config).windows == (7, 7, 7)
    assert alike(from_hf_config(family("mistral")).config).windows == (None, None, None)
    absent = {key: value for key, value in family("mistral").items() if key != "sliding_window"}
    with pytest.raises(UnsupportedModel, match="sliding_window: expected a size, or null"):
        from_hf_config(absent)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({"sliding_window": 7}, (None, None, None)),
        ({"sliding_window": 7, "use_sliding_window": False}, (None, None, None)),
        ({"sliding_window": 7, "use_sliding_window": True}, (None, None, None)),
        (
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
            (None, 7, 7),
        ),
        (
            {
                "sliding_window": 7,
                "use_sliding_window": True,
                "max_window_layers": 1,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            (7, None, None),
        ),
    ],
)
def test_windows_of_qwen_follow_its_options(name, options, windows):
    assert alike(from_hf_config(family(name, **options)).config).windows == windows


ROPE_SPELLINGS = {
    "default": ({"rope_theta": 5e5}, None),
    "llama3": ({"rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING},
               Llama3Scaling(32.0, 1.0, 4.0, 256)),
    "linear": ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
               LinearScaling(2.0)),
    "yarn": ({"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0,
                                                  "original_max_position_embeddings": 128}},
             YarnScaling(4.0, 128)),
    "yarn-all": ({"rope_theta": 5e5,
                  "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5,
                                   "beta_fast": 16, "beta_slow": 2, "truncate": False}},
                 YarnScaling(4.0, 512, 16.0, 2.0, 1.5, False)),
}  # fmt: skip


@pytest.mark.parametrize(("old", "scaling"), ROPE_SPELLINGS.values(), ids=ROPE_SPELLINGS.keys())
def test_both_spellings_of_rope_mean_the_same(old, scaling):
    table = dict(old.get("rope_scaling") or {"rope_type": "default"})
    if "type" in table:
        table["rope_type"] = table.pop("type")
    new = {"rope_parameters": table | {"rope_theta": old["rope_theta"]}}
    assert alike(from_hf_config(LLAMA | old).config).rope == RopeConfig(5e5, scaling)
    assert alike(from_hf_config(LLAMA | new).config).rope == RopeConfig(5e5, scaling)


@pytest.mark.parametrize(
    "table",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"type": "mrope", "mrope_section": [2, 3, 3]},
        {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_kinds_that_change_no_position_of_a_text_are_the_plain_rotation(key, table):
    """Dynamic scaling begins past the longest sequence; the axes of images are equal in texts."""
    assert alike(from_hf_config(LLAMA | {key: table}).config).rope == RopeConfig()


@pytest.mark.parametrize("kind", ["longrope", "su", "proportional", "ntk-by-parts", ""])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_other_rope_types_are_refused_by_name(key, kind):
    table = {"rope_type": kind, "factor": 2.0}
    with pytest.raises(UnsupportedModel, match=f"{key}.rope_type: expected .*got '{kind}'"):
        from_hf_config(LLAMA | {key: table})


def fp8(**changes):
    """Return DeepSeek-V3's published option, with changes."""
    published = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    return {"quantization_config": published | changes}


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        (fp8(), BlockFloat8(128, 128)),
        (fp8(scale_fmt="ue8m0", weight_block_size=[64, 32]), BlockFloat8(64, 32)),
        (fp8(modules_to_not_convert=["lm_head"]), BlockFloat8(128, 128)),
        (
            {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}},
            Mxfp4(),
        ),
    ],
)
def test_the_published_quantisation_is_read_beside_any_family(option, expected):
    assert read_quantisation(ConfigReader(LLAMA | option)) == expected
    assert from_hf_config(LLAMA | option) == from_hf_config(LLAMA)


REFUSED = {
    "chunks of a family without": ({"attention_chunk_size": 8}, "attention_chunk_size: expected n"),
    "no causal mask": ({"is_causal": False}, "is_causal: expected True"),
    "a null in place of a causal mask": ({"is_causal": None}, "is_causal: expected True, .*None"),
    "layers of their own": ({"per_layer_config": {"0": {}}}, "per_layer_config: expected {}"),
    "windows by layer": (
        {"layer_types": ["sliding_attention"] * 3},
        "layer_types: expected .'full_attention', 'full_attention', 'full_attention'.",
    ),
    "a window of another name": (
        {"sliding_window_size": 64},
        "sliding_window_size: expected None, the value of sliding_window, got 64",
    ),
    "rope key of another kind": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}},
        "rope_scaling.mscale = 1.0",
    ),
    "rope by layer type": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters.full_attention",
    ),
    "both spellings": (
        {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "default"}},
        "rope_scaling: expected no second spelling",
    ),
    "contradicting thetas": (
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
        "rope_parameters.rope_theta: expected the same value",
    ),
    "contradicting types": (
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
        "rope_scaling.rope_type: expected the same value",
    ),
    "quantised otherwise": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "quantization_config.quant_method: expected fp8 or mxfp4 or gptq or awq or compressed-"
        "tensors, .*plain weights first, got 'bitsandbytes'",
    ),
    "quantised without a method": ({"quantization_config": {}}, "quant_method: expected a string"),
    "quantised as text": ({"quantization_config": "fp8"}, "quantization_config: expected a table"),
    "float8 of another kind": (fp8(fmt="e5m2"), "quantization_config.fmt: expected 'e4m3'"),
    "float8 with static activations": (
        fp8(activation_scheme="static"),
        "activation_scheme: expected 'dynamic'.*plain weights first",
    ),
    "float8 with four-bit experts": (fp8(expert_dtype="fp4"), "expert_dtype: expected 'fp8'"),
    "one scale a tensor": (
        fp8(weight_block_size=None),
        "weight_block_size: expected a list of two integers; convert .*got no such key",
    ),
    "blocks of one size": (fp8(weight_block_size=[128]), "expected a list of 2 integers"),
    "blocks of no size": (fp8(weight_block_size=[128, 0]), "weight_block_size.1: expected an int"),
    "blocks of half a row": (fp8(weight_block_size=[0.5, 1]), "weight_block_size.0: expected an"),
    "unknown option of float8": (fp8(zeta=1), "got quantization_config.zeta = 1"),
    "option of another method": (
        {"quantization_config": {"quant_method": "mxfp4", "weight_block_size": [1, 32]}},
        "got quantization_config.weight_block_size",
    ),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
    "architecture": (
        {"architectures": ["LlamaForTokenClassification"]},
        "architectures: expected .'LlamaForCausalLM'",
    ),
    "model type": ({"model_type": "falcon"}, "model_type: expected one of llama, .*'falcon'"),
    "no model type": ({"model_type": None}, "model_type: expected one of"),
    "window of a family without": ({"sliding_window": 64}, "sliding_window: expected null"),
    "interleaved rope": ({"rope_interleaved": True}, "rope_interleaved: expected False"),
    "encoder": ({"is_encoder_decoder": True}, "is_encoder_decoder: expected False"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_implemented_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        from_hf_config(LLAMA | changes)


LIES = {
    "layers": ("num_hidden_layers", 10**9),
    "no layers": ("num_hidden_layers", 0),
    "layers as text": ("num_hidden_layers", "3"),
    "layers as float": ("num_hidden_layers", 3.0),
    "layers as flag": ("num_hidden_layers", True),
    "no heads": ("num_attention_heads", 0),
    "heads not a multiple": ("num_attention_heads", 7),
    "head_dim does not divide": ("hidden_size", 65),
    "odd head_dim": ("head_dim", 7),
    "huge head_dim": ("head_dim", 10**6),
    "negative vocab": ("vocab_size", -1),
    "huge vocab": ("vocab_size", 2**40),
    "nan theta": ("rope_theta", math.nan),
    "infinite theta": ("rope_theta", math.inf),
    "theta of one": ("rope_theta", 1.0),
    "theta as text": ("rope_theta", "1e4"),
    "nan epsilon": ("rms_norm_eps", math.nan),
    "negative epsilon": ("rms_norm_eps", -1e-5),
    "negative position": ("max_position_embeddings", -5),
    "position beyond int32": ("max_position_embeddings", 2**31),
    "tie as number": ("tie_word_embeddings", 1),
    "bias as text": ("attention_bias", "false"),
    "rope as list": ("rope_scaling", [1.0]),
    "architectures as text": ("architectures", "LlamaForCausalLM"),
    "null hidden size": ("hidden_size", None),
}


LIMITS = {
    "num_hidden_layers": MAX_LAYERS,
    "vocab_size": MAX_VOCAB,
    "hidden_size": MAX_EMBED,
    "intermediate_size": MAX_MLP,
    "head_dim": MAX_HEAD_DIM,
    "max_position_embeddings": MAX_POSITION,
}


@pytest.mark.parametrize(("key", "limit"), LIMITS.items(), ids=LIMITS.keys())
def test_a_size_is_read_up_to_its_limit_and_not_beyond(key, limit):
    from_hf_config(LLAMA | {key: limit})
    from_hf_config(LLAMA | {key: 2 if key == "head_dim" else 16})
    for value in (limit + 1, 0):
        with pytest.raises(UnsupportedModel, match=f"^{key}: expected an integer from 1 to "):
            from_hf_config(LLAMA | {key: value})


def test_heads_are_read_up_to_their_limit_and_not_beyond():
    heads = {"num_attention_heads": MAX_HEADS, "num_key_value_heads": MAX_HEADS, "head_dim": 2}
    assert alike(from_hf_config(LLAMA | heads).config).num_kv_heads == MAX_HEADS
    for key in ("num_attention_heads", "num_key_value_heads"):
        with pytest.raises(UnsupportedModel, match=f"^{key}: expected an integer from 1 to 4096"):
            from_hf_config(LLAMA | heads | {key: MAX_HEADS + 1})


@pytest.mark.parametrize(("key", "value"), LIES.values(), ids=LIES.keys())
def test_a_lie_is_an_error_that_names_the_key(key, value):
    with pytest.raises(UnsupportedModel, match=f"^{key}: expected .*got {re.escape(repr(value))}"):
        from_hf_config(LLAMA | {key: value})


@pytest.mark.parametrize(
    "table",
    [
        {"rope_type": "linear", "factor": math.nan},
        {"rope_type": "linear", "factor": 0.5},
        {"rope_type": "linear"},
        LLAMA3_SCALING | {"high_freq_factor": 0.5},
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
    ],
    ids=str,
)
def test_impossible_rope_numbers_are_errors_that_name_the_key(table):
    with pytest.raises(UnsupportedModel, match=r"^rope_scaling\.\w+: expected"):
        from_hf_config(LLAMA | {"rope_scaling": table})


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
    ],
)
def test_a_missing_size_is_an_error_that_names_the_key(key):
    with pytest.raises(UnsupportedModel, match=f"^{key}: expected .*got no such key"):
        from_hf_config({k: v for k, v in LLAMA.items() if k != key})


def test_layer_types_must_match_the_layers_and_the_window():
    for kinds in (["full_attention"], ["full_attention"] * 2 + ["sliding_attention"]):
        with pytest.raises(UnsupportedModel, match="layer_types: expected 3 entries of"):
            from_hf_config(family("qwen3", layer_types=kinds))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_model_that_is_untied_is_the_one_that_was_published_so(config):
    tied = from_hf_config(config | {"tie_word_embeddings": True})
    assert tied.config.tie_embeddings
    assert tied.untied() == from_hf_config(config | {"tie_word_embeddings": False})


def test_a_tied_head_and_old_frequency_tensors_are_ignored_by_name():
    tied = from_hf_config(LLAMA | {"tie_word_embeddings": True}).ignored_tensors
    untied = from_hf_config(LLAMA).ignored_tensors
    assert set(tied) - set(untied) == {"lm_head.weight"}
    assert "model.layers.2.self_attn.rotary_emb.inv_freq" in untied
