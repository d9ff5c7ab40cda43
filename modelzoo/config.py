"""What a decoder is: sizes and options, as frozen data. Knows nothing of files or checkpoints."""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from .moe.config import MoeConfig


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (position interpolation, Chen et al. 2023, 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths stretched by `factor`, short ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnScaling:
    """NTK-by-parts interpolation with a temperature (YaRN, Peng et al. 2023, arXiv 2309.00071)."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Factor on cosines and sines; None means the paper's `0.1 * ln(factor) + 1`."""
    truncate: bool = True
    """Whether the borders of the ramp are rounded to whole dimensions, as the paper's code does."""


@dataclass(frozen=True)
class FactorScaling:
    """Each pair's frequency divided by its own factor (LongRoPE, Ding et al. 2024, 2402.13753).

    Also how GGUF publishes the scaling of Llama 3.1.
    """

    factors: tuple[float, ...]
    attention_factor: float = 1.0
    """On cosines and sines."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864)."""

    theta: float = 10_000.0
    scaling: LinearScaling | Llama3Scaling | YarnScaling | FactorScaling | None = None
    rotated: int | None = None
    """How many entries of a head turn, the first ones; None means all."""
    norm_epsilon: float | None = None
    """Of the root mean square norm, without scale, of each turned head; None means no norm."""


@dataclass(frozen=True)
class NoRope:
    """No rotation: what a token sees is all that tells its position (2305.19466).

    Queries at position p may grow, to `1 + scale * ln(1 + floor((p + 1) / interval))` times what
    they are, so that attention over many keys stays sharp (Nakanishi 2025, 2501.19399; Llama 4).
    """

    scale: float = 0.0
    interval: int = 1

    def __post_init__(self):
        if not (math.isfinite(self.scale) and self.scale >= 0) or self.interval < 1:
            raise ValueError(
                f"rope: expected a scale of at least 0 and an interval of at least 1, got {self}."
            )


@dataclass(frozen=True)
class Chunk:
    """Sequences are cut at multiples of `size`: a token sees what its own piece holds so far."""

    size: int

    def __str__(self) -> str:
        return f"chunks of {self.size}"


Window = int | Chunk | None
"""What a token sees, itself included: so many latest positions, its chunk's, or all of them."""


def window_size(window: int | Chunk) -> int:
    """The most positions that a token sees."""
    return window.size if isinstance(window, Chunk) else window


@dataclass(frozen=True)
class Scores:
    """How attention scores follow from products of queries and keys."""

    scale: float | None = None
    """None means `head_dim ** -0.5` (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1)."""

    cap: float | None = None
    """Scores become `cap * tanh(score / cap)` (Bello et al. 2016, 1611.09940, section 5)."""

    def __post_init__(self):
        _require_positive("scores", scale=self.scale, cap=self.cap)


@dataclass(frozen=True)
class Multipliers:
    """Constant factors inside the model; a factor of one is no operation at all."""

    embedding: float = 1.0
    """On the rows of the token table, rounded to their dtype, as Gemma was trained."""
    residual: float = 1.0
    """On what attention and MLP add to the residual stream."""
    logits: float = 1.0

    def __post_init__(self):
        factors = {"embedding": self.embedding, "residual": self.residual, "logits": self.logits}
        _require_positive("multipliers", **factors)


def _require_positive(of: str, **numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and not (math.isfinite(number) and number > 0):
            raise ValueError(f"{of}.{name}: expected a finite number above 0, got {number!r}.")


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1): sizes.

    Keys and values of all heads are made from one latent a token. A head of queries and keys is
    `plain_dim` entries of its own and `rope_dim` rotated ones, of which all heads share one key.
    """

    rank: int
    """Entries of the latent of keys and values."""
    plain_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None
    """Entries of the latent that queries are made from; None means the residual stream itself."""
    norm_epsilon: float = 1e-6
    """Of the norms of latents."""

    def __post_init__(self):
        _require_positive("latent", norm_epsilon=self.norm_epsilon)
        for name in ("rank", "plain_dim", "rope_dim", "value_dim", "query_rank"):
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or size < 1):
                raise ValueError(f"latent.{name}: expected a positive integer, got {size!r}.")

    @property
    def head_dim(self) -> int:
        """Entries of a head of queries and keys."""
        return self.plain_dim + self.rope_dim

    @property
    def cache_dim(self) -> int:
        """Numbers that the cache holds of a token and layer."""
        return self.rank + self.rope_dim


PLAIN_SCORES = Scores()
NO_MULTIPLIERS = Multipliers()

Activation = Literal["silu", "gelu_tanh"]
"""Of the MLP's gate; `gelu_tanh` is the approximation by tanh (Hendrycks, Gimpel 1606.08415)."""
NormPlacement = Literal["before", "after", "both"]
"""Where a block norms: what attention and MLP read, what they write, or both."""
NormKind = Literal["rms", "layer"]
"""Root mean square, or the same around the mean: layer norm without bias."""
QKNorm = Literal["head", "heads", "projection"]
"""How queries and keys are normed: each head alone, all with one scale; each head alone, with a
scale of its own; or all heads as one."""


_CHOICES = {
    "qk_norm_kind": QKNorm,
    "norm_placement": NormPlacement,
    "activation": Activation,
    "norm": NormKind,
}


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of one decoder-only transformer."""

    vocab_size: int
    embed: int
    mlp: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[Window, ...]
    """One entry a layer."""
    max_position: int
    """Longest sequence (prompt and output) the model was published for."""
    norm: NormKind = "rms"
    norm_epsilon: float = 1e-5
    norm_offset: float = 0.0
    """Added to the scales of norms as they are stored."""
    activation: Activation = "silu"
    rope: RopeConfig | NoRope = RopeConfig()
    local_rope: RopeConfig | None = None
    """Of layers that have a window; None means that `rope` is for them too."""
    latent: LatentAttention | None = None
    """None means that every head's keys and values are kept."""
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_kind: QKNorm = "head"
    sinks: bool = False
    """Whether each query head has a learned score that joins the softmax and adds no value."""
    norm_placement: NormPlacement = "before"
    is_parallel: bool = False
    """Whether attention and MLP read one norm and are added together; it stands before them."""
    scores: Scores = PLAIN_SCORES
    multipliers: Multipliers = NO_MULTIPLIERS
    logit_cap: float | None = None
    """Logits become `cap * tanh(logit / cap)`."""
    moe: MoeConfig | None = None
    """None means that every layer is dense."""

    def __post_init__(self):
        for name, options in _CHOICES.items():
            if getattr(self, name) not in get_args(options):
                raise ValueError(
                    f"{name}: expected one of {get_args(options)}, got {getattr(self, name)!r}."
                )
        _require_positive("config", logit_cap=self.logit_cap)
        sizes = {
            name: getattr(self, name)
            for name in (
                "vocab_size",
                "embed",
                "mlp",
                "num_query_heads",
                "num_kv_heads",
                "head_dim",
                "num_layers",
                "max_position",
            )
        }
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: expected a positive integer, got {size!r}.")
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
        for window in self.windows:
            if window is not None and window_size(window) < 1:
                raise ValueError(f"windows: expected positive window sizes, got {window}.")

    def _check_latent(self, latent: LatentAttention) -> None:
        """Latent attention has a shape of its own, and none of the options of other heads."""
        if (self.num_kv_heads, self.head_dim) != (self.num_query_heads, latent.head_dim):
            raise ValueError(
                f"latent: expected {self.num_query_heads} num_kv_heads, one a query head, with a "
                f"head_dim of {latent.head_dim}, plain_dim and rope_dim together, got "
                f"{self.num_kv_heads} with {self.head_dim}."
            )
        if isinstance(self.rope, NoRope):
            raise ValueError(f"latent: expected layers that rotate, got {self.rope}.")
        options = ("qkv_bias", "output_bias", "qk_norm", "sinks")
        if asked := [option for option in options if getattr(self, option)]:
            raise ValueError(f"latent: expected no {', '.join(asked)} beside it, none implemented.")

    def rope_of(self, window: Window) -> RopeConfig | NoRope:
        """The rotation in layers of this window."""
        return self.rope if window is None or self.local_rope is None else self.local_rope

    @property
    def rope_dim(self) -> int:
        """Entries of a head that rotation is for."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def cache_dim(self) -> int:
        """Numbers of one head that the cache holds of a token: of a key, of a value, or of both."""
        return self.head_dim if self.latent is None else self.latent.cache_dim

    @property
    def attention_scores(self) -> Scores:
        """The scores, with their scale.

        It does not always follow from what attention is given: queries of latents are longer than
        the head whose size it follows from, and a cache may keep wider heads.
        """
        if self.scores.scale is not None:
            return self.scores
        return replace(self.scores, scale=self.head_dim**-0.5)

    def first_layers(self, count: int) -> "DecoderConfig":
        """The same decoder with its first layers alone."""
        moe = self.moe
        if moe is not None:
            layers = moe.layers[:count]
            moe = replace(moe, layers=layers) if any(layers) else None
        return replace(self, windows=self.windows[:count], moe=moe)

    @property
    def layer_kinds(self) -> tuple[tuple[Window, bool], ...]:
        """Each layer's window, and whether it is sparse: layers of one kind differ in weights."""
        is_sparse = self.moe.layers if self.moe else (False,) * self.num_layers
        return tuple(zip(self.windows, is_sparse, strict=True))

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def heads_per_kv(self) -> int:
        return self.num_query_heads // self.num_kv_heads


@dataclass(frozen=True)
class Arrangement:
    """How weights and cache are arranged for a layout and a build: one model in other shapes."""

    kv_copies: int = 1
    """Each key/value head stored this often, side by side; its queries are shared out in order."""
    padded_vocab: int | None = None
    """Rows of the token tables, those past the vocabulary zero; None means vocab_size."""
    scan_layers: bool = False
    """Whether layers that repeat a pattern of kinds have their weights in one array for each place
    of the pattern, to run in a loop (`modelzoo.layer_groups`)."""
    head_multiple: int = 1
    """The cache keeps heads of a multiple of this size; zeros follow what a head has."""
    key_blocks: tuple[int, ...] = ()
    """Positions that a block of keys in the cache may have (`modelzoo.key_blocks`); without any,
    the keys of a head lie in one block."""

    def __post_init__(self):
        for name in ("kv_copies", "padded_vocab", "head_multiple"):
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or size < 1):
                raise ValueError(f"{name}: expected a positive integer, got {size!r}.")

    def check(self, config: DecoderConfig) -> None:
        """Raise ValueError if weights of this configuration cannot be arranged so."""
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
        """Numbers that the cache keeps of one head of a token."""
        return -(-config.cache_dim // self.head_multiple) * self.head_multiple


AS_PUBLISHED = Arrangement()
"""The canonical arrangement, in which checkpoints are: each key/value head once, a row a token."""
