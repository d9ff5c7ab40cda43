"""The text part of models that read more than text: the decoder of a family, inside another model.

Text alone asks nothing of the other parts: their tables are not read, nor are their tensors, which
are known by the beginnings of their names. Knows nothing of files.
"""

from collections.abc import Collection
from dataclasses import replace

from .config_reader import ConfigReader
from .family import Family, ModelSpec, WholeModel
from .hugging_face import IGNORED_KEYS, NEUTRAL_VALUES, check_architecture, model_spec
from .mapping import Beginning
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
    text = config.table("text_config", family.hf_defaults)
    text.expect("model_type", family.name)
    beginning = _beginning(whole, tensor_names)
    spec = model_spec(family, text, [beginning.alone_of(name) for name in tensor_names])
    # the reference ties by the outer key
    if config.flag("tie_word_embeddings", default=False) != spec.config.tie_embeddings:
        raise config.error("tie_word_embeddings", f"{spec.config.tie_embeddings}, as in the text")
    config.ignore(("model_type", *whole.other_keys, *IGNORED_KEYS))
    config.expect_of_unread(NEUTRAL_VALUES)
    config.ignore_rest()
    assert spec.names is not None, family.name
    names = replace(spec.names, beginning=beginning)
    return replace(
        spec,
        names=names,
        sources=parameter_sources(spec.config, names),
        ignored_tensors=tuple(beginning.in_whole(name) for name in spec.ignored_tensors),
        ignored_prefixes=whole.other_prefixes,
        ignored_keys=tuple(config.ignored),
    )


def _beginning(whole: WholeModel, tensor_names: Collection[str]) -> Beginning:
    """The form of the tensor names; the usual form if no name has one."""
    usual, *others = whole.beginnings
    for other in others:
        if any(name.startswith(other.whole) for name in tensor_names):
            return other
    return usual
