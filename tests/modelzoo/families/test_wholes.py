"""Models of more than text: their text part answers text as the whole model does."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.families.registry import UnsupportedModel, from_hf_config
from noria.modelzoo.families.wholes import WHOLES
from noria.runtime.checkpoint import open_model
from noria.runtime.checkpoint.loader import load_params

QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
PIXTRAL = {
    "model_type": "pixtral",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "head_dim": 16,
    "intermediate_size": 16,
    "image_size": 28,
    "patch_size": 14,
}
TEXT = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
SECTIONS = {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [1, 1, 2]}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6}


@dataclass(frozen=True)
class Whole:
    """A small whole model: its `model_type`, its text part and its vision tower."""

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    is_flat: bool = False
    """Whether config.json is rewritten without `text_config`, as published."""


CASES = (
    Whole("qwen2_vl", {"rope_parameters": SECTIONS}, QWEN_VISION, is_flat=True),
    Whole("qwen2_5_vl", {"rope_parameters": SECTIONS}, QWEN_VISION),
    Whole("qwen3_vl", {"head_dim": 10, "rope_parameters": SECTIONS}, QWEN_VISION),
    Whole("qwen3_vl_moe", {"head_dim": 10, "rope_parameters": SECTIONS} | EXPERTS, QWEN_VISION),
    Whole("mistral3", {"model_type": "mistral", "sliding_window": None}, PIXTRAL),
    Whole(
        "mistral3",
        {
            "model_type": "ministral3",
            "rope_parameters": YARN | {"rope_theta": 1e6, "llama_4_scaling_beta": 0.3},
        },
        PIXTRAL,
    ),
    Whole("internvl", {"model_type": "qwen3", "head_dim": 10}, {"num_hidden_layers": 1}),
)
ELSEWHERE = {"gemma3", "llama4"}
"""Whole models with tests of their own."""


def test_every_whole_model_has_a_case():
    assert {case.name for case in CASES} == {whole.name for whole in WHOLES} - ELSEWHERE


@pytest.mark.reference
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{len(case.text)}")
def test_the_text_part_answers_text_as_the_whole_model_does(case, tmp_path):
    prompt = np.random.default_rng(0).integers(0, 90, 13)
    expected = _whole_logprobs(case, tmp_path, prompt)
    tensors = load_file(tmp_path / "model.safetensors")
    with open_model(str(tmp_path)) as files:
        definition = AbstractModel(files.spec.config)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = definition.abstract_parameters(jnp.float32)
        parameters = load_params(files.spec, files.tensors, abstract, device)
        assert any(name.startswith(files.spec.ignored_prefixes) for name in tensors)
        assert set(files.spec.other_tokens.values()) >= {91}
    decoder = definition.bind(parameters)

    @jax.jit
    def logprobs(tokens_BT):
        x_BTD, _ = decoder.forward(tokens_BT, jnp.array([len(prompt)]))
        return jax.nn.log_softmax(decoder.logits(x_BTD)[0])

    ours = logprobs(jnp.asarray(prompt, jnp.int32)[None])
    np.testing.assert_allclose(ours, expected, rtol=0, atol=FLOAT32_MODEL_LOGPROB)


def _whole_logprobs(case: Whole, directory, prompt: np.ndarray) -> np.ndarray:
    """Save a small random model of text and images; return log-probabilities of a text prompt."""
    import json

    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    token = "image_token_index" if case.name == "mistral3" else "image_token_id"
    config = AutoConfig.for_model(
        case.name,
        text_config=TEXT | case.text,
        vision_config=case.vision,
        tie_word_embeddings=False,
        **{token: 91},
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(directory)
        logits = model(torch.tensor(prompt[None])).logits[0]
    if case.name == "qwen3_vl_moe":
        # published experts have their inputs first; transformers turns them while it loads
        file = directory / "model.safetensors"
        tensors = load_file(file)
        turned = {
            name: np.ascontiguousarray(x.swapaxes(1, 2)) if ".experts." in name else x
            for name, x in tensors.items()
        }
        save_file(turned, file)
    if case.is_flat:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        text = config.pop("text_config")
        del text["model_type"]
        path.write_text(json.dumps(text | config))
    return torch.log_softmax(logits, dim=-1).numpy()


@pytest.mark.parametrize("inner", [None, False, True])
@pytest.mark.parametrize("outer", [None, False, True])
def test_embeddings_are_tied_if_either_key_ties_them(outer, inner):
    """A head that differs is used where there is one, so no answer depends on the other key."""
    text = TEXT | {"model_type": "qwen3_vl_text", "rms_norm_eps": 1e-6} | _tied(inner)
    spec = from_hf_config({"model_type": "qwen3_vl", "text_config": text} | _tied(outer))
    assert spec.config.tie_embeddings == bool(outer or inner)


def _tied(value: bool | None) -> dict[str, bool]:
    return {} if value is None else {"tie_word_embeddings": value}


def test_a_text_part_of_another_family_is_refused_by_name():
    config = {"model_type": "mistral3", "text_config": {"model_type": "llama"}}
    with pytest.raises(UnsupportedModel, match=r"text_config.model_type: expected 'mistral' or"):
        from_hf_config(config)
