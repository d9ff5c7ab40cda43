"""RoBERTa and XLM-RoBERTa: the blocks of BERT; positions count from the one after the padding id.

Source: "RoBERTa" (1907.11692). Published models use the id 1 for padding, so the first token has
the learned position 2. A token with this id inside of a text gets a position like any other token.
"""

from ..pooling_config import Projection
from .bert import encoder_options, tensor_names, unread_tensors
from .classifiers import Classifier
from .config_reader import ConfigReader
from .family import Family, Options

_PADDING_ID = 1


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    config.expect("pad_token_id", _PADDING_ID)
    return encoder_options(config, num_layers, first_position=_PADDING_ID + 1)


def _family(name: str, kind: str) -> Family:
    return Family(
        name,
        f"{kind}Model",
        _hf_options,
        hf_defaults={
            "type_vocab_size": 1 if kind == "XLMRoberta" else 2,
            "layer_norm_eps": 1e-12,
            "max_position_embeddings": 512,
        },
        hf_names=tensor_names("roberta."),
        hf_prefix="roberta.",
        hf_unused_tensors=lambda config, num_layers: unread_tensors("roberta.", "lm_head."),
        hf_other_heads=(f"{kind}ForMaskedLM",),
        hf_classifier=Classifier(
            ("classifier.dense", "classifier.out_proj"),
            lambda config, embed: (Projection(embed, activation="tanh"),),
        ),
    )


ROBERTA = _family("roberta", "Roberta")
XLM_ROBERTA = _family("xlm-roberta", "XLMRoberta")
