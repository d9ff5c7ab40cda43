"""Configuration of a decoder: sizes and options, as frozen dataclasses.

Knows nothing of files or checkpoints.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

from .config_values import check_choice, check_count, check_positive
from .errors import UserError
from .layer_config import AlikeLayers, Attention, BothSides, Layer
from .moe_config import MoeConfig
from .pooling_config import MEAN, Pooling


@dataclass(frozen=True)
class TokenInputs:
    """Learned vectors that are added to the embeddings of tokens, and the norm of the sum."""

    positions: int = 0
    """The number of learned positions; 0 without any."""
    first_position: int = 0
    """The learned position of the first token."""
    token_types: int = 0
    """The number of token types; 0 without any. The second text of a pair has type 1, if there are
    two."""


@dataclass(frozen=True)
class Multipliers:
    """Constant factors inside the model; a factor of 1 adds no operation."""

    embedding: float = 1.0
    """Factor on embeddings, rounded to their dtype, as Gemma was trained."""
    residual: float = 1.0
    """Factor on the outputs of attention and MLP, before they are added to the residual stream."""
    logits: float = 1.0
    """Factor on logits."""

    def __post_init__(self):
        factors = {"embedding": self.embedding, "residual": self.residual, "logits": self.logits}
        check_positive("multipliers", **factors)


NO_MULTIPLIERS = Multipliers()

NormKind = Literal["rms", "layer"]
"""Root mean square norm, or layer norm, which also subtracts the mean."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of one transformer: a decoder, or an encoder with `BothSides` windows."""

    vocab_size: int
    embed: int
    layers: tuple[Layer, ...]
    """The layers, in the order in which they run."""
    max_position: int
    """The maximum length of a sequence, prompt and output, that the model was published for."""
    norm: NormKind = "rms"
    norm_epsilon: float = 1e-5
    norm_offset: float = 0.0
    """Offset that is added to the stored scales of norms."""
    norm_bias: bool = False
    has_final_norm: bool = True
    """Whether the residual stream is normed after the last layer."""
    inputs: TokenInputs | None = None
    """The vectors that are added to the embeddings of tokens; None means none, and no norm."""
    tie_embeddings: bool = False
    has_head: bool = True
    """Whether the model has an output head, which computes the logits of tokens."""
    pooling: Pooling = MEAN
    """The pooling of embedding graphs; other graphs do not use it."""
    multipliers: Multipliers = NO_MULTIPLIERS
    logit_cap: float | None = None
    """Soft cap: logits become `cap * tanh(logit / cap)`."""

    @classmethod
    def alike(cls, **options: Any) -> "DecoderConfig":
        """A decoder whose layers are alike: it has the fields of `AlikeLayers` for `layers`."""
        names = {field.name for field in fields(AlikeLayers)}
        alike = AlikeLayers(**{name: options.pop(name) for name in names & set(options)})
        options.setdefault("has_final_norm", alike.norm_placement != "residual")
        return cls(layers=alike.layers(), **options)

    def __post_init__(self):
        check_choice("norm", self.norm, get_args(NormKind))
        check_positive("config", logit_cap=self.logit_cap)
        for name in ("vocab_size", "embed", "num_layers", "max_position"):
            check_count(name, getattr(self, name))
        if not self.attentions:
            raise UserError("layers: expected a layer with attention, got none.")
        if self.norm_bias and any(attention.qk_norm for attention in self.attentions):
            raise UserError("norm_bias: expected false beside qk_norm, not implemented, got true.")
        experts = dict.fromkeys(layer.moe for layer in self.layers if layer.moe is not None)
        if len(experts) > 1:
            raise UserError(
                f"layers: expected the same experts in all sparse layers, got {len(experts)} kinds."
            )

    def __hash__(self) -> int:
        # configurations are keys of what predictions look up for every call
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention of each layer that has one."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @cached_property
    def attention_kinds(self) -> Mapping[Attention, int]:
        """The number of layers with each kind of attention."""
        return Counter(self.attentions)

    @cached_property
    def moe(self) -> MoeConfig | None:
        """The experts of sparse layers; None in a dense model."""
        return next((layer.moe for layer in self.layers if layer.moe is not None), None)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The indices of the layers with experts."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.moe is not None)

    @property
    def lacks_generation(self) -> str | None:
        """The reason why the model cannot generate tokens; None if it can."""
        if not self.has_head:
            return "it has no output head"
        if any(isinstance(attention.window, BothSides) for attention in self.attentions):
            return "its tokens see later ones"
        return None

    def map_attention(self, change: Callable[[Attention], Attention]) -> "DecoderConfig":
        """The same decoder with the attention of each layer changed."""
        layers = (
            layer if layer.attention is None else replace(layer, attention=change(layer.attention))
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    def first_layers(self, count: int) -> "DecoderConfig":
        """The same decoder with only its first `count` layers."""
        return replace(self, layers=self.layers[:count])


@dataclass(frozen=True)
class Arrangement:
    """Arrangement of weights and cache for a layout and a build: the same model in other shapes."""

    head_shards: int = 1
    """The number of shards of query heads. A key/value head has copies, side by side, if there are
    more shards than heads; each copy serves a part of its query heads."""
    padded_vocab: int | None = None
    """Rows of the token tables, with zeros past the vocabulary; None means vocab_size."""
    scan_layers: bool = False
    """Whether layers that repeat a pattern of kinds run in a loop, with their weights stacked in
    one array for each layer of the pattern (`modelzoo.layer_groups`)."""
    head_multiple: int = 1
    """The cache pads heads with zeros to a multiple of this size."""
    packs_codes: bool = True
    """Whether two int4 codes of a weight share a byte; otherwise they are stored as int8."""
    cache_codes: str | None = None
    """The codes of cache entries (`cache.entry_codes`); None for float entries."""
    panel_columns: int | None = None
    """The columns of panels in which weights of products are stored (`weights.packed_weight`); None
    for weights in the order of their axes."""
    code_lanes: int | None = None
    """The number of which the columns of weights in codes are a multiple, if products with codes
    read them in panels, too; None if they do not."""

    def __post_init__(self):
        for name in ("head_shards", "padded_vocab", "head_multiple"):
            if (size := getattr(self, name)) is not None:
                check_count(name, size)

    def check(self, config: DecoderConfig) -> None:
        """Check that the weights of a configuration can be arranged this way.

        Raises:
          ValueError: The copies do not divide the query heads of a key/value head, or the padded
            vocabulary is too small.
        """
        for attention in config.attentions:
            copies = self.kv_copies(attention.num_kv_heads)
            if (num_queries := attention.heads_per_kv) % copies:
                raise UserError(
                    f"head_shards: expected copies of a key/value head that divide its "
                    f"{num_queries} query heads, got {copies}. Split the heads over fewer devices."
                )
        if self.padded_vocab is not None and self.padded_vocab < config.vocab_size:
            raise UserError(
                f"padded_vocab: expected at least the {config.vocab_size} tokens of the "
                f"vocabulary, got {self.padded_vocab}. Padding adds rows and drops none."
            )

    def kv_copies(self, num_kv_heads: int) -> int:
        """The copies of each key/value head in weights."""
        return head_copies(num_kv_heads, self.head_shards)

    def cache_dim(self, attention: Attention) -> int:
        """The size of a cached head, including the zeros that pad it."""
        multiple = self.head_multiple
        if self.cache_codes == "int4" and attention.latent is not None:
            # both halves of a latent share bytes
            multiple *= 2
        return -(-attention.cache_dim // multiple) * multiple


def head_copies(num_kv_heads: int, num_shards: int) -> int:
    """Copies of each key/value head that give every shard of the query heads its own heads."""
    return math.lcm(num_kv_heads, num_shards) // num_kv_heads


AS_PUBLISHED = Arrangement()
"""The canonical arrangement, in which checkpoints are stored: no copies and no padding."""
