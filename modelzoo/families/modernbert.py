"""ModernBERT: rotation, gated MLPs, norms before; two of three layers see 64 tokens on each side.

Source: "Smarter, Better, Faster, Longer" (2412.13663). The first layer has no norm before its
attention, as the norm of the embeddings comes directly before it.
"""

from ..config import TokenInputs
from ..layer_config import BothSides
from ..pooling_config import PoolingKind, Projection
from ..rope_config import RopeConfig
from .classifiers import Classifier
from .config_reader import ConfigReader
from .family import Family, Options
from .hugging_face import MAX_LAYERS, read_epsilon
from .rope_options import MAX_POSITION

_GLOBAL_THETA, _LOCAL_THETA = 160_000.0, 10_000.0
_LAYER = "model.layers.{i}"
_NAMES = {
    "embedding": "model.embeddings.tok_embeddings",
    "input_norm": "model.embeddings.norm",
    "attention_norm": f"{_LAYER}.attn_norm",
    "query": f"{_LAYER}.attn.Wqkv",
    "key": f"{_LAYER}.attn.Wqkv",
    "value": f"{_LAYER}.attn.Wqkv",
    "output": f"{_LAYER}.attn.Wo",
    "mlp_norm": f"{_LAYER}.mlp_norm",
    "gate": f"{_LAYER}.mlp.Wi",
    "up": f"{_LAYER}.mlp.Wi",
    "down": f"{_LAYER}.mlp.Wo",
    "final_norm": "model.final_norm",
}
_TRAINING_KEYS = (
    "embedding_dropout", "mlp_dropout", "classifier_dropout", "decoder_bias", "sparse_prediction",
    "sparse_pred_ignore_index", "initializer_cutoff_factor", "deterministic_flash_attn",
    "repad_logits_with_grad", "reference_compile", "classifier_pooling", "classifier_bias",
    "classifier_activation", "cls_token_id", "position_embedding_type", "layer_norm_eps",
)  # fmt: skip
"""Keys of heads, of training and of implementations, and keys that the reference does not read."""


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    config.ignore(_TRAINING_KEYS)
    windows = _windows(config, num_layers)
    full, local = _ropes(config)
    has_bias = config.flag("attention_bias", default=False)
    return Options(
        windows=windows,
        rope=full,
        local_rope=local,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=config.flag("mlp_bias", default=False),
        norm="layer",
        norm_bias=config.flag("norm_bias", default=False),
        norm_epsilon=read_epsilon(config, "norm_eps"),
        activation="gelu",
        inputs=TokenInputs(),
        has_first_norm=False,
    )


def _windows(config: ConfigReader, num_layers: int) -> tuple[BothSides, ...]:
    """All layers see both sides; most of them only half of `local_attention` on each."""
    reach = config.integer("local_attention", minimum=2, maximum=MAX_POSITION) // 2
    every = config.integer("global_attn_every_n_layers", maximum=MAX_LAYERS, default=3)
    kinds = ["sliding_attention" if i % every else "full_attention" for i in range(num_layers)]
    if config.has("layer_types"):
        kinds = list(config.texts("layer_types"))
        if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
            raise config.error("layer_types", f"{num_layers} kinds of full or sliding attention")
    return tuple(BothSides(reach if kind == "sliding_attention" else None) for kind in kinds)


def _ropes(config: ConfigReader) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of layers that see all tokens, and of the others, in either spelling."""
    config.expect("rope_scaling", None)
    full = config.number("global_rope_theta", above=1.0, default=_GLOBAL_THETA)
    local = config.number("local_rope_theta", above=1.0, default=_LOCAL_THETA)
    if config.has("rope_parameters"):
        kinds = config.table("rope_parameters")
        found = []
        for kind, default in (("full_attention", full), ("sliding_attention", local)):
            table = kinds.table(kind)
            table.expect("rope_type", "default")
            found.append(table.number("rope_theta", above=1.0, default=default))
            table.refuse_rest()
        kinds.refuse_rest()
        full, local = found
    return RopeConfig(full), RopeConfig(local)


def _layers(config: ConfigReader, embed: int) -> tuple[Projection, ...]:
    """The layer between pooling and classes."""
    config.expect("classifier_activation", "gelu")
    layer = Projection(
        embed,
        has_bias=config.flag("classifier_bias", default=False),
        activation="gelu",
        norm_epsilon=read_epsilon(config, "norm_eps"),
        has_norm_bias=config.flag("norm_bias", default=False),
    )
    return (layer,)


def _pooling(config: ConfigReader) -> PoolingKind:
    kind = config.text("classifier_pooling", default="cls")
    if kind not in ("cls", "mean"):
        raise config.error("classifier_pooling", "cls or mean")
    return "first" if kind == "cls" else "mean"


FAMILY = Family(
    "modernbert",
    "ModernBertModel",
    _hf_options,
    hf_defaults={"local_attention": 128, "norm_eps": 1e-5, "max_position_embeddings": 8192},
    hf_names=_NAMES,
    hf_unused_tensors=lambda config, num_layers: ("head.", "decoder."),
    hf_other_heads=("ModernBertForMaskedLM",),
    hf_classifier=Classifier(("head.dense", "classifier"), _layers, _pooling, norm="head.norm"),
)
