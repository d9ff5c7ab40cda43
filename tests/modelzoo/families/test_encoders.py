"""Encoders' config.json and tensor names: published forms are read, other options are refused."""

import pytest
from alike import alike

from noria.modelzoo.config import TokenInputs
from noria.modelzoo.families.registry import (
    UnsupportedModel,
    from_hf_config,
    hugging_face_form,
    with_pooling,
)
from noria.modelzoo.layer_config import BothSides
from noria.modelzoo.pooling_config import Pooling, Projection
from noria.modelzoo.rope_config import NoRope, RopeConfig

MINILM = {
    "_name_or_path": "nreimers/MiniLM-L6-H384-uncased",
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 384,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "transformers_version": "4.8.2",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
XLM_ROBERTA = MINILM | {
    "architectures": ["XLMRobertaModel"],
    "model_type": "xlm-roberta",
    "bos_token_id": 0,
    "eos_token_id": 2,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 514,
    "output_past": True,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 250002,
}
MODERNBERT = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 50281,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 50281,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "eos_token_id": 50282,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "pad_token_id": 50283,
    "position_embedding_type": "absolute",
    "sep_token_id": 50282,
    "tie_word_embeddings": True,
    "vocab_size": 50368,
}


def test_minilm_is_read():
    spec = from_hf_config(MINILM)
    config = spec.config
    assert spec.ignored_keys == () and spec.family == "bert"
    assert alike(config).windows == (BothSides(),) * 6 and alike(config).rope == NoRope()
    assert config.inputs == TokenInputs(512, 0, 2) and config.max_position == 512
    assert (alike(config).norm_placement, config.norm_bias, alike(config).is_gated) == (
        "residual",
        True,
        False,
    )
    assert config.lacks_generation == "it has no output head"


def test_positions_of_roberta_begin_after_the_padding_id():
    config = from_hf_config(XLM_ROBERTA).config
    assert config.inputs == TokenInputs(514, 2, 1) and config.max_position == 512


def test_modernbert_is_read_with_its_layers_of_two_kinds():
    spec = from_hf_config(MODERNBERT)
    assert spec.ignored_keys == ()
    windows = alike(spec.config).windows
    assert windows[:4] == (BothSides(), BothSides(64), BothSides(64), BothSides())
    assert spec.config.layers[0].attention.rope == RopeConfig(160000.0)
    assert spec.config.layers[1].attention.rope == RopeConfig(10000.0)
    names = {source.parameter for source in spec.sources}
    assert "layers.0.attention_norm.scale" not in names
    assert {"layers.1.attention_norm.scale", "final_norm.scale", "inputs.norm.scale"} <= names


def sources_of(config, *tensors: str) -> set[str]:
    spec = from_hf_config(config, tensors)
    return {tensor for source in spec.sources for part in source.parts for tensor in part.tensors}


def test_tensors_have_the_names_of_the_model_with_or_without_its_head():
    norm, word = "embeddings.LayerNorm", "embeddings.word_embeddings.weight"
    assert f"{norm}.weight" in sources_of(MINILM, word)
    assert f"bert.{norm}.weight" in sources_of(MINILM, f"bert.{word}")
    assert f"bert.{norm}.gamma" in sources_of(MINILM, f"bert.{word}", f"bert.{norm}.gamma")
    unread = ("pooler.dense.weight", "embeddings.position_ids")
    assert set(unread) <= set(from_hf_config(MINILM, (word, *unread)).ignored_tensors)
    whole = ("bert.pooler.dense.bias", "cls.predictions.bias")
    found = from_hf_config(MINILM, (f"bert.{word}", *whole)).ignored_tensors
    assert set(whole) <= set(found)


REFUSED = {
    "relative positions": (MINILM, {"position_embedding_type": "relative_key"}),
    "a decoder": (MINILM, {"is_decoder": True}),
    "another activation": (MINILM, {"hidden_act": "relu"}),
    "no token types": (MINILM, {"type_vocab_size": 0}),
    "another class": (MINILM, {"architectures": ["BertLMHeadModel"]}),
    "another padding": (XLM_ROBERTA, {"pad_token_id": 0}),
    "too few positions": (XLM_ROBERTA, {"max_position_embeddings": 2}),
    "scaled rotation": (MODERNBERT, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "other kinds of layers": (MODERNBERT, {"layer_types": ["chunked_attention"] * 22}),
    "gates of silu": (MODERNBERT, {"hidden_activation": "silu"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_options_are_refused_by_name(case):
    config, option = REFUSED[case]
    (key,) = option
    with pytest.raises(UnsupportedModel, match=f"^{key}: "):
        from_hf_config(config | option)


@pytest.mark.parametrize("name", ["t5", "mt5", "bart", "whisper"])
def test_models_with_encoder_and_decoder_are_refused_with_the_reason(name):
    with pytest.raises(
        UnsupportedModel, match=f"model_type: .*{name!r}, which has both"
    ) as refusal:
        from_hf_config({"model_type": name, "architectures": ["T5ForConditionalGeneration"]})
    assert "another cache" in str(refusal.value)


def test_a_decoder_without_a_head_is_read_for_vectors():
    config = {
        "model_type": "mistral",
        "architectures": ["MistralModel"],
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    }
    spec = from_hf_config(config, ["embed_tokens.weight"])
    assert not spec.config.has_head and spec.config.lacks_generation
    tensors = sources_of(config, "embed_tokens.weight")
    assert "layers.0.self_attn.q_proj.weight" in tensors and "lm_head.weight" not in tensors
    assert "model.norm.weight" in sources_of(config, "model.norm.weight")
    whole = config | {"architectures": ["MistralForCausalLM"]}
    assert from_hf_config(whole, ["model.norm.weight"]).config.has_head


def test_other_formats_have_the_published_names_of_dense_layers():
    classifier = from_hf_config(MINILM | {"architectures": ["BertForSequenceClassification"]})
    pooling = Pooling(projections=(Projection(8), Projection(5, has_bias=False)))
    dense = ("2_Dense/linear", "3_Dense/linear")
    for spec in (classifier, with_pooling(from_hf_config(MINILM), pooling, dense)):
        assert hugging_face_form(spec).sources[-3:] == spec.sources[-3:]
        assert all("dense" in source.parameter for source in spec.sources[-3:])
