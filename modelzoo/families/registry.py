"""The known families, found by what a published configuration says of itself.

Knows nothing of files and imports no jax. A family joins by being listed here and in the
conformance cases of the tests. Guarantees: what is returned is understood whole; anything else is
an `UnsupportedModel` that names what was not.
"""

from collections.abc import Collection, Mapping

from . import (
    cohere,
    deepseek,
    gemma2,
    gemma3,
    gguf,
    gpt_oss,
    granite,
    granite_moe,
    hugging_face,
    llama,
    llama4,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from .config_reader import ConfigReader, UnsupportedModel
from .family import Family, ModelSpec

__all__ = ["FAMILIES", "ModelSpec", "UnsupportedModel", "from_gguf_metadata", "from_hf_config"]

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
)


def from_hf_config(config: Mapping[str, object], tensor_names: Collection[str] = ()) -> ModelSpec:
    """The model of a parsed Hugging Face config.json.

    `tensor_names` decide where a family publishes its tensors in more than one form.
    """
    names = {family.name: family for family in FAMILIES}
    wholes = {family.part_of.name: family for family in FAMILIES if family.part_of is not None}
    family = _find("model_type", config, names | wholes)
    if config["model_type"] not in wholes:
        reader = ConfigReader(config, defaults=family.hf_defaults)
        return hugging_face.model_spec(family, reader, tensor_names)
    assert family.part_of is not None, family.name
    reader = ConfigReader(config, defaults=family.part_of.defaults)
    return hugging_face.text_part_spec(family, reader, tensor_names)


def from_gguf_metadata(
    metadata: Mapping[str, object],
    tensor_names: Collection[str],
    read_tensor: gguf.ReadTensor | None = None,
) -> ModelSpec:
    """The model of a GGUF file's metadata and tensor names.

    `read_tensor` is asked for one small tensor of files that publish their rotary scaling as one.
    """
    names = {family.gguf_name: family for family in FAMILIES if family.gguf_options is not None}
    family = _find("general.architecture", metadata, names)
    return gguf.model_spec(family, metadata, tensor_names, read_tensor)


def _find(key: str, values: Mapping[str, object], families: Mapping[str, Family]) -> Family:
    name = values.get(key)
    if isinstance(name, str) and name in families:
        return families[name]
    got = repr(name) if key in values else "no such key"
    raise UnsupportedModel(f"{key}: expected one of {', '.join(families)}, got {got}.")
