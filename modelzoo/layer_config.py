"""Configuration of a layer: its attention, its feed-forward part and its norms.

Layers with equal configurations differ only in their weights. Knows nothing of other layers, files
or checkpoints.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from .config_values import check_choice, check_count, check_positive
from .errors import UserError
from .latent_config import LatentAttention
from .moe_config import MoeConfig
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


PLAIN_ROPE = RopeConfig()
PLAIN_SCORES = Scores()

Activation = Literal["silu", "gelu", "gelu_tanh"]
"""Activation of the MLP; `gelu_tanh` approximates `gelu` by tanh (Hendrycks, 1606.08415)."""
NormPlacement = Literal["before", "after", "both", "residual"]
"""Placement of the norms of a block: on the inputs of attention and MLP, the outputs, both, or on
the residual stream after each sum, as in the first transformers (1706.03762)."""
QKNorm = Literal["head", "heads", "projection"]
"""Norm of queries and keys: each head separately with one scale for all (`head`), each head
separately with a scale of its own (`heads`), or all heads as one vector (`projection`)."""


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention of a layer, or latent attention."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    window: Window = None
    rope: RopeConfig | NoRope = PLAIN_ROPE
    latent: LatentAttention | None = None
    """Latent attention; None means grouped-query attention."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm | None = None
    """The norm of queries and keys; None means none."""
    has_sinks: bool = False
    """Whether each query head has an attention sink: a learned score in the softmax without a
    value."""
    scores: Scores = PLAIN_SCORES

    def __post_init__(self):
        """Check the sizes."""
        if self.qk_norm is not None:
            check_choice("qk_norm", self.qk_norm, get_args(QKNorm))
        for name in ("num_query_heads", "num_kv_heads", "head_dim"):
            check_count(name, getattr(self, name))
        if self.num_query_heads % self.num_kv_heads:
            raise UserError(
                f"num_query_heads: expected a multiple of num_kv_heads ({self.num_kv_heads}), "
                f"got {self.num_query_heads}."
            )
        if self.latent is not None:
            self._check_latent(self.latent)
        if self.rope_dim % 2:
            raise UserError(f"head_dim: rotary embedding needs an even size, got {self.rope_dim}.")
        if isinstance(self.rope, RopeConfig):
            rotated = self.rope.rotated or self.rope_dim
            if not 2 <= rotated <= self.rope_dim or rotated % 2:
                raise UserError(
                    f"rope.rotated: expected an even number of a head's {self.rope_dim} entries, "
                    f"got {self.rope.rotated}."
                )
        if self.window is not None and window_size(self.window) < 1:
            raise UserError(f"windows: expected positive window sizes, got {self.window}.")

    def _check_latent(self, latent: LatentAttention) -> None:
        """Check that sizes fit latent attention, and that no option of other attention is set."""
        if (self.num_kv_heads, self.head_dim) != (self.num_query_heads, latent.head_dim):
            raise UserError(
                f"latent: expected {self.num_query_heads} num_kv_heads, one a query head, with a "
                f"head_dim of {latent.head_dim}, plain_dim and rope_dim together, got "
                f"{self.num_kv_heads} with {self.head_dim}."
            )
        if isinstance(self.rope, NoRope) or self.rope.growth:
            raise UserError(
                f"latent: expected layers that rotate, without growth of queries, got {self.rope}."
            )
        options = {
            "qkv_bias": self.qkv_bias,
            "output_bias": self.output_bias,
            "qk_norm": self.qk_norm,
            "sinks": self.has_sinks,
        }
        if used := [option for option, value in options.items() if value]:
            raise UserError(f"latent: expected no {', '.join(used)} beside it: not implemented.")

    @property
    def heads_per_kv(self) -> int:
        return self.num_query_heads // self.num_kv_heads

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
    def scaled(self) -> Scores:
        """The options of scores, with an explicit scale.

        Attention cannot derive the scale from its arguments: queries of latents are longer than the
        heads of the model, and a cache may pad heads.
        """
        if self.scores.scale is not None:
            return self.scores
        return replace(self.scores, scale=self.head_dim**-0.5)


@dataclass(frozen=True)
class Mlp:
    """A dense feed-forward part."""

    size: int
    """The hidden size."""
    activation: Activation = "silu"
    is_gated: bool = True
    """Whether the activation is multiplied with a second product, the gate."""
    has_bias: bool = False

    def __post_init__(self):
        """Check the size and the activation."""
        check_count("mlp", self.size)
        check_choice("activation", self.activation, get_args(Activation))


@dataclass(frozen=True)
class Experts:
    """A mixture of experts as the feed-forward part."""

    moe: MoeConfig
    activation: Activation = "silu"
    has_bias: bool = False
    """Whether the products of the shared expert have biases."""

    def __post_init__(self):
        """Check the activation."""
        check_choice("activation", self.activation, get_args(Activation))

    @property
    def shared(self) -> Mlp | None:
        """The shared expert; None without one."""
        if not self.moe.shared_mlp:
            return None
        return Mlp(self.moe.shared_mlp, self.activation, has_bias=self.has_bias)


@dataclass(frozen=True)
class Layer:
    """All by which the blocks of two layers may differ."""

    attention: Attention | None
    """The attention; None in a layer without one."""
    feed_forward: Mlp | Experts | None
    """The feed-forward part; None in a layer without one."""
    norm_placement: NormPlacement = "before"
    has_attention_norm: bool = True
    """Whether attention has a norm before it, where the placement has one."""
    is_parallel: bool = False
    """Whether attention and feed-forward part run in parallel: both read the same norm of the
    residual stream."""

    def __post_init__(self):
        """Check that the layer has its parts, and a known placement of norms."""
        check_choice("norm_placement", self.norm_placement, get_args(NormPlacement))
        parts = self.attention, self.feed_forward
        if parts == (None, None) or (self.is_parallel and None in parts):
            both = "both if they are parallel" if self.is_parallel else "or both"
            raise UserError(f"layers: expected attention, a feed-forward part, {both}, got {self}.")

    @property
    def moe(self) -> MoeConfig | None:
        """The experts; None in a dense layer."""
        return self.feed_forward.moe if isinstance(self.feed_forward, Experts) else None


@dataclass(frozen=True, kw_only=True)
class AlikeOptions:
    """Options that layers have in common."""

    local_rope: RopeConfig | None = None
    """The rotation in layers with a window; None means that they use `rope`, too."""
    latent: LatentAttention | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm | None = None
    sinks: bool = False
    scores: Scores = PLAIN_SCORES
    activation: Activation = "silu"
    is_gated: bool = True
    norm_placement: NormPlacement = "before"
    is_parallel: bool = False
    has_first_norm: bool = True
    """Whether the attention of the first layer has a norm before it, as in other layers."""
    moe: MoeConfig | None = None
    """The experts of sparse layers; None means that every layer is dense."""
    sparse: tuple[bool, ...] | None = None
    """Whether each layer is sparse, if there are experts; None means that all are."""


@dataclass(frozen=True, kw_only=True)
class AlikeLayers(AlikeOptions):
    """Layers that differ only in windows, in the rotation that goes with them, and in experts.

    Most families publish their layers in this form.
    """

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int
    """The hidden size of dense feed-forward parts."""
    windows: tuple[Window, ...]
    """The window of each layer."""
    rope: RopeConfig | NoRope = PLAIN_ROPE

    def __post_init__(self):
        """Check the sizes of which each layer has one."""
        sparse = self.sparse
        if self.moe is not None and sparse is not None and len(sparse) != len(self.windows):
            raise UserError(
                f"sparse: expected {len(self.windows)} entries, one a layer, got {len(sparse)}."
            )
        if not self.is_gated and self.moe is not None:
            raise UserError("is_gated: expected true beside experts, got false.")

    def layers(self) -> tuple[Layer, ...]:
        """The layers, in the order in which they run."""
        return tuple(map(self._layer, range(len(self.windows))))

    def _layer(self, i: int) -> Layer:
        window, sees_all = self.windows[i], self.windows[i] in (None, BothSides())
        attention = Attention(
            self.num_query_heads,
            self.num_kv_heads,
            self.head_dim,
            window,
            self.rope if sees_all or self.local_rope is None else self.local_rope,
            self.latent,
            self.qkv_bias,
            self.output_bias,
            self.qk_norm,
            self.sinks,
            self.scores,
        )
        feed_forward = Mlp(self.mlp, self.activation, self.is_gated, self.mlp_bias)
        if self.moe is not None and (self.sparse is None or self.sparse[i]):
            feed_forward = Experts(self.moe, self.activation, self.mlp_bias)
        has_norm = self.has_first_norm or i > 0
        return Layer(attention, feed_forward, self.norm_placement, has_norm, self.is_parallel)
