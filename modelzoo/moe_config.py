"""Configuration of mixtures of experts and of their dispatch, as frozen dataclasses."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from .config_values import check_choice
from .errors import UserError

Scoring = Literal["softmax", "softmax_of_chosen", "sigmoid"]
"""The function from router logits to scores: a softmax over all experts, a softmax over the chosen
experts, or a sigmoid of each logit."""


@dataclass(frozen=True)
class ExpertGroups:
    """Group-limited routing: a token may choose only experts of its best groups.

    Source: DeepSeek-V2 (2405.04434).
    """

    count: int
    """The number of groups."""
    chosen: int
    """The number of groups from which a token may choose."""
    best: int
    """The number of best scores of a group that are added; groups are ranked by the sum."""


@dataclass(frozen=True)
class Routing:
    """Token-choice routing: each token takes its best experts (Shazeer et al. 2017, 1701.06538)."""

    num_experts: int
    num_chosen: int
    scoring: Scoring = "softmax"
    is_normalized: bool = True
    """Whether the weights of the chosen experts are scaled to a sum of one."""
    scale: float = 1.0
    """Factor on the weights, applied after they are normalized."""
    groups: ExpertGroups | None = None
    has_bias: bool = False
    """Whether the router's logits have a bias."""
    has_choice_bias: bool = False
    """Whether a bias is added to scores only to choose experts (DeepSeek-V3, 2412.19437, eq.
    16)."""
    weighs_input: bool = False
    """Whether weights multiply the inputs of experts instead of their outputs (Llama 4)."""

    def __post_init__(self):
        check_choice("routing.scoring", self.scoring, get_args(Scoring))
        available = self.num_experts
        if self.groups is not None:
            count, chosen, best = self.groups.count, self.groups.chosen, self.groups.best
            if count < 1 or self.num_experts % count or not 1 <= chosen <= count:
                raise UserError(
                    f"routing.groups: expected a divisor of {self.num_experts} experts and no "
                    f"more chosen groups than there are, got {self.groups}."
                )
            if not 1 <= best <= self.num_experts // count:
                raise UserError(
                    f"routing.groups.best: expected 1 to {self.num_experts // count}, got {best}."
                )
            available = self.num_experts // count * chosen
        if not 1 <= self.num_chosen <= available:
            raise UserError(
                f"routing.num_chosen: expected 1 to {available} experts, got {self.num_chosen}."
            )
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise UserError(f"routing.scale: expected a number above 0, got {self.scale!r}.")


@dataclass(frozen=True)
class ClampedUnit:
    """The gated unit `(up + 1) * gate * sigmoid(alpha * gate)` of GPT-OSS (2508.10925).

    First, `gate` is clamped to at most `limit`, and `up` to at least `-limit` and at most `limit`.
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoeConfig:
    """The experts of a sparse layer."""

    routing: Routing
    mlp: int
    """The hidden size of one expert."""
    shared_mlp: int = 0
    """The hidden size of the shared expert, which every token takes; 0 means no shared expert."""
    has_shared_gate: bool = False
    """Whether the output of the shared expert is multiplied by a sigmoid gate."""
    has_bias: bool = False
    """Whether the products of experts have biases."""
    clamped: ClampedUnit | None = None
    """The gated unit of experts; None means the gated unit of the decoder."""

    def __post_init__(self):
        for name, size, minimum in (("mlp", self.mlp, 1), ("shared_mlp", self.shared_mlp, 0)):
            if not isinstance(size, int) or size < minimum:
                raise UserError(f"moe.{name}: expected an integer from {minimum}, got {size!r}.")


class Tiles(NamedTuple):
    """Sizes of expert products, which depend on the platform."""

    min_rows: int = 4
    """The minimum rows of one product, a power of two."""
    max_rows: int = 64
    """The maximum rows of one product, a power of two."""
    mean_divisor: float = 8
    """A power of two. A product has at most as many rows as the mean load of an expert divided by
    this, within `min_rows` and `max_rows`. With 1/2 it has up to twice the mean load."""
    piece_bytes: int | None = 4 * 2**20
    """The maximum bytes of gate and up weights of one expert that are loaded into the cache of the
    processor for all tiles of the expert. None means that each tile reads the weights from main
    memory."""


ANY_TILES = Tiles()

DispatchKind = Literal["lossless", "capacity", "ragged"]


@dataclass(frozen=True)
class Dispatch:
    """Dispatch of the tokens of a graph to their experts, in arrays of static size.

    `lossless` sorts choices by expert, and runs as many tiles of each expert as its load needs, so
    it never drops a choice. `capacity` reserves the same number of rows for each expert (Lepikhin
    et al. 2020, 2006.16668), and drops the choices past its capacity, in the order of rows, tokens
    and rank. `ragged` is the reference: lossless, by `jax.lax.ragged_dot`.
    """

    kind: DispatchKind = "lossless"
    """The kind of dispatch of tokens to experts. `lossless` drops no choice. `capacity` reserves a
    fixed number of rows for each expert, and drops further choices. `ragged` is the lossless
    reference, by `jax.lax.ragged_dot`."""
    capacity_factor: float | None = None
    """Only for `capacity`: the number of rows reserved for each expert, divided by the mean load of
    an expert. The mean load is `M*k/E`, for M tokens, k choices of a token and E experts. Unit:
    ratio."""
    tiles: Tiles = ANY_TILES

    def __post_init__(self):
        min_rows, max_rows, mean_divisor, _ = self.tiles
        are_powers = mean_divisor > 0 and math.frexp(mean_divisor)[0] == 0.5
        are_powers &= all(size.bit_count() == 1 for size in (min_rows, max_rows))
        if not (0 < min_rows <= max_rows and are_powers):
            raise UserError(f"tiles: expected growing powers of two, got {self.tiles}.")
        check_choice("dispatch", self.kind, get_args(DispatchKind))
        factor = self.capacity_factor
        if self.kind != "capacity":
            if factor is not None:
                raise UserError(
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
            raise UserError(f"capacity_factor: expected a number above 0, got {factor!r}.")

    def tile(self, num_choices: int, num_experts: int) -> int:
        """The rows of a tile: the mean load divided by `tiles.mean_divisor`, within the limits.

        With a divisor of 8, at most an eighth of the rows of an expert with the mean load is
        padding, unless `tiles.min_rows` is larger.
        """
        part = int(num_choices / (self.tiles.mean_divisor * num_experts))
        power = 1 << max(part.bit_length() - 1, 0)
        return min(max(power, self.tiles.min_rows), self.tiles.max_rows)

    def capacity(self, num_tokens: int, num_chosen: int, num_experts: int) -> int:
        """The rows of each expert, in whole tiles; a token needs at most one row of an expert."""
        assert self.capacity_factor is not None
        num_choices = num_tokens * num_chosen
        rows = math.ceil(self.capacity_factor * num_choices / num_experts)
        rows = min(rows, num_tokens)
        tile = self.tile(num_choices, num_experts)
        return -(-rows // tile) * tile


LOSSLESS = Dispatch()
