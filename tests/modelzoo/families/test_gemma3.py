"""Gemma 3 as published with a vision tower: its text part, in both forms of its names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import alike
from safetensors.numpy import load_file
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.families.registry import UnsupportedModel, from_hf_config
from noria.modelzoo.rope_config import LinearScaling, RopeConfig
from noria.runtime.checkpoint import open_model
from noria.runtime.checkpoint.description import describe
from noria.runtime.checkpoint.loader import load_params

TEXT = {
    "model_type": "gemma3_text",
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "sliding_window": 5,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 20,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}
WHOLE = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": TEXT,
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 32},
    "boi_token_index": 98,
    "eoi_token_index": 99,
    "image_token_index": 100,
    "mm_tokens_per_image": 4,
}
OLD_NAME = "language_model.model.layers.0.mlp.up_proj.weight"
NEW_NAME = "model.language_model.layers.0.mlp.up_proj.weight"


def test_the_4b_leaves_out_what_the_reference_assumes():
    published = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = from_hf_config(WHOLE | {"text_config": published}).config
    assert (alike(config).num_query_heads, alike(config).num_kv_heads, alike(config).head_dim) == (
        8,
        4,
        256,
    )
    assert (config.vocab_size, config.max_position, config.norm_epsilon) == (262208, 131072, 1e-6)
    assert alike(config).windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert alike(config).rope == RopeConfig(1e6, LinearScaling(8.0))
    assert config.tie_embeddings


@pytest.mark.parametrize(
    ("name", "embedding", "head"),
    [
        (OLD_NAME, "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
        (NEW_NAME, "model.language_model.embed_tokens.weight", "lm_head.weight"),
    ],
    ids=["as published", "as transformers has them in memory"],
)
def test_the_text_part_is_named_as_its_tensors_are(name, embedding, head):
    spec = from_hf_config(WHOLE, [name])
    tensors = {part.tensor for source in spec.sources for part in source.parts}
    assert {name, embedding} <= tensors
    assert head in spec.ignored_tensors
    assert (spec.embedding_tensor, spec.head_tensor) == (embedding, head)
    assert spec.config == from_hf_config(TEXT).config
    assert "vision_tower.encoder.weight".startswith(spec.ignored_prefixes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, "architectures: expected"),
        ({"text_config": TEXT | {"model_type": "gemma2"}}, "text_config.model_type: expected 'gem"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: expected False"),
        (
            {"text_config": TEXT | {"use_bidirectional_attention": True}},
            "text_config.use_bidirectional_attention: expected False",
        ),
    ],
    ids=str,
)
def test_what_the_whole_model_does_not_implement_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModel, match=f"^{message}"):
        from_hf_config(WHOLE | changes)


@pytest.mark.reference
@pytest.mark.parametrize("is_original", [True, False], ids=["old names", "new names"])
def test_the_text_part_answers_text_as_the_whole_model_does(tmp_path, is_original):
    prompt = np.random.default_rng(0).integers(0, 98, 13)
    expected = _whole_logprobs(tmp_path, prompt, is_original)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert (OLD_NAME if is_original else NEW_NAME) in names
    with open_model(str(tmp_path)) as files:
        definition = AbstractModel(files.spec.config)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = definition.abstract_parameters(jnp.float32)
        parameters = load_params(files.spec, files.tensors, abstract, device)
        said = []
        files.unread.report(said.append, is_strict=True)
        skipped = sum("vision_tower." in name for name in names)
        assert len(said) == 1 and f"vision_tower.* ({skipped})" in said[0]
        assert said[0].endswith(", as only text is served")
        assert f"vision_tower.* ({skipped})" in describe(files)
    decoder = definition.bind(parameters)

    @jax.jit
    def logprobs(tokens_BT):
        x_BTD, _ = decoder.forward(tokens_BT, jnp.array([len(prompt)]))
        return jax.nn.log_softmax(decoder.logits(x_BTD)[0])

    ours = logprobs(jnp.asarray(prompt, jnp.int32)[None])
    np.testing.assert_allclose(ours, expected, rtol=0, atol=FLOAT32_MODEL_LOGPROB)


def _whole_logprobs(directory, prompt: np.ndarray, is_original: bool) -> np.ndarray:
    """Save a small random model of text and images; return log-probabilities of a text prompt."""
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(0)
    vision = {"model_type": "siglip_vision_model", "num_hidden_layers": 1, "hidden_size": 32}
    vision |= {"num_attention_heads": 2, "intermediate_size": 16, "image_size": 28}
    vision |= {"patch_size": 14, "vision_use_head": False}
    text = TEXT | {"initializer_range": 0.2}
    tokens = {key: value for key, value in WHOLE.items() if key.endswith(("_index", "_image"))}
    config = Gemma3Config(text_config=text, vision_config=vision, **tokens)
    config._attn_implementation = "eager"
    model = Gemma3ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(directory, save_original_format=is_original)
        logits = model(torch.tensor(prompt[None])).logits[0]
    return torch.log_softmax(logits, dim=-1).numpy()
