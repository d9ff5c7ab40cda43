"""BERT and MiniLM: attention in both directions, learned positions, norms after each sum.

Source: "BERT" (1810.04805). Heads for masked tokens are not read.
"""

from ..config import TokenInputs
from ..layer_config import BothSides
from ..pooling_config import Projection
from ..rope_config import NoRope
from .classifiers import Classifier
from .config_reader import ConfigReader
from .family import Family, Options
from .rope_options import MAX_POSITION

MAX_TYPES = 16


def tensor_names(prefix: str) -> dict[str, str]:
    """The tensor names of BERT and its successors, which differ in the first part."""
    layer = f"{prefix}encoder.layer.{{i}}"
    return {
        "embedding": f"{prefix}embeddings.word_embeddings",
        "positions": f"{prefix}embeddings.position_embeddings",
        "token_types": f"{prefix}embeddings.token_type_embeddings",
        "input_norm": f"{prefix}embeddings.LayerNorm",
        "query": f"{layer}.attention.self.query",
        "key": f"{layer}.attention.self.key",
        "value": f"{layer}.attention.self.value",
        "output": f"{layer}.attention.output.dense",
        "attention_post_norm": f"{layer}.attention.output.LayerNorm",
        "up": f"{layer}.intermediate.dense",
        "down": f"{layer}.output.dense",
        "mlp_post_norm": f"{layer}.output.LayerNorm",
    }


def encoder_options(config: ConfigReader, num_layers: int, first_position: int) -> Options:
    """The options of BERT and its successors.

    Args:
      config: The table of config.json.
      num_layers: The number of layers.
      first_position: The learned position of the first token.
    """
    config.expect("position_embedding_type", "absolute")
    config.expect("is_decoder", False)
    config.ignore(("classifier_dropout", "output_past", "pooler_fc_size", "directionality",
                   "pooler_num_attention_heads", "pooler_num_fc_layers",
                   "pooler_size_per_head", "pooler_type"))  # fmt: skip
    num_positions = config.integer(
        "max_position_embeddings", minimum=first_position + 1, maximum=MAX_POSITION
    )
    return Options(
        windows=(BothSides(),) * num_layers,
        rope=NoRope(),
        max_position=num_positions - first_position,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm="layer",
        norm_bias=True,
        norm_placement="residual",
        activation="gelu",
        is_gated=False,
        inputs=TokenInputs(
            num_positions, first_position, config.integer("type_vocab_size", maximum=MAX_TYPES)
        ),
    )


def unread_tensors(prefix: str, *heads: str) -> tuple[str, ...]:
    """The beginnings of names of tensors that no vector needs: position ids, pooler and heads."""
    parts = ("embeddings.position_ids", "pooler.")
    return (*(f"{start}{part}" for part in parts for start in (prefix, "")), *heads)


FAMILY = Family(
    "bert",
    "BertModel",
    lambda config, num_layers: encoder_options(config, num_layers, first_position=0),
    hf_defaults={"type_vocab_size": 2, "layer_norm_eps": 1e-12, "max_position_embeddings": 512},
    hf_names=tensor_names("bert."),
    hf_prefix="bert.",
    hf_unused_tensors=lambda config, num_layers: unread_tensors("bert.", "cls."),
    hf_other_heads=("BertForMaskedLM", "BertForPreTraining"),
    hf_classifier=Classifier(
        ("bert.pooler.dense", "classifier"),
        lambda config, embed: (Projection(embed, activation="tanh"),),
    ),
)
