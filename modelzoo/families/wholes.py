"""Models of text and images, or of more, whose text part is one of the families.

The other parts are not read. The positions of a text are the same on all axes of a rotation with
several axes. Names and defaults are those of transformers.
"""

from dataclasses import replace

from . import gemma3, llama4, mistral, qwen2, qwen3, qwen3_moe
from .family import WholeModel
from .hugging_face import FUSED_EXPERTS
from .mapping import NO_PREFIX, TensorPrefix

_IN_MODEL = TensorPrefix("model.", "model.language_model.")
_OUTSIDE = TensorPrefix("", "language_model.")
PREFIXES = (_OUTSIDE, _IN_MODEL)
"""The prefixes of the text part in published models and in the memory of transformers."""

_VISION = ("vision_tower.", "multi_modal_projector.")
_TOWER = (*_VISION, *(f"model.{prefix}" for prefix in _VISION))
_PROJECTOR_KEYS = (
    "vision_config", "projector_hidden_act", "multimodal_projector_bias", "spatial_merge_size",
    "vision_feature_layer", "vision_feature_select_strategy", "image_seq_length",
    "downsample_ratio",
)  # fmt: skip
"""Keys of vision towers and projectors."""
_IMAGE = ("image_token_id", "image_token_index")
_QWEN = {
    "other_prefixes": ("visual.", "model.visual."),
    "other_keys": ("vision_config", "vision_start_token_id", "vision_end_token_id"),
    "other_tokens": ("image_token_id", "video_token_id", "vision_token_id"),
}


def _qwen2(name: str, architecture: str) -> WholeModel:
    text = replace(qwen2.FAMILY, hf_theta=1e6)
    prefixes = (NO_PREFIX, _IN_MODEL)
    return WholeModel(name, architecture, {f"{name}_text": text}, prefixes, is_flat=True, **_QWEN)


# experts are stored with inputs first, and weights of chosen ones are always normalized
_QWEN3_EXPERTS = replace(FUSED_EXPERTS, gate_up_axes="e d (p f)", down_axes="e f d")
_QWEN3_MOE = replace(
    qwen3_moe.FAMILY,
    hf_defaults={"norm_topk_prob": True},
    hf_theta=500_000.0,
    hf_experts=(_QWEN3_EXPERTS,),
)

WHOLES: tuple[WholeModel, ...] = (
    WholeModel(
        "llama4",
        "Llama4ForConditionalGeneration",
        {"llama4_text": llama4.FAMILY},
        (_OUTSIDE,),
        ("vision_model.", "multi_modal_projector."),
        ("vision_config", "boi_token_index", "eoi_token_index"),
        _IMAGE,
    ),
    WholeModel(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        {"gemma3_text": gemma3.FAMILY},
        PREFIXES,
        _TOWER,
        (
            "vision_config",
            "mm_tokens_per_image",
            *(f"{name}_token_{kind}" for name in ("boi", "eoi") for kind in ("index", "id")),
        ),
        _IMAGE,
        defaults={"tie_word_embeddings": True},
    ),
    _qwen2("qwen2_vl", "Qwen2VLForConditionalGeneration"),
    _qwen2("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
    WholeModel(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        {"qwen3_vl_text": replace(qwen3.FAMILY, hf_theta=500_000.0)},
        (_IN_MODEL,),
        **_QWEN,
    ),
    WholeModel(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        {"qwen3_vl_moe_text": _QWEN3_MOE},
        (_IN_MODEL,),
        **_QWEN,
    ),
    WholeModel(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        {"mistral": mistral.FAMILY, "ministral3": mistral.MINISTRAL_3},
        PREFIXES,
        _TOWER,
        _PROJECTOR_KEYS,
        _IMAGE,
    ),
    WholeModel(
        "internvl",
        "InternVLForConditionalGeneration",
        {"qwen2": qwen2.FAMILY, "qwen3": qwen3.FAMILY},
        PREFIXES,
        _TOWER,
        _PROJECTOR_KEYS,
        _IMAGE,
    ),
)
