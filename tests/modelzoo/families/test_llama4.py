"""Llama 4's config.json, alone and as the text part of the published models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import alike
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.families.mapping import TensorPrefix
from noria.modelzoo.families.registry import UnsupportedModel, from_hf_config
from noria.modelzoo.layer_config import Chunk
from noria.modelzoo.moe_config import MoeConfig, Routing
from noria.modelzoo.rope_config import Llama3Scaling, NoRope, RopeConfig
from noria.runtime.checkpoint import open_model
from noria.runtime.checkpoint.description import describe
from noria.runtime.checkpoint.loader import load_params

TEXT = {
    "model_type": "llama4_text",
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 24,
    "intermediate_size_mlp": 56,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
WHOLE = {
    "model_type": "llama4",
    "architectures": ["Llama4ForConditionalGeneration"],
    "text_config": TEXT,
    "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 32},
    "boi_token_index": 98,
    "eoi_token_index": 99,
    "image_token_index": 100,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SCOUT_ROPE = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def test_a_file_that_says_little_means_what_the_reference_means():
    config = from_hf_config(TEXT).config
    chunk = Chunk(8192)
    assert alike(config).windows == (chunk, chunk, chunk, None, chunk)
    assert alike(config).rope == NoRope(0.1, 8192)
    assert alike(config).local_rope == RopeConfig(5e5, norm_epsilon=1e-5)
    routing = Routing(16, 1, "sigmoid", is_normalized=False, weighs_input=True)
    assert config.moe == MoeConfig(routing, 24, shared_mlp=24)
    assert (alike(config).head_dim, alike(config).qkv_bias) == (10, False)
    without_head_dim = {key: value for key, value in TEXT.items() if key != "head_dim"}
    assert alike(from_hf_config(without_head_dim).config).head_dim == 128


def test_scout_rotates_by_a_step_and_maverick_alternates_without_a_norm_of_heads():
    scout = from_hf_config(TEXT | {"rope_scaling": SCOUT_ROPE, "rope_theta": 5e5}).config
    scaling = Llama3Scaling(16.0, 1.0, 1.0, 8192)
    assert alike(scout).local_rope == RopeConfig(5e5, scaling, norm_epsilon=1e-5)
    options = {"use_qk_norm": False, "interleave_moe_layer_step": 2, "rope_scaling": None}
    maverick = from_hf_config(TEXT | options).config
    assert alike(maverick).local_rope == RopeConfig(5e5)
    assert maverick.moe is not None
    assert maverick.sparse_layers == (1, 3) and alike(maverick).mlp == 56


@pytest.mark.parametrize(
    ("options", "sees_chunks"),
    [
        ({"no_rope_layers": [1, 0, 0, 1, 0]}, (1, 0, 0, 1, 0)),
        ({"no_rope_layers": [], "no_rope_layer_interval": 2}, (1, 0, 1, 0, 1)),
        ({"no_rope_layers": None, "no_rope_layer_interval": 1}, (0, 0, 0, 0, 0)),
        ({"layer_types": ["chunked_attention"] * 3 + ["full_attention", "chunked_attention"]},
         (1, 1, 1, 0, 1)),
    ],
    ids=str,
)  # fmt: skip
def test_layers_that_rotate_see_chunks_and_the_others_all(options, sees_chunks):
    config = from_hf_config(TEXT | options | {"attention_chunk_size": 6}).config
    assert alike(config).windows == tuple(Chunk(6) if chunk else None for chunk in sees_chunks)
    rotates = [isinstance(layer.attention.rope, RopeConfig) for layer in config.layers]
    assert rotates == [bool(chunk) for chunk in sees_chunks]


@pytest.mark.parametrize(
    ("options", "sparse"),
    [
        ({"moe_layers": [0, 3]}, (0, 3)),
        ({"moe_layers": None, "interleave_moe_layer_step": 3}, (2,)),
        ({"moe_layers": []}, ()),
        ({"interleave_moe_layer_step": 6}, ()),
    ],
    ids=str,
)
def test_sparse_layers_are_listed_or_come_in_steps(options, sparse):
    assert from_hf_config(TEXT | options).config.sparse_layers == sparse


REFUSALS = {
    "chunks of no size": ({"attention_chunk_size": None}, "attention_chunk_size: expected a size"),
    "too few layers": ({"no_rope_layers": [1, 1]}, "no_rope_layers: expected 5 entries of 0 and 1"),
    "no flag": ({"no_rope_layers": [2] * 5}, r"no_rope_layers\.0: expected an integer from 0 to 1"),
    "chunks without rotation": (
        {"layer_types": ["chunked_attention"] * 5},
        "layer_types: expected chunks in the layers with rotation",
    ),
    "no such layer": ({"moe_layers": [1, 5]}, r"moe_layers\.1: expected an integer from 0 to 4"),
    "more experts than there are": (
        {"num_local_experts": 2, "num_experts_per_tok": 3},
        "num_experts_per_tok: expected an integer from 1 to 2, got 3",
    ),
    "a number for a flag": (
        {"attn_temperature_tuning": 4},
        "attn_temperature_tuning: expected true or false, got 4",
    ),
    "no interval": ({"floor_scale": 0}, "floor_scale: expected an integer from 1"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_cannot_be_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModel, match=f"^{message}"):
        from_hf_config(TEXT | changes)


def test_the_text_part_is_the_same_model_with_longer_names():
    text, part = from_hf_config(TEXT), from_hf_config(WHOLE)
    assert (part.family, part.config) == (text.family, text.config)
    assert part.sources == tuple(
        source.with_prefix(TensorPrefix("", "language_model.")) for source in text.sources
    )
    assert part.arranged(part.arrangement).sources == part.sources
    assert part.ignored_tensors[0] == "language_model.model.rotary_emb.inv_freq"


WHOLE_REFUSALS = {
    "another architecture": ({"architectures": ["Llama4ForCausalLM"]}, "architectures: expected"),
    "another text part": (
        {"text_config": TEXT | {"model_type": "llama"}},
        "text_config.model_type: expected 'llama4_text'",
    ),
    "no text part": ({"text_config": None}, "text_config.model_type: expected a string"),
    "an option of text that is not there": (
        {"text_config": TEXT | {"sliding_window": 3}},
        r"text_config\.sliding_window: expected null",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WHOLE_REFUSALS.values(), ids=WHOLE_REFUSALS.keys())
def test_of_the_whole_model_what_is_not_implemented_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModel, match=f"^{message}"):
        from_hf_config(WHOLE | changes)


def test_unknown_keys_of_both_tables_are_noted():
    text = TEXT | {"logit_cap": 3}
    spec = from_hf_config(WHOLE | {"text_config": text, "audio_config": {"layers": 2}})
    assert spec.ignored_keys == ("text_config.logit_cap = 3", "audio_config = {'layers': 2}")


@pytest.mark.reference
def test_the_text_part_answers_text_as_the_whole_model_does(tmp_path):
    prompt = np.random.default_rng(0).integers(0, 98, 13)
    expected = _whole_logprobs(tmp_path, prompt)
    with open_model(str(tmp_path)) as files:
        definition = AbstractModel(files.spec.config)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = definition.abstract_parameters(jnp.float32)
        parameters = load_params(files.spec, files.tensors, abstract, device)
        assert "window=chunks of 4" in describe(files)
    decoder = definition.bind(parameters)

    @jax.jit
    def logprobs(tokens_BT):
        x_BTD, _ = decoder.forward(tokens_BT, jnp.array([len(prompt)]))
        return jax.nn.log_softmax(decoder.logits(x_BTD)[0])

    ours = logprobs(jnp.asarray(prompt, jnp.int32)[None])
    np.testing.assert_allclose(ours, expected, rtol=0, atol=FLOAT32_MODEL_LOGPROB)


def _whole_logprobs(directory, prompt: np.ndarray) -> np.ndarray:
    """Save a small random model of text and images; return log-probabilities of a text prompt."""
    import torch
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    torch.manual_seed(0)
    options = {"attention_chunk_size": 4, "floor_scale": 3, "num_local_experts": 3}
    vision = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    vision |= {"hidden_size": 32, "intermediate_size": 128, "vision_output_dim": 64}
    vision |= {"projector_input_dim": 64, "projector_output_dim": 64}
    config = Llama4Config(
        text_config=TEXT | options | {"initializer_range": 0.2},
        vision_config=vision,
        image_token_index=100,
    )
    config._attn_implementation = "eager"
    model = Llama4ForConditionalGeneration(config).float().eval()
    model.save_pretrained(directory)
    with torch.no_grad():
        logits = model(torch.tensor(prompt[None])).logits[0]
    return torch.log_softmax(logits, dim=-1).numpy()
