"""GGUF metadata of every family: keys, tensor names, and the order of rotated rows."""

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from alike import alike, changed
from memory_tensors import Arrays

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.config import Multipliers
from noria.modelzoo.families import hugging_face
from noria.modelzoo.families.registry import UnsupportedModel, from_gguf_metadata, from_hf_config
from noria.modelzoo.families.sources import parameter_sources
from noria.modelzoo.layer_config import Scores
from noria.modelzoo.rope_config import FactorScaling, LinearScaling, RopeConfig, YarnScaling
from noria.runtime.checkpoint.axis_pattern import AxisPattern
from noria.runtime.checkpoint.loader import read_parameter

SIZES = {
    "block_count": 2,
    "context_length": 256,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "rope.freq_base": 100000.0,
    "attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "rope.dimension_count": 8,
    "vocab_size": 101,
}
UNTIED = ("token_embd.weight", "output.weight")


def metadata(architecture: str = "llama", **changes: object) -> dict[str, object]:
    """Return metadata with `changes`: two underscores stand for a dot, None removes a key."""
    values = SIZES | {key.replace("__", "."): value for key, value in changes.items()}
    own = {f"{architecture}.{key}": value for key, value in values.items() if value is not None}
    general = {"general.architecture": architecture, "general.file_type": 0}
    return general | own | {"tokenizer.ggml.tokens": ["a"] * 99}


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "qwen3", "olmo2", "granite", "gemma2", "gemma3"]
)
@pytest.mark.parametrize("tensor_names", [UNTIED, UNTIED[:1]], ids=["untied", "tied"])
def test_sources_fill_exactly_the_parameters_of_the_decoder(architecture, tensor_names):
    spec = from_gguf_metadata(metadata(architecture), tensor_names)
    filled = [source.parameter for source in spec.sources]
    assert sorted(filled) == sorted(AbstractModel(spec.config).abstract_parameters(jnp.float32))
    assert spec.config.tie_embeddings == (tensor_names == UNTIED[:1])


def test_biases_are_there_when_their_tensors_are():
    names = [f"blk.0.{name}.bias" for name in ("attn_q", "attn_output", "ffn_down")]
    spec = from_gguf_metadata(metadata(), (*UNTIED, *names))
    assert (
        alike(spec.config).qkv_bias,
        alike(spec.config).output_bias,
        alike(spec.config).mlp_bias,
    ) == (True,) * 3
    filled = [source.parameter for source in spec.sources]
    assert sorted(filled) == sorted(AbstractModel(spec.config).abstract_parameters(jnp.float32))


def test_llama_stores_rotated_pairs_side_by_side_and_qwen_does_not():
    """For a head of 8 rows, the converter interleaves the halves: row 1 is the former row 4."""
    K, G, H = 2, 2, 8
    rows = np.arange(K * G * H, dtype=np.float32)
    interleaved = rows.reshape(K * G, 2, H // 2).swapaxes(1, 2).reshape(-1)
    np.testing.assert_array_equal(interleaved[:8], [0, 4, 1, 5, 2, 6, 3, 7])
    for architecture, stored in (("llama", interleaved), ("qwen2", rows)):
        names = (*UNTIED, "blk.0.attn_q.bias")
        spec = from_gguf_metadata(metadata(architecture), names)
        tensors = Arrays({
            "blk.1.attn_q.weight": np.repeat(stored[:, None], 3, axis=1),
            "blk.1.attn_k.weight": np.repeat(stored[: K * H, None], 3, axis=1),
            "blk.1.attn_q.bias": stored,
        })  # fmt: skip
        sources = {source.parameter: source for source in spec.sources}
        query, key, _ = sources["layers.1.attention.qkv"].parts
        query_DKGH = AxisPattern.of(query).read(tensors, query.tensor)
        key_DK1H = AxisPattern.of(key).read(tensors, key.tensor)
        np.testing.assert_array_equal(query_DKGH[2], rows.reshape(K, G, H))
        np.testing.assert_array_equal(key_DK1H[2, :, 0], rows[: K * H].reshape(K, H))
        bias = sources["layers.1.attention.qkv_bias"].parts[0]
        bias_KGH = AxisPattern.of(bias).read(tensors, bias.tensor)
        np.testing.assert_array_equal(bias_KGH, rows.reshape(K, G, H))


def test_the_factors_of_granite_are_read_and_logits_are_divided():
    factors = {"embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 8.0}
    config = from_gguf_metadata(
        metadata("granite", attention__scale=0.125, **factors), UNTIED
    ).config
    assert config.multipliers == Multipliers(embedding=12.0, residual=0.25, logits=0.125)
    assert alike(config).scores == Scores(scale=0.125)
    assert alike(from_gguf_metadata(metadata("granite"), UNTIED).config).scores == Scores()


def test_gemma2_is_read_as_llama_cpp_does():
    caps = {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0}
    read = metadata("gemma2", attention__sliding_window=9, embedding_length=64, **caps)
    config = from_gguf_metadata(read | {"gemma2.rope.dimension_count": 16}, UNTIED[:1]).config
    assert alike(config).windows == (9, None)
    assert (alike(config).scores, config.logit_cap) == (Scores(cap=40.0), 20.0)
    assert config.multipliers == Multipliers(embedding=8.0)
    assert (config.norm_offset, alike(config).activation) == (0.0, "gelu_tanh")
    large = from_gguf_metadata(metadata("gemma2", block_count=46), UNTIED[:1]).config
    assert alike(large).scores == Scores(scale=8**-0.5, cap=50.0)


def test_gemma3_is_read_as_llama_cpp_does():
    read = metadata("gemma3", attention__sliding_window=9, block_count=7)
    config = from_gguf_metadata(read, UNTIED[:1]).config
    assert alike(config).windows == (9, 9, 9, 9, 9, None, 9)
    assert (alike(config).rope, alike(config).local_rope) == (RopeConfig(1e5), RopeConfig(1e4))
    assert (alike(config).scores, config.logit_cap, alike(config).qk_norm) == (
        Scores(),
        None,
        "head",
    )
    assert alike(from_gguf_metadata(metadata("gemma3"), UNTIED[:1]).config).windows == (None, None)
    changed = {"attention__sliding_window_pattern": 2, "rope__freq_base_swa": 3e4}
    read = metadata("gemma3", attention__sliding_window=9, **changed)
    config = from_gguf_metadata(read, UNTIED[:1]).config
    assert (alike(config).windows, alike(config).local_rope) == ((9, None), RopeConfig(3e4))


@pytest.mark.parametrize(("num_layers", "has_qk_norm"), [(40, False), (64, True)])
def test_command_r_is_read_as_llama_cpp_does(num_layers, has_qk_norm):
    norms = {"attention__layer_norm_rms_epsilon": None, "attention__layer_norm_epsilon": 1e-5}
    read = metadata("command-r", **norms, logit_scale=0.0625, block_count=num_layers)
    spec = from_gguf_metadata(read, UNTIED[:1])
    assert spec.config.multipliers == Multipliers(logits=0.0625)
    assert (spec.config.norm, alike(spec.config).is_parallel) == ("layer", True)
    assert alike(spec.config).qk_norm == ("heads" if has_qk_norm else None)
    filled = [source.parameter for source in spec.sources]
    assert sorted(filled) == sorted(AbstractModel(spec.config).abstract_parameters(jnp.float32))


def test_norms_after_attention_and_mlp_have_the_names_of_llama_cpp():
    spec = from_gguf_metadata(metadata("olmo2"), UNTIED)
    tensors = {source.parameter: source.parts[0].tensor for source in spec.sources}
    assert tensors["layers.1.attention_post_norm.scale"] == "blk.1.post_attention_norm.weight"
    assert tensors["layers.1.mlp_post_norm.scale"] == "blk.1.post_ffw_norm.weight"


def test_values_and_outputs_are_never_permuted():
    spec = from_gguf_metadata(metadata(), UNTIED)
    hf = parameter_sources(spec.config, hugging_face.NAMES)
    pairs = {s.parameter: (s, t) for s, t in zip(spec.sources, hf, strict=True)}
    ours, theirs = pairs["layers.0.attention.qkv"]
    assert ours.parts[2].axes == theirs.parts[2].axes
    ours, theirs = pairs["layers.0.attention.output"]
    assert ours.parts[0].axes == theirs.parts[0].axes


def test_a_window_of_mistral_is_for_all_layers():
    spec = from_gguf_metadata(metadata(attention__sliding_window=16), UNTIED)
    assert alike(spec.config).windows == (16, 16)
    spec = from_gguf_metadata(metadata(attention__sliding_window=0), UNTIED)
    assert alike(spec.config).windows == (None, None)


def test_sizes_follow_the_keys_and_the_vocabulary():
    lengths = {"attention__key_length": 12, "attention__value_length": 12}
    spec = from_gguf_metadata(metadata("qwen3", **lengths, rope__dimension_count=None), UNTIED)
    assert (alike(spec.config).head_dim, spec.config.vocab_size) == (12, 101)
    assert from_gguf_metadata(metadata(vocab_size=None), UNTIED).config.vocab_size == 99


def test_numpy_scalars_are_numbers():
    spec = from_gguf_metadata(
        metadata(block_count=np.uint32(2), rope__freq_base=np.float32(1e4)), UNTIED
    )
    assert alike(spec.config).rope == RopeConfig(1e4)


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope__scaling__type": "none"}, None),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}, LinearScaling(2.0)),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 64,
            },
            YarnScaling(4.0, 64),
        ),
    ],
)
def test_rope_scaling_follows_the_keys(keys, scaling):
    assert alike(from_gguf_metadata(metadata(**keys), UNTIED).config).rope == RopeConfig(
        1e5, scaling
    )


def test_factors_of_llama_3_1_are_read_from_their_tensor():
    names = (*UNTIED, "rope_freqs.weight")
    factors = np.array([1.0, 1.0, 2.5, 8.0], np.float32)
    spec = from_gguf_metadata(metadata(), names, {"rope_freqs.weight": factors}.__getitem__)
    assert alike(spec.config).rope.scaling == FactorScaling((1.0, 1.0, 2.5, 8.0))
    assert "rope_freqs.weight" in spec.ignored_tensors


@pytest.mark.parametrize("factors", [[1.0, 2.0], [1.0, 1.0, 0.0, 1.0], [1.0, 1.0, math.nan, 1.0]])
def test_impossible_factors_are_refused(factors):
    with pytest.raises(UnsupportedModel, match="expected 4 finite positive factors"):
        from_gguf_metadata(metadata(), (*UNTIED, "rope_freqs.weight"), lambda _: factors)


REFUSED = {
    "architecture": ("gpt2", {}, "general.architecture: expected one of llama, qwen2, qwen2moe"),
    "experts": ("qwen2", {"expert_count": 8}, "qwen2.expert_count: expected 0"),
    "unknown key": ("llama", {"logit_scale": 2.0}, "llama.logit_scale = 2.0"),
    "window of qwen": ("qwen2", {"attention__sliding_window": 8}, "qwen2.attention.sliding_window"),
    "partial rotary": ("llama", {"rope__dimension_count": 4}, "llama.rope.dimension_count"),
    "value length": ("qwen3", {"attention__value_length": 4}, "qwen3.attention.value_length"),
    "longrope": ("llama", {"rope__scaling__type": "longrope"}, "llama.rope.scaling.type"),
    "layers": ("llama", {"block_count": 10**9}, "llama.block_count: expected an integer"),
    "heads": ("llama", {"attention__head_count": 0}, "llama.attention.head_count: expected"),
    "heads by layer": ("llama", {"attention__head_count": [4, 4]}, "llama.attention.head_count: "),
    "theta": ("llama", {"rope__freq_base": math.nan}, "llama.rope.freq_base: expected a finite"),
    "no size": ("llama", {"embedding_length": None}, "llama.embedding_length: .*no such key"),
}


@pytest.mark.parametrize(
    ("architecture", "changes", "message"), REFUSED.values(), ids=REFUSED.keys()
)
def test_what_is_not_implemented_is_refused_by_name(architecture, changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        from_gguf_metadata(metadata(architecture, **changes), UNTIED)


LATENT = {
    "attention__head_count_kv": 4,
    "attention__kv_lora_rank": 6,
    "attention__q_lora_rank": 7,
    "attention__key_length": 9,
    "attention__value_length": 3,
    "rope__dimension_count": 4,
    "leading_dense_block_count": 1,
    "expert_feed_forward_length": 5,
    "expert_shared_count": 2,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
}
NEWER_LATENT = LATENT | {
    "attention__head_count_kv": 1,
    "attention__key_length": 10,
    "attention__value_length": 6,
    "attention__key_length_mla": 9,
    "attention__value_length_mla": 3,
}
YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 40.0,
    "rope__scaling__original_context_length": 32,
    "rope__scaling__yarn_log_multiplier": 0.0707,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "rope_theta": 100000.0,
    "rms_norm_eps": SIZES["attention.layer_norm_rms_epsilon"],
    "vocab_size": 101,
    "kv_lora_rank": 6,
    "q_lora_rank": 7,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 5,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
SPLIT = (*UNTIED, "blk.0.attn_k_b.weight")


@pytest.mark.parametrize("sizes", [LATENT, NEWER_LATENT], ids=["older", "newer"])
def test_metadata_of_deepseek_mean_what_its_config_json_means(sizes):
    """The exception is the epsilon of latents' norms, which GGUF does not have."""
    config = from_gguf_metadata(metadata("deepseek2", **sizes, **YARN), UNTIED).config
    published = from_hf_config(DEEPSEEK_V3).config
    assert alike(config).scores.scale == pytest.approx(alike(published).scores.scale)
    latent = replace(alike(published).latent, norm_epsilon=published.norm_epsilon)
    assert changed(config, scores=alike(published).scores) == changed(published, latent=latent)


def random_attention() -> Arrays:
    """Return the matrices of a layer's latent attention, with DeepSeek-V3's published names."""
    rng = np.random.default_rng(0)
    heads = {"q_b_proj": (36, 7), "kv_b_proj": (32, 6), "o_proj": (32, 12)}
    down = {"q_a_proj": (7, 32), "kv_a_proj_with_mqa": (10, 32)}
    prefix = "model.layers.1.self_attn"
    return Arrays({
        f"{prefix}.{name}.weight": rng.normal(size=shape) for name, shape in (heads | down).items()
    })  # fmt: skip


@pytest.mark.parametrize("is_split", [False, True], ids=["kv_b", "k_b and v_b"])
def test_latent_attention_of_a_gguf_file_is_that_of_the_directory_it_was_made_from(is_split):
    """Newer converters split the matrix for keys and values, and transpose the part for keys."""
    published = from_hf_config(DEEPSEEK_V3)
    tensors = random_attention()
    renamed = {
        "q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b", "kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "kv_b_proj": "attn_kv_b", "o_proj": "attn_output",
    }  # fmt: skip
    arrays = {
        f"blk.1.{renamed[name.split('.')[-2]]}.weight": x for name, x in tensors.arrays.items()
    }
    if is_split:
        both_NHI = arrays.pop("blk.1.attn_kv_b.weight").reshape(4, 8, 6)
        arrays["blk.1.attn_k_b.weight"] = both_NHI[:, :5].transpose(0, 2, 1)
        arrays["blk.1.attn_v_b.weight"] = both_NHI[:, 5:]
    sizes = NEWER_LATENT if is_split else LATENT
    converted = from_gguf_metadata(
        metadata("deepseek2", **sizes, **YARN), SPLIT if is_split else UNTIED
    )
    shapes = AbstractModel(published.config).abstract_parameters(jnp.float32)
    names = ("query", "query_down", "latent_down", "key_up", "value_up", "output")
    for name in (f"layers.1.attention.{name}" for name in names):
        shape = shapes[name].shape
        expected, got = (
            read_parameter(source, held, (slice(None),) * len(shape), shape, np.dtype("f4"))
            for spec, held in ((published, tensors), (converted, Arrays(arrays)))
            for source in spec.sources
            if source.parameter == name
        )
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("names", [UNTIED, SPLIT], ids=["kv_b", "k_b and v_b"])
def test_sources_of_deepseek_fill_exactly_the_parameters_of_the_decoder(names):
    spec = from_gguf_metadata(metadata("deepseek2", **NEWER_LATENT), names)
    filled = [source.parameter for source in spec.sources]
    assert sorted(filled) == sorted(AbstractModel(spec.config).abstract_parameters(jnp.float32))


def test_a_file_without_a_gating_function_scores_by_softmax():
    """Files of DeepSeek-V2 are like this; they also have no groups in GGUF."""
    no_keys = dict.fromkeys((k for k in LATENT if "group" in k or "gating" in k), None)
    config = from_gguf_metadata(metadata("deepseek2", **LATENT | no_keys), UNTIED).config
    assert (config.moe.routing.scoring, config.moe.routing.groups) == ("softmax", None)
    assert not config.moe.routing.has_choice_bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention__key_length": 11}, "attention.key_length: expected 10"),
        ({"attention__head_count_kv": 4}, "attention.head_count_kv: expected 1"),
        ({"attention__key_length_mla": 4}, "attention.key_length_mla: expected more than rope"),
        ({"expert_gating_func": 3}, "expert_gating_func: expected an integer from 1 to 2"),
        ({"expert_gating_func": 1}, "expert_group_count: expected 1, the only one implemented"),
        ({"expert_group_count": 3}, "expert_group_count: expected a divisor of expert_count"),
        (YARN | {"rope__scaling__yarn_log_multiplier": None}, "yarn_log_multiplier: expected a"),
    ],
    ids=str,
)
def test_metadata_of_deepseek_that_contradict_each_other_are_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        from_gguf_metadata(metadata("deepseek2", **NEWER_LATENT | changes), UNTIED)
