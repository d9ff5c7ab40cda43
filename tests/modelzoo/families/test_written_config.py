"""A decoder that is written as config.json is read as the same decoder, or refused."""

import pytest
from alike import changed

from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.families.config_reader import UnsupportedModel
from noria.modelzoo.families.registry import from_hf_config, write_config
from noria.modelzoo.rope_config import RopeConfig

CONFIG = DecoderConfig.alike(
    vocab_size=97,
    embed=48,
    mlp=56,
    num_query_heads=6,
    num_kv_heads=2,
    head_dim=12,
    windows=(None, None),
    max_position=64,
    norm_epsilon=1e-6,
    rope=RopeConfig(theta=1e5),
    tie_embeddings=True,
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_embeddings": False, "mlp_bias": True},
        {"qkv_bias": True, "output_bias": True},
    ],
)
def test_a_written_decoder_is_read_as_the_same(options):
    config = changed(CONFIG, **options)
    table, spec = write_config("llama", config)
    assert spec.config == config == from_hf_config(table).config
    assert spec.family == "llama" and table["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    "options", [{"logit_cap": 30.0}, {"qkv_bias": True}, {"windows": (4, None)}]
)
def test_options_that_are_not_written_are_refused(options):
    with pytest.raises(UnsupportedModel, match="Start from its published directory"):
        write_config("llama", changed(CONFIG, **options))
