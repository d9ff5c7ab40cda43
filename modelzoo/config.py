"""Configuration of a decoder: sizes and options, as frozen dataclasses.

Knows nothing of files or checkpoints.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from .config_values import check_count, check_positive
from .latent_config import LatentAttention
from .moe_config import MoeConfig
from .pooling_config import MEAN, Pooling
from .rope_config import NoRope, RopeConfig


@dataclass(frozen=True)
class Chunk:
    """Chunked attention: sequences are cut at multiples of `size`; a token sees only its chunk."""

    size: int

    def __str__(self) -> str:
        return f"chunks of {self.size}"


@dataclass(frozen=True)
class BothSides:
    """Attention in both directions, as in encoders: a token also sees later tokens."""

    reach: int | None = None
    """The largest distance of a token that is seen; None means that all are seen."""

    def __str__(self) -> str:
        return "both directions" if self.reach is None else f"{self.reach} in both directions"


Window = int | Chunk | BothSides | None
"""The positions that a token sees, itself included: a number of latest ones, its chunk, those of
`BothSides`, or all up to itself."""


UNLIMITED = 2**31 - 1


def window_size(window: int | Chunk | BothSides) -> int:
    """The maximum number of positions that a token sees."""
    if isinstance(window, BothSides):
        return UNLIMITED if window.reach is None else 2 * window.reach + 1
    return window.size if isinstance(window, Chunk) else window


@dataclass(frozen=True)
class Scores:
    """Options of attention scores, which are computed from products of queries and keys."""

    scale: float | None = None
    """Factor on products; None means `head_dim ** -0.5` (Vaswani et al. 2017, 1706.03762,
    3.2.1)."""

    cap: float | None = None
    """Soft cap: scores become `cap * tanh(score / cap)` (Bello et al. 2016, 1611.09940, section
    5)."""

    def __post_init__(self):
        check_positive("scores", scale=self.scale, cap=self.cap)


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


PLAIN_ROPE = RopeConfig()
PLAIN_SCORES = Scores()
NO_MULTIPLIERS = Multipliers()

Activation = Literal["silu", "gelu", "gelu_tanh"]
"""Activation of the MLP; `gelu_tanh` approximates `gelu` by tanh (Hendrycks, 1606.08415)."""
NormPlacement = Literal["before", "after", "both", "residual"]
"""Placement of the norms of a block: on the inputs of attention and MLP, the outputs, both, or on
the residual stream after each sum, as in the first transformers (1706.03762)."""
NormKind = Literal["rms", "layer"]
"""Root mean square norm, or layer norm, which also subtracts the mean."""
QKNorm = Literal["head", "heads", "projection"]
"""Norm of queries and keys: each head separately with one scale for all (`head`), each head
separately with a scale of its own (`heads`), or all heads as one vector (`projection`)."""


_CHOICES = {
    "qk_norm_kind": QKNorm,
    "norm_placement": NormPlacement,
    "activation": Activation,
    "norm": NormKind,
}


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of one transformer: a decoder, or an encoder with `BothSides` windows."""

    vocab_size: int
    embed: int
    mlp: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[Window, ...]
    """The window of each layer."""
    max_position: int
    """The maximum length of a sequence, prompt and output, that the model was published for."""
    norm: NormKind = "rms"
    norm_epsilon: float = 1e-5
    norm_offset: float = 0.0
    """Offset that is added to the stored scales of norms."""
    norm_bias: bool = False
    activation: Activation = "silu"
    is_gated: bool = True
    """Whether the MLP multiplies its activation with a second product, the gate."""
    inputs: TokenInputs | None = None
    """The vectors that are added to the embeddings of tokens; None means none, and no norm."""
    has_first_norm: bool = True
    """Whether the attention of the first layer has a norm before it, as in other layers."""
    rope: RopeConfig | NoRope = PLAIN_ROPE
    local_rope: RopeConfig | None = None
    """The rotation in layers with a window; None means that they use `rope`, too."""
    latent: LatentAttention | None = None
    """Latent attention; None means grouped-query attention."""
    tie_embeddings: bool = False
    has_head: bool = True
    """Whether the model has an output head, which computes the logits of tokens."""
    pooling: Pooling = MEAN
    """The pooling of embedding graphs; other graphs do not use it."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_kind: QKNorm = "head"
    sinks: bool = False
    """Whether each query head has an attention sink: a learned score in the softmax without a
    value."""
    norm_placement: NormPlacement = "before"
    is_parallel: bool = False
    """Whether attention and MLP run in parallel: both read the same norm of the residual stream."""
    scores: Scores = PLAIN_SCORES
    multipliers: Multipliers = NO_MULTIPLIERS
    logit_cap: float | None = None
    """Soft cap: logits become `cap * tanh(logit / cap)`."""
    moe: MoeConfig | None = None
    """The sparse layers; None means that every layer is dense."""

    def __post_init__(self):
        for name, options in _CHOICES.items():
            if getattr(self, name) not in get_args(options):
                raise ValueError(
                    f"{name}: expected one of {get_args(options)}, got {getattr(self, name)!r}."
                )
        check_positive("config", logit_cap=self.logit_cap)
        sizes = ("vocab_size", "embed", "mlp", "num_query_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "num_layers", "max_position"):
            check_count(name, getattr(self, name))
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"num_query_heads: expected a multiple of num_kv_heads ({self.num_kv_heads}), "
                f"got {self.num_query_heads}."
            )
        if self.latent is not None:
            self._check_latent(self.latent)
        if self.rope_dim % 2:
            raise ValueError(f"head_dim: rotary embedding needs an even size, got {self.rope_dim}.")
        if self.moe is not None and len(self.moe.layers) != self.num_layers:
            raise ValueError(
                f"moe.layers: expected {self.num_layers} entries, one a layer, got "
                f"{len(self.moe.layers)}."
            )
        rotations = [x for x in (self.rope, self.local_rope) if isinstance(x, RopeConfig)]
        for rope in rotations:
            rotated = rope.rotated or self.rope_dim
            if not 2 <= rotated <= self.rope_dim or rotated % 2:
                raise ValueError(
                    f"rope.rotated: expected an even number of a head's {self.rope_dim} entries, "
                    f"got {rope.rotated}."
                )
        if self.norm_bias and self.qk_norm:
            raise ValueError("norm_bias: expected false beside qk_norm, not implemented, got true.")
        if not self.is_gated and self.moe is not None:
            raise ValueError("is_gated: expected true beside experts, got false.")
        for window in self.windows:
            if window is not None and window_size(window) < 1:
                raise ValueError(f"windows: expected positive window sizes, got {window}.")

    def _check_latent(self, latent: LatentAttention) -> None:
        """Check that sizes fit latent attention, and that no option of other attention is set."""
        if (self.num_kv_heads, self.head_dim) != (self.num_query_heads, latent.head_dim):
            raise ValueError(
                f"latent: expected {self.num_query_heads} num_kv_heads, one a query head, with a "
                f"head_dim of {latent.head_dim}, plain_dim and rope_dim together, got "
                f"{self.num_kv_heads} with {self.head_dim}."
            )
        if isinstance(self.rope, NoRope):
            raise ValueError(f"latent: expected layers that rotate, got {self.rope}.")
        options = ("qkv_bias", "output_bias", "qk_norm", "sinks")
        if used := [option for option in options if getattr(self, option)]:
            raise ValueError(f"latent: expected no {', '.join(used)} beside it: not implemented.")

    def rope_of(self, window: Window) -> RopeConfig | NoRope:
        """The rotation in layers with this window."""
        sees_all = window is None or window == BothSides()
        return self.rope if sees_all or self.local_rope is None else self.local_rope

    @property
    def rope_dim(self) -> int:
        """The number of head features to which rotation may apply."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def cache_dim(self) -> int:
        """The size of a cached head: of a key, of a value, or of a latent, which is both."""
        return self.head_dim if self.latent is None else self.latent.cache_dim

    @property
    def entry_splits(self) -> tuple[int, ...]:
        """The features of a cache entry at which the parts after the first one begin.

        Codes of each part have a scale of their own. A latent and its rotated key are two parts,
        and other entries have one.
        """
        return () if self.latent is None else (self.latent.rank,)

    @property
    def attention_scores(self) -> Scores:
        """The options of scores, with an explicit scale.

        Attention cannot derive the scale from its arguments: queries of latents are longer than the
        heads of the model, and a cache may pad heads.
        """
        if self.scores.scale is not None:
            return self.scores
        return replace(self.scores, scale=self.head_dim**-0.5)

    @property
    def lacks_generation(self) -> str | None:
        """The reason why the model cannot generate tokens; None if it can."""
        if not self.has_head:
            return "it has no output head"
        if any(isinstance(window, BothSides) for window in self.windows):
            return "its tokens see later ones"
        return None

    def first_layers(self, count: int) -> "DecoderConfig":
        """The same decoder with only its first `count` layers."""
        return self.select_layers(slice(count))

    def select_layers(self, layers: slice) -> "DecoderConfig":
        """The same decoder with only some of its layers."""
        moe = self.moe
        if moe is not None:
            moe = replace(moe, layers=moe.layers[layers]) if any(moe.layers[layers]) else None
        return replace(self, windows=self.windows[layers], moe=moe)

    @property
    def layer_kinds(self) -> tuple[tuple[Window, bool], ...]:
        """The window of each layer, and whether it is sparse."""
        is_sparse = self.moe.layers if self.moe else (False,) * self.num_layers
        return tuple(zip(self.windows, is_sparse, strict=True))

    @property
    def block_kinds(self) -> tuple[tuple[bool, Window, bool], ...]:
        """All by which the blocks of two layers may differ: whether attention has a norm before it,
        and the kind of the layer."""
        kinds = enumerate(self.layer_kinds)
        return tuple((self.has_first_norm or i > 0, *kind) for i, kind in kinds)

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def heads_per_kv(self) -> int:
        return self.num_query_heads // self.num_kv_heads


@dataclass(frozen=True)
class Arrangement:
    """Arrangement of weights and cache for a layout and a build: the same model in other shapes."""

    kv_copies: int = 1
    """Copies of each key/value head, side by side; each copy serves a part of its query heads."""
    padded_vocab: int | None = None
    """Rows of the token tables, with zeros past the vocabulary; None means vocab_size."""
    scan_layers: bool = False
    """Whether layers that repeat a pattern of kinds run in a loop, with their weights stacked in
    one array for each layer of the pattern (`modelzoo.layer_groups`)."""
    head_multiple: int = 1
    """The cache pads heads with zeros to a multiple of this size."""
    key_blocks: tuple[int, ...] = ()
    """The sizes that a block of cached keys may have, in positions (`modelzoo.cache.segments`); if
    empty, the keys of a head are one block."""
    packs_codes: bool = True
    """Whether two int4 codes of a weight share a byte; otherwise they are stored as int8."""
    cache_codes: str | None = None
    """The dtype of cache entries in codes (`cache.entry_codes`); None for float entries."""

    def __post_init__(self):
        for name in ("kv_copies", "padded_vocab", "head_multiple"):
            if (size := getattr(self, name)) is not None:
                check_count(name, size)

    def check(self, config: DecoderConfig) -> None:
        """Check that the weights of a configuration can be arranged this way.

        Raises:
          ValueError: The copies do not divide the query heads of a key/value head, or the padded
            vocabulary is too small.
        """
        if config.heads_per_kv % self.kv_copies:
            raise ValueError(
                f"kv_copies: expected a divisor of the {config.heads_per_kv} query heads of each "
                f"key/value head, got {self.kv_copies}. Split the heads over fewer devices."
            )
        if self.padded_vocab is not None and self.padded_vocab < config.vocab_size:
            raise ValueError(
                f"padded_vocab: expected at least the {config.vocab_size} tokens of the "
                f"vocabulary, got {self.padded_vocab}. Padding adds rows and drops none."
            )

    def cache_dim(self, config: DecoderConfig) -> int:
        """The size of a cached head, including the zeros that pad it."""
        return -(-config.cache_dim // self.head_multiple) * self.head_multiple


AS_PUBLISHED = Arrangement()
"""The canonical arrangement, in which checkpoints are stored: no copies and no padding."""
