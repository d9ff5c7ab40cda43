"""Write a decoder as config.json, for models whose own files have none.

Knows nothing of files. Guarantees: the table is read as the same decoder; otherwise the model is
refused.
"""

from typing import Any

from ..config import DecoderConfig
from ..layer_config import Mlp
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
    # a decoder whose layers are not alike differs from the one that is read again
    attention, parts = config.attentions[0], [layer.feed_forward for layer in config.layers]
    mlp = next((part for part in parts if isinstance(part, Mlp)), Mlp(config.embed))
    table = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed,
        "intermediate_size": mlp.size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_query_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": config.max_position,
        EPSILONS[config.norm]: config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": ACTIVATIONS[mlp.activation],
        "attention_bias": attention.output_bias,
        "mlp_bias": mlp.has_bias,
    }
    if isinstance(attention.rope, RopeConfig):
        table["rope_theta"] = attention.rope.theta
    spec = from_hf_config(table)
    if spec.config != config:
        raise UnsupportedModel(
            f"{family.name}: expected a model whose config.json noria can write, got one with "
            f"other options than sizes, biases and the base of rotation. Start from its published "
            f"directory, which has a config.json."
        )
    return table, spec
