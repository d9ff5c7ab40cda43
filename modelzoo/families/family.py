"""What one family of models adds to the decoder that all of them share.

A family is data: names, and one function from its published options to ours. Knows nothing of
files; `hugging_face.py` and `gguf.py` read what the families have in common.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..config import (
    AS_PUBLISHED,
    NO_MULTIPLIERS,
    PLAIN_SCORES,
    Activation,
    Arrangement,
    DecoderConfig,
    LatentAttention,
    Multipliers,
    NormKind,
    NormPlacement,
    NoRope,
    QKNorm,
    RopeConfig,
    Scores,
    Window,
)
from ..moe.config import MoeConfig
from .config_reader import ConfigReader
from .expert_sources import ExpertNames
from .mapping import ParameterSource, TensorPrefix
from .sources import TensorNames, parameter_sources


@dataclass(frozen=True)
class Options:
    """The options of `DecoderConfig` in which families differ."""

    windows: tuple[Window, ...] | None = None
    """None means that no layer has one."""
    rope: RopeConfig | NoRope | None = None
    """None means that it is published as in most families."""
    local_rope: RopeConfig | None = None
    latent: LatentAttention | None = None
    max_position: int | None = None
    """None means as published."""
    mlp: int | None = None
    """Of dense layers; None means as published."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_kind: QKNorm = "head"
    sinks: bool = False
    norm: NormKind = "rms"
    norm_placement: NormPlacement = "before"
    is_parallel: bool = False
    scores: Scores = PLAIN_SCORES
    multipliers: Multipliers = NO_MULTIPLIERS
    logit_cap: float | None = None
    norm_offset: float = 0.0
    activation: Activation = "silu"
    moe: MoeConfig | None = None

    def with_biases(self, config: ConfigReader) -> "Options":
        """The same, with the biases that `attention_bias` of config.json asks for."""
        has_bias = config.flag("attention_bias", default=False)
        return replace(self, qkv_bias=has_bias, output_bias=has_bias)

    def decoder_fields(self) -> dict[str, Any]:
        """By name, as `DecoderConfig` takes them."""
        return {option.name: getattr(self, option.name) for option in fields(self)}


ReadOptions = Callable[[ConfigReader, int], Options]
"""The options of a configuration with so many layers."""


def always(options: Options) -> ReadOptions:
    """Options that no configuration changes."""
    return lambda config, num_layers: options


@dataclass(frozen=True)
class WholeModel:
    """A model of more than text that a family is published as a part of."""

    name: str
    """`model_type` of config.json, whose `text_config` is the family's."""
    architecture: str
    prefixes: tuple[TensorPrefix, ...]
    """The prefixes of the family's tensor names in the whole model, the usual form first."""
    other_prefixes: tuple[str, ...]
    """What those of the other parts begin with."""
    other_keys: tuple[str, ...]
    """Keys of config.json that are about the other parts."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of keys that config.json may leave out, outside of its `text_config`."""


@dataclass(frozen=True)
class Family:
    """A family's names, and its options as functions of a configuration and the layer count."""

    name: str
    """`model_type` of config.json and, unless another is given, `general.architecture` of GGUF."""
    architecture: str
    """The class in `architectures` of config.json."""
    hf_options: ReadOptions
    gguf_options: ReadOptions | None = None
    """None where GGUF knows no such architecture, or it is another family that reads it."""
    hf_defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of keys that config.json may leave out; all other sizes must be given."""
    hf_names: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TensorNames` that differ from the usual ones."""
    hf_experts: tuple[ExpertNames, ...] = ()
    """The forms in which experts are published, the usual one first; empty for the usual ones."""
    hf_unused_tensors: Callable[[ConfigReader, int], tuple[str, ...]] | None = None
    """Beginnings of the names of tensors that may be there and that no forward pass needs, as a
    function of a configuration and the layer count."""
    hf_interleaved_key: str | None = None
    """The option of config.json that says whether rotated pairs lie side by side; on by default."""
    part_of: WholeModel | None = None
    gguf_architecture: str | None = None
    gguf_names: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TensorNames` that differ from the usual ones."""
    gguf_interleaved: bool = False
    """Whether GGUF stores the rows of query and key heads with rotated pairs side by side."""

    @property
    def gguf_name(self) -> str:
        return self.gguf_architecture or self.name


@dataclass(frozen=True)
class ModelSpec:
    """A published model as a decoder and where its parameters come from."""

    family: str
    config: DecoderConfig
    sources: tuple[ParameterSource, ...]
    """One for every parameter of the decoder."""
    ignored_tensors: tuple[str, ...] = ()
    """Tensors that may be present and fill no parameter: they follow from the configuration."""
    names: TensorNames | None = None
    """None where tensors are parameters in the canonical arrangement, under their own names."""
    arrangement: Arrangement = AS_PUBLISHED
    ignored_prefixes: tuple[str, ...] = ()
    """What the names of other tensors begin with that fill none: parts that are not read."""
    ignored_keys: tuple[str, ...] = ()
    """Keys of the published configuration that neither noria nor the reference reads,
    as `key = value`."""

    def arranged(self, arrangement: Arrangement) -> "ModelSpec":
        """The same model with its parameters arranged for a layout.

        The sources follow the arrangement, unless the tensors are parameters already: those are
        rearranged by whoever reads them.
        """
        arrangement.check(self.config)
        sources = self.sources
        if self.names is not None:
            sources = parameter_sources(self.config, self.names, arrangement)
        return replace(self, sources=sources, arrangement=arrangement)
