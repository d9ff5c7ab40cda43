"""Write a decoder as config.json, for models whose own files have none.

Knows nothing of files. Guarantees: the table is read as the same decoder; otherwise the model is
refused.
"""

from typing import Any

from ..config import DecoderConfig
from ..rope_config import RopeConfig
from .config_reader import UnsupportedModel
from .family import ModelSpec
from .hugging_face import ACTIVATIONS, EPSILONS
from .registry import FAMILIES, from_hf_config


def write_config(family_name: str, config: DecoderConfig) -> tuple[dict[str, Any], ModelSpec]:
    """The table of config.json of a decoder, and the model that it describes.

    Args:
      family_name: The name of the family.
      config: The decoder.

    Raises:
      UnsupportedModel: The decoder has options that this function does not write.
    """
    family = next(family for family in FAMILIES if family.name == family_name)
    table = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        EPSILONS[config.norm]: config.norm_epsilon,
        "hidden_act": ACTIVATIONS[config.activation],
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
    }
    if isinstance(config.rope, RopeConfig):
        table["rope_theta"] = config.rope.theta
    spec = from_hf_config(table)
    if spec.config != config:
        raise UnsupportedModel(
            f"{family.name}: expected a model whose config.json noria can write, got one with "
            f"other options than sizes, biases and the base of rotation. Start from its published "
            f"directory, which has a config.json."
        )
    return table, spec
