"""List of the known families, and lookup of the family of a published configuration.

To add a family, list it here and in the conformance cases of the tests. Knows nothing of files and
imports no jax. Guarantees: every option of a returned model is supported; otherwise the error
`UnsupportedModel` names the unsupported option.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ..config import DecoderConfig
from ..layer_config import Mlp
from ..pooling_config import Pooling
from ..rope_config import RopeConfig
from . import (
    bert,
    cohere,
    cohere2,
    deepseek,
    dots1,
    ernie4_5,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    gguf,
    gpt_oss,
    granite,
    granite_moe,
    hugging_face,
    llama,
    llama4,
    llama_like,
    minimax_m2,
    mistral,
    mixtral,
    modernbert,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    roberta,
    starcoder2,
)
from .config_reader import ConfigReader, UnsupportedModel
from .family import Family, ModelSpec, WholeModel
from .hugging_face import ACTIVATIONS, EPSILONS
from .sources import parameter_sources
from .wholes import WHOLES

Found = TypeVar("Found")

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    llama4.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    qwen2.FAMILY,
    qwen2_moe.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    olmo2.FAMILY,
    olmoe.FAMILY,
    granite.FAMILY,
    granite_moe.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    phi3.FAMILY,
    cohere.FAMILY,
    deepseek.V2,
    deepseek.V3,
    gpt_oss.FAMILY,
    gemma.GEMMA,
    gemma.VAULT_GEMMA,
    cohere2.FAMILY,
    olmo3.OLMO_3,
    olmo3.FLEX_OLMO,
    mistral.MINISTRAL,
    mistral.MINISTRAL_3,
    ernie4_5.DENSE,
    ernie4_5.SPARSE,
    exaone4.FAMILY,
    starcoder2.FAMILY,
    minimax_m2.FAMILY,
    deepseek.KIMI_K2,
    dots1.DOTS_1,
    dots1.GLM_4_MOE,
    dots1.SOLAR_OPEN,
    dots1.DEEPSEEK_MOE,
    granite_moe.SHARED,
    granite_moe.HYBRID,
    llama_like.SEED_OSS,
    llama_like.HELIUM,
    llama_like.CWM,
    llama_like.STABLE_LM,
    llama_like.ORION,
    llama_like.INTERNLM_2,
    llama_like.MIMO,
    llama_like.MINI_CPM,
)
"""The families of decoders."""
ENCODERS: tuple[Family, ...] = (
    bert.FAMILY,
    roberta.ROBERTA,
    roberta.XLM_ROBERTA,
    modernbert.FAMILY,
)
"""The families of encoders, which turn texts into vectors and generate no tokens."""
ENCODER_DECODERS = frozenset({
    "t5", "mt5", "umt5", "longt5", "switch_transformers", "t5gemma", "bart", "mbart", "pegasus",
    "marian", "m2m_100", "nllb-moe", "led", "prophetnet", "blenderbot", "bigbird_pegasus",
    "fsmt", "whisper", "encoder-decoder",
})  # fmt: skip
"""Values of `model_type` of models with an encoder and a decoder, which are refused."""


def from_hf_config(config: Mapping[str, object], tensor_names: Collection[str] = ()) -> ModelSpec:
    """The model of a parsed Hugging Face config.json.

    Args:
      config: The table of config.json.
      tensor_names: The tensors of the model. They select the form if a family publishes several.

    Raises:
      UnsupportedModel: The model or an option is not supported, or a value is malformed.
    """
    if (name := config.get("model_type")) in ENCODER_DECODERS:
        raise UnsupportedModel(
            f"model_type: expected a decoder or an encoder alone, got {name!r}, which has both. A "
            f"decoder that also attends to an encoder needs other graphs and another cache, which "
            f"noria does not have. Take a decoder for text, or an encoder for vectors."
        )
    names = {family.name: family for family in (*FAMILIES, *ENCODERS)}
    wholes = {whole.name: whole for whole in WHOLES}
    found = _find("model_type", config, names | wholes)
    if isinstance(found, WholeModel):
        reader = ConfigReader(config, defaults=found.defaults)
        return hugging_face.text_part_spec(found, reader, tensor_names)
    reader = ConfigReader(config, defaults=found.hf_defaults)
    return hugging_face.model_spec(found, reader, tensor_names)


def from_gguf_metadata(
    metadata: Mapping[str, object],
    tensor_names: Collection[str],
    read_tensor: gguf.ReadTensor | None = None,
) -> ModelSpec:
    """The model of the metadata and tensor names of a GGUF file.

    Args:
      metadata: The metadata of the file.
      tensor_names: The tensors of the file.
      read_tensor: Reads a small tensor; needed for files that publish rotary scaling as a tensor.

    Raises:
      UnsupportedModel: The model or an option is not supported, or a value is malformed.
    """
    names = {family.gguf_name: family for family in FAMILIES if family.gguf_options is not None}
    family = _find("general.architecture", metadata, names)
    return gguf.model_spec(family, metadata, tensor_names, read_tensor)


def hugging_face_form(spec: ModelSpec) -> ModelSpec:
    """A model of another format with the tensors that its family has in Hugging Face files.

    If experts are published in several forms, they have the usual one.
    """
    family, pooling = family_of(spec), spec.config.pooling
    names = hugging_face.names_of(family, spec.config)
    if pooling.labels:
        classifier = family.hf_classifier
        names = replace(names, dense=classifier.dense, dense_norm=classifier.norm)
    else:
        # the usual names of the dense layers of sentence-transformers, which follow the pooling
        dense = tuple(f"{2 + i}_Dense/linear" for i in range(len(pooling.projections)))
        names = replace(names, dense=dense)
    sources = parameter_sources(spec.config, names)
    return ModelSpec(spec.family, spec.config, sources, names=names)


def with_pooling(spec: ModelSpec, pooling: Pooling, dense: tuple[str, ...]) -> ModelSpec:
    """A model with another pooling; `dense` has the tensor names of its dense layers, in order."""
    assert spec.names is not None, "the model is in its Hugging Face form"
    config, names = replace(spec.config, pooling=pooling), replace(spec.names, dense=dense)
    sources = parameter_sources(config, names)
    return replace(spec, config=config, names=names, sources=sources)


def family_of(spec: ModelSpec) -> Family:
    """The family of a model."""
    return next(family for family in (*FAMILIES, *ENCODERS) if family.name == spec.family)


def _find(key: str, values: Mapping[str, object], families: Mapping[str, Found]) -> Found:
    name = values.get(key)
    if isinstance(name, str) and name in families:
        return families[name]
    got = repr(name) if key in values else "no such key"
    raise UnsupportedModel(f"{key}: expected one of {', '.join(families)}, got {got}.")


def write_config(family_name: str, config: DecoderConfig) -> tuple[dict[str, Any], ModelSpec]:
    """The table of config.json of a decoder, and the model that it describes.

    It is for models whose own files have none. The table is read as the same decoder.

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
