"""Description of a family of models: its names, and its options of the common decoder.

A family is data: names, and functions from its published options to ours. `hugging_face.py` and
`gguf.py` read the options that families have in common. Knows nothing of files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..config import (
    AS_PUBLISHED,
    NO_MULTIPLIERS,
    Arrangement,
    DecoderConfig,
    Multipliers,
    NormKind,
    TokenInputs,
)
from ..layer_config import AlikeOptions, Window
from ..rope_config import NoRope, RopeConfig
from .classifiers import LAST_STATE, Classifier
from .config_reader import ConfigReader
from .expert_sources import ExpertNames
from .mapping import ParameterSource, TensorPrefix
from .rope_options import DEFAULT_THETA
from .sources import TensorNames, parameter_sources


@dataclass(frozen=True, kw_only=True)
class Options(AlikeOptions):
    """The options of `DecoderConfig.alike` that differ between families."""

    windows: tuple[Window, ...] | None = None
    """The window of each layer; None means that no layer has a window."""
    rope: RopeConfig | NoRope | None = None
    """The rotation; None means that it is read as in most families."""
    max_position: int | None = None
    """The maximum length of a sequence; None means the published one."""
    mlp: int | None = None
    """The hidden size of dense layers; None means the published one."""
    norm: NormKind = "rms"
    multipliers: Multipliers = NO_MULTIPLIERS
    logit_cap: float | None = None
    norm_offset: float = 0.0
    norm_bias: bool = False
    norm_epsilon: float | None = None
    """Epsilon of norms; None means that it is read as in most families."""
    inputs: TokenInputs | None = None

    def with_biases(self, config: ConfigReader) -> "Options":
        """The same options, with biases if `attention_bias` of config.json is set."""
        has_bias = config.flag("attention_bias", default=False)
        return replace(self, qkv_bias=has_bias, output_bias=has_bias)

    def decoder_fields(self) -> dict[str, Any]:
        """The options as arguments of `DecoderConfig.alike`."""
        return {option.name: getattr(self, option.name) for option in fields(self)}


ReadOptions = Callable[[ConfigReader, int], Options]
"""A function from a configuration and its number of layers to options."""


def fixed_options(options: Options) -> ReadOptions:
    """A function that returns the same options for every configuration."""
    return lambda config, num_layers: options


@dataclass(frozen=True)
class Family:
    """The names of a family, and its options as functions of a configuration and a layer count."""

    name: str
    """`model_type` of config.json, and `general.architecture` of GGUF without
    `gguf_architecture`."""
    architecture: str
    """The class in `architectures` of config.json."""
    hf_options: ReadOptions
    gguf_options: ReadOptions | None = None
    """None if GGUF has no such architecture, or another family reads it."""
    hf_defaults: Mapping[str, object] = field(default_factory=dict)
    """Default values of keys of config.json; all other sizes must be given."""
    hf_names: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TensorNames` that differ from those of most families."""
    hf_theta: float = DEFAULT_THETA
    """The default base of the rotation."""
    hf_experts: tuple[ExpertNames, ...] = ()
    """The published forms of experts, the usual one first; empty for the forms of most families."""
    hf_unused_tensors: Callable[[ConfigReader, int], tuple[str, ...]] | None = None
    """A function from a configuration and a layer count to the prefixes of tensor names that a
    forward pass does not need."""
    hf_interleaved_key: str | None = None
    """The key of config.json that says whether rotated pairs are adjacent features; its default is
    true."""
    hf_prefix: str = "model."
    """The beginning of the names of all tensors but those of heads. Models without a head may leave
    it out."""
    hf_other_heads: tuple[str, ...] = ()
    """Classes with a head that is not read, such as that of masked tokens."""
    hf_classifier: Classifier = LAST_STATE
    """The head of the family's models for sequence classification."""
    gguf_architecture: str | None = None
    gguf_names: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TensorNames` that differ from those of most families."""
    gguf_interleaved: bool = False
    """Whether GGUF stores query and key heads with adjacent rows as rotated pairs."""

    @property
    def gguf_name(self) -> str:
        return self.gguf_architecture or self.name


@dataclass(frozen=True)
class WholeModel:
    """A model of more than text, with a family as its text part."""

    name: str
    """`model_type` of config.json."""
    architecture: str
    texts: Mapping[str, Family]
    """The families of the text part, by `model_type` of `text_config`."""
    prefixes: tuple[TensorPrefix, ...]
    """The prefixes of the family's tensor names in the whole model, the usual form first."""
    other_prefixes: tuple[str, ...]
    """The prefixes of tensor names of the other parts."""
    other_keys: tuple[str, ...]
    """Keys of config.json for the other parts."""
    other_tokens: tuple[str, ...] = ()
    """Keys of config.json with ids that stand for images, videos or sounds."""
    is_flat: bool = False
    """Whether files without `text_config` have its keys beside those of the other parts."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Default values of keys of config.json outside of its `text_config`."""


@dataclass(frozen=True)
class ModelSpec:
    """A published model: its decoder and the sources of its parameters."""

    family: str
    config: DecoderConfig
    sources: tuple[ParameterSource, ...]
    """One source for every parameter of the decoder."""
    ignored_tensors: tuple[str, ...] = ()
    """Tensors that may be present and are not read, as no forward pass needs them."""
    names: TensorNames | None = None
    """Published tensor names; None if tensors are parameters in the canonical arrangement."""
    arrangement: Arrangement = AS_PUBLISHED
    ignored_prefixes: tuple[str, ...] = ()
    """Prefixes of tensors that are not read: those of other parts of a multimodal model."""
    other_tokens: Mapping[str, int] = field(default_factory=dict)
    """Ids that stand for images, videos or sounds, by their keys in config.json."""
    ignored_keys: tuple[str, ...] = ()
    """Keys of the published configuration that neither noria nor the reference reads, as
    `key = value`."""

    @property
    def embedding_tensor(self) -> str:
        """The published name of the table of embeddings."""
        assert self.names is not None, "the tensors have published names"
        return self.names.prefix.to_whole(f"{self.names.embedding}.weight")

    @property
    def head_tensor(self) -> str:
        """The published name of the head, which a model with tied embeddings need not have."""
        assert self.names is not None, "the tensors have published names"
        return self.names.prefix.to_whole(f"{self.names.head}.weight")

    def untied(self) -> "ModelSpec":
        """The same model with its published head beside the table of embeddings."""
        assert self.names is not None, "the tensors have published names"
        config = replace(self.config, tie_embeddings=False)
        ignored = tuple(name for name in self.ignored_tensors if name != self.head_tensor)
        sources = parameter_sources(config, self.names, self.arrangement)
        return replace(self, config=config, sources=sources, ignored_tensors=ignored)

    def first_layers(self, count: int) -> "ModelSpec":
        """The same model with only its first `count` layers; tensors of others are not read."""
        config = self.config.first_layers(count)
        left_out = tuple(f"layers.{i}." for i in range(count, self.config.num_layers))
        kept, others = [], set[str]()
        for source in self.sources:
            if source.parameter.startswith(left_out):
                others.update(name for part in source.parts for name in part.tensors)
            else:
                kept.append(source)
        ignored = (*self.ignored_tensors, *sorted(others))
        return replace(self, config=config, sources=tuple(kept), ignored_tensors=ignored)

    def arranged(self, arrangement: Arrangement) -> "ModelSpec":
        """The same model with its parameters arranged for a layout.

        Sources follow the arrangement. If tensors are parameters already, the sources stay the
        same, and the loader rearranges the parameters.
        """
        arrangement.check(self.config)
        sources = self.sources
        if self.names is not None:
            sources = parameter_sources(self.config, self.names, arrangement)
        return replace(self, sources=sources, arrangement=arrangement)
