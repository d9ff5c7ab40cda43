"""Families with experts: their config.json, their GGUF metadata, and their tensors."""

import itertools

import jax.numpy as jnp
import pytest
from alike import alike

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.config import Multipliers
from noria.modelzoo.families import gguf, hugging_face
from noria.modelzoo.families.registry import (
    FAMILIES,
    UnsupportedModel,
    from_gguf_metadata,
    from_hf_config,
)
from noria.modelzoo.layer_config import Scores
from noria.modelzoo.moe_config import MoeConfig, Routing
from noria.modelzoo.rope_config import RopeConfig

SHARED = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
OWN = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24},
    "olmoe": {"num_experts": 4},
    "granitemoe": {"num_local_experts": 4},
}
ALL = (True,) * 4


def read(family: str, **changes: object):
    return from_hf_config({"model_type": family, **SHARED, **OWN[family], **changes})


EXPECTED = {
    "mixtral": MoeConfig(Routing(4, 2), 48),
    "qwen2_moe": MoeConfig(
        Routing(4, 2, is_normalized=False), 24, shared_mlp=40, has_shared_gate=True
    ),
    "qwen3_moe": MoeConfig(Routing(4, 2, is_normalized=False), 24),
    "olmoe": MoeConfig(Routing(4, 2, is_normalized=False), 48),
    "granitemoe": MoeConfig(Routing(4, 2, "softmax_of_chosen"), 48),
}


@pytest.mark.parametrize("family", OWN)
def test_a_mixture_is_read_as_the_reference_does(family):
    assert read(family).config.moe == EXPECTED[family]


@pytest.mark.parametrize("family", OWN)
def test_the_number_of_experts_has_two_names(family):
    other = {"num_experts": None, "num_local_experts": 4}
    assert read(family, **other).config == read(family).config
    assert read(family, num_experts=4, num_local_experts=4).config == read(family).config
    message = "num_experts: expected the same number as num_local_experts, got 5"
    with pytest.raises(UnsupportedModel, match=message):
        read(family, num_experts=5, num_local_experts=4)


@pytest.mark.parametrize(
    ("family", "count", "chosen"),
    [("mixtral", 8, 2), ("qwen2_moe", 60, 4), ("qwen3_moe", 128, 8), ("olmoe", 64, 8)],
)
def test_where_numbers_of_experts_are_left_out_they_are_those_of_the_reference(
    family, count, chosen
):
    silent = dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"))
    routing = read(family, **silent).config.moe.routing
    assert (routing.num_experts, routing.num_chosen) == (count, chosen)


def test_mixtral_turns_by_a_base_of_a_million_where_nothing_else_is_said():
    assert alike(read("mixtral").config).rope == RopeConfig(1e6)
    assert alike(read("mixtral", rope_theta=1e4).config).rope == RopeConfig(1e4)
    assert alike(read("olmoe").config).rope == RopeConfig(1e4)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (False, False, False, True)),
        ({"mlp_only_layers": None}, ALL),
    ],
)
def test_sparse_layers_follow_step_and_list(family, options, layers):
    config = read(family, **options).config
    assert config.sparse_layers == tuple(i for i, is_sparse in enumerate(layers) if is_sparse)


def test_a_model_without_a_sparse_layer_has_no_mixture():
    assert read("qwen3_moe", mlp_only_layers=[0, 1, 2, 3]).config.moe is None
    assert read("qwen2_moe", decoder_sparse_step=5).config.moe is None


def test_windows_of_qwen_moe_are_those_of_the_reference():
    window = {"use_sliding_window": True, "sliding_window": 7}
    assert alike(read("qwen2_moe", **window).config).windows == (7, None, 7, None)
    assert alike(read("qwen2_moe", **window, max_window_layers=2).config).windows[2:] == (
        None,
        None,
    )
    assert alike(read("qwen3_moe", **window, max_window_layers=2).config).windows == (7,) * 4
    for family, size in itertools.product(("qwen2_moe", "qwen3_moe"), (0, 7)):
        assert alike(read(family, sliding_window=size).config).windows == (None,) * 4
    with pytest.raises(UnsupportedModel, match="sliding_window: expected an integer from 1"):
        read("qwen2_moe", use_sliding_window=True, sliding_window=0)


def test_sparse_granite_has_the_factors_of_dense_granite():
    factors = {"embedding_multiplier": 12, "residual_multiplier": 0.25, "logits_scaling": 8.0}
    config = read("granitemoe", attention_multiplier=0.5, **factors).config
    assert config.multipliers == Multipliers(embedding=12.0, residual=0.25, logits=0.125)
    assert alike(config).scores == Scores(scale=0.5)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok: .* from 1 to 4, got 5"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts: expected an integer from 1"),
        ("qwen3_moe", {"num_experts": 10**6}, "num_experts: expected an integer from 1 to"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob: expected true or false"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: expected an integer"),
        ("qwen2_moe", {"mlp_only_layers": [4]}, r"mlp_only_layers.0: .* from 0 to 3, got 4"),
        ("qwen2_moe", {"mlp_only_layers": 1}, "mlp_only_layers: expected a list of integers"),
        ("qwen2_moe", {"moe_intermediate_size": None}, "moe_intermediate_size: expected an int"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 4}, "layer_types: expected 4"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: expected null"),
        ("granitemoe", {"mlp_bias": True}, "mlp_bias: expected False"),
    ],
)
def test_what_is_not_implemented_or_cannot_be_is_refused_by_name(family, changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        read(family, **changes)


def forms_of(family: str):
    (found,) = (each for each in FAMILIES if each.name == family)
    return found.hf_experts or (hugging_face.SPLIT_EXPERTS, hugging_face.FUSED_EXPERTS)


@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize("number", [0, 1], ids=["published", "in memory"])
def test_sources_of_each_form_fill_exactly_the_parameters(family, number):
    form = forms_of(family)[number]
    config = {"model_type": family, **SHARED, **OWN[family]}
    tensors = form.tensors(EXPECTED[family].routing.num_experts, range(4))
    spec = from_hf_config(config, tensors)
    filled = [source.parameter for source in spec.sources]
    assert sorted(filled) == sorted(AbstractModel(spec.config).abstract_parameters(jnp.float32))
    used = {name for source in spec.sources for part in source.parts for name in part.tensors}
    assert tensors <= used
    assert not used & (
        forms_of(family)[1 - number].tensors(EXPECTED[family].routing.num_experts, range(4))
        - tensors
    )


GGUF_SIZES = {
    "block_count": 4,
    "context_length": 256,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "vocab_size": 101,
    "expert_count": 4,
    "expert_used_count": 2,
}
GGUF_EXPECTED = {
    "llama": MoeConfig(Routing(4, 2), 48),
    "qwen2moe": MoeConfig(
        Routing(4, 2, is_normalized=False), 24, shared_mlp=48, has_shared_gate=True
    ),
    "qwen3moe": MoeConfig(Routing(4, 2), 24),
    "olmoe": MoeConfig(Routing(4, 2, is_normalized=False), 48),
    "granitemoe": MoeConfig(Routing(4, 2, "softmax_of_chosen"), 48),
}


def read_gguf(architecture: str, tensors=("token_embd.weight",), **changes: object):
    """Read metadata with `changes`, where None removes a key."""
    said = {key: value for key, value in (GGUF_SIZES | changes).items() if value is not None}
    metadata = {f"{architecture}.{key}": value for key, value in said.items()}
    return from_gguf_metadata({"general.architecture": architecture} | metadata, tensors)


@pytest.mark.parametrize("architecture", GGUF_EXPECTED)
def test_what_gguf_leaves_out_is_what_llama_cpp_assumes(architecture):
    assert read_gguf(architecture).config.moe == GGUF_EXPECTED[architecture]


@pytest.mark.parametrize("architecture", GGUF_EXPECTED)
def test_what_gguf_says_of_experts_is_read(architecture):
    said = {
        "expert_feed_forward_length": 20,
        "expert_weights_norm": False,
        "expert_weights_scale": 2.5,
        "expert_gating_func": 2,
    }
    moe = read_gguf(architecture, **said).config.moe
    assert moe.mlp == 20
    assert moe.routing == Routing(4, 2, "sigmoid", is_normalized=False, scale=2.5)


def test_the_width_of_the_shared_expert_is_read():
    moe = read_gguf("qwen2moe", expert_shared_feed_forward_length=36).config.moe
    assert (moe.mlp, moe.shared_mlp) == (24, 36)


def test_llama_files_without_experts_are_dense():
    for count in (0, None):
        dense = {"expert_count": count, "expert_used_count": count}
        assert read_gguf("llama", **dense).config.moe is None


@pytest.mark.parametrize("architecture", GGUF_EXPECTED)
@pytest.mark.parametrize("form", [gguf.STACKED_EXPERTS, gguf.SPLIT_EXPERTS], ids=["new", "old"])
def test_sources_of_both_forms_of_gguf_fill_exactly_the_parameters(architecture, form):
    tensors = form.tensors(GGUF_EXPECTED[architecture].routing.num_experts, range(4))
    spec = read_gguf(architecture, (*tensors, "token_embd.weight"))
    filled = [source.parameter for source in spec.sources]
    assert sorted(filled) == sorted(AbstractModel(spec.config).abstract_parameters(jnp.float32))
    used = {name for source in spec.sources for part in source.parts for name in part.tensors}
    assert tensors <= used


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("qwen3moe", {"expert_count": None}, "qwen3moe.expert_count: expected an integer"),
        ("qwen3moe", {"expert_used_count": 5}, "expert_used_count: .* from 1 to 4, got 5"),
        ("llama", {"expert_gating_func": 3}, "llama.expert_gating_func: .* from 1 to 2, got 3"),
        ("olmoe", {"expert_weights_scale": -1.0}, "expert_weights_scale: expected a finite"),
        ("granitemoe", {"expert_shared_feed_forward_length": 8}, "shared_feed_forward_length = 8"),
        ("llama", {"expert_group_count": 2}, "llama.expert_group_count = 2"),
    ],
)
def test_what_gguf_may_not_say_is_refused_by_name(architecture, changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        read_gguf(architecture, **changes)
