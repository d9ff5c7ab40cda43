"""What a mixture of experts is, and how its tokens are dispatched: frozen data."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Scoring = Literal["softmax", "softmax_of_chosen", "sigmoid"]
"""How scores follow from the router's logits: over all experts, those chosen, or each alone."""


@dataclass(frozen=True)
class ExpertGroups:
    """Experts in groups, of which a token may choose from the best (DeepSeek-V2, 2405.04434)."""

    count: int
    chosen: int
    best: int
    """A group ranks by the sum of this many of its best scores."""


@dataclass(frozen=True)
class Routing:
    """Token-choice routing (Shazeer et al. 2017, 1701.06538): each token takes its best experts."""

    num_experts: int
    num_chosen: int
    scoring: Scoring = "softmax"
    is_normalized: bool = True
    """Whether the weights of the chosen experts are scaled to a sum of one."""
    scale: float = 1.0
    """On the weights, after that."""
    groups: ExpertGroups | None = None
    has_bias: bool = False
    """Whether the router's logits have a bias."""
    has_choice_bias: bool = False
    """Whether a bias is added to scores for the choice alone (DeepSeek-V3, 2412.19437, eq. 16)."""
    weighs_input: bool = False
    """Whether weights multiply what experts read, not what they write (Llama 4)."""

    def __post_init__(self):
        if self.scoring not in get_args(Scoring):
            raise ValueError(
                f"routing.scoring: expected one of {get_args(Scoring)}, got {self.scoring!r}."
            )
        available = self.num_experts
        if self.groups is not None:
            count, chosen, best = self.groups.count, self.groups.chosen, self.groups.best
            if count < 1 or self.num_experts % count or not 1 <= chosen <= count:
                raise ValueError(
                    f"routing.groups: expected a divisor of {self.num_experts} experts and no "
                    f"more chosen groups than there are, got {self.groups}."
                )
            if not 1 <= best <= self.num_experts // count:
                raise ValueError(
                    f"routing.groups.best: expected 1 to {self.num_experts // count}, got {best}."
                )
            available = self.num_experts // count * chosen
        if not 1 <= self.num_chosen <= available:
            raise ValueError(
                f"routing.num_chosen: expected 1 to {available} experts, got {self.num_chosen}."
            )
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"routing.scale: expected a number above 0, got {self.scale!r}.")


@dataclass(frozen=True)
class ClampedUnit:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, both clamped before (GPT-OSS, 2508.10925)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoeConfig:
    """The sparse layers of a decoder."""

    routing: Routing
    mlp: int
    """Hidden size of one expert."""
    layers: tuple[bool, ...]
    """Whether each layer is sparse; the others have a dense MLP."""
    shared_mlp: int = 0
    """Hidden size of the expert that every token takes; none for 0."""
    has_shared_gate: bool = False
    """Whether a sigmoid of the token weighs the shared expert."""
    has_bias: bool = False
    """Whether the experts' products have biases."""
    clamped: ClampedUnit | None = None
    """In place of the decoder's gated unit."""

    def __post_init__(self):
        for name, size, least in (("mlp", self.mlp, 1), ("shared_mlp", self.shared_mlp, 0)):
            if not isinstance(size, int) or size < least:
                raise ValueError(f"moe.{name}: expected an integer from {least}, got {size!r}.")
        if not any(self.layers):
            raise ValueError("moe.layers: expected a sparse layer, got none. Leave moe out.")


class Tiles(NamedTuple):
    """Sizes of the products of experts, which a platform chooses."""

    fewest: int = 4
    most: int = 64
    """Rows of one product are between these two, and all are powers of two."""
    of_mean: float = 8
    """The rows of a product are the mean load of an expert over this, or less. A power of two, too;
    with one half, most experts of twice the mean load still run as one product."""
    piece_bytes: int | None = 4 * 2**20
    """Bytes of gate and up of one expert, at most, that are brought into a cache for all tiles of
    the expert. None: each tile reads the expert's weights from main memory."""


ANY_TILES = Tiles()

DispatchKind = Literal["lossless", "capacity", "ragged"]


@dataclass(frozen=True)
class Dispatch:
    """How the tokens of a graph come to their experts; always in arrays of static size.

    `lossless` sorts the choices by expert and runs as many tiles of each as its load fills, so
    nothing is ever dropped. `capacity` sets the same number of rows aside for each expert
    (Lepikhin et al. 2020, 2006.16668), and drops what comes after they are full: choices have them
    in the order of rows, tokens and rank. `ragged` is lossless through `jax.lax.ragged_dot`, the
    reference.
    """

    kind: DispatchKind = "lossless"
    capacity_factor: float | None = None
    """Rows set aside over the mean load of an expert, `M*k/E`; of `capacity` alone."""
    tiles: Tiles = ANY_TILES

    def __post_init__(self):
        least, most, of_mean, _ = self.tiles
        is_power = of_mean > 0 and math.frexp(of_mean)[0] == 0.5
        is_power = is_power and all(size.bit_count() == 1 for size in (least, most))
        if not (0 < least <= most and is_power):
            raise ValueError(f"tiles: expected growing powers of two, got {self.tiles}.")
        if self.kind not in get_args(DispatchKind):
            raise ValueError(
                f"dispatch: expected one of {get_args(DispatchKind)}, got {self.kind!r}."
            )
        factor = self.capacity_factor
        if self.kind != "capacity":
            if factor is not None:
                raise ValueError(
                    f"capacity_factor: expected none with {self.kind!r}, got {factor!r}. Leave it "
                    f"out, or choose 'capacity'."
                )
        # bool is an int in Python; `capacity_factor = true` is a mistake
        elif (
            not isinstance(factor, int | float)
            or isinstance(factor, bool)
            or not math.isfinite(factor)
            or factor <= 0
        ):
            raise ValueError(f"capacity_factor: expected a number above 0, got {factor!r}.")

    def tile(self, num_choices: int, num_experts: int) -> int:
        """Rows of a tile: a part or a multiple of the mean load or less, within `tiles`.

        With `tiles.of_mean` of 8, at most an eighth of the rows of an expert with the mean load is
        padding, unless that makes fewer rows than `tiles.fewest`.
        """
        part = int(num_choices / (self.tiles.of_mean * num_experts))
        power = 1 << max(part.bit_length() - 1, 0)
        return min(max(power, self.tiles.fewest), self.tiles.most)

    def capacity(self, num_tokens: int, num_chosen: int, num_experts: int) -> int:
        """Rows of each expert, in whole tiles; no more than tokens, which take it once at most."""
        assert self.capacity_factor is not None
        num_choices = num_tokens * num_chosen
        rows = math.ceil(self.capacity_factor * num_choices / num_experts)
        rows = min(rows, num_tokens)
        tile = self.tile(num_choices, num_experts)
        return -(-rows // tile) * tile


LOSSLESS = Dispatch()
