"""The text part of models that read more than text: the decoder of a family, inside another model.

Text alone asks nothing of the other parts: their tables are not read, nor are their tensors, which
are known by the beginnings of their names. Knows nothing of files.
"""

from collections.abc import Collection
from dataclasses import replace

from .config_reader import ConfigReader
from .family import Family, ModelSpec
from .hugging_face import IGNORED_KEYS, check_architecture, model_spec
from .quantisation import read_quantisation
from .sources import parameter_sources


def text_part_spec(
    family: Family, config: ConfigReader, tensor_names: Collection[str] = ()
) -> ModelSpec:
    """Read the `text_config` of a model that `family` is the text part of."""
    whole = family.part_of
    assert whole is not None, family.name
    check_architecture(config, whole.architecture)
    read_quantisation(config)
    text = config.table("text_config")
    text.expect("model_type", family.name)
    ours = [name.removeprefix(whole.prefix) for name in tensor_names]
    spec = model_spec(family, text, ours)
    config.expect("tie_word_embeddings", spec.config.tie_embeddings)
    config.ignore(("model_type", *whole.other_keys, *IGNORED_KEYS))
    config.refuse_rest()
    assert spec.names is not None, family.name
    names = replace(spec.names, prefix=whole.prefix)
    return replace(
        spec,
        names=names,
        sources=parameter_sources(spec.config, names),
        ignored_tensors=tuple(whole.prefix + name for name in spec.ignored_tensors),
        ignored_prefixes=whole.other_prefixes,
    )
