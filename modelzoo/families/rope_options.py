"""Reader of the rotary position embedding in config.json, in the old and in the new spelling.

Old: `rope_theta` beside a table `rope_scaling` (or null). New: one table `rope_parameters` that
also has `rope_theta`. If layers with a window have another rotation, the old spelling has a second
number, `rope_local_base_freq`, and the new spelling has a table for each kind of layer. A kind of
scaling that is not implemented is refused by name. Knows nothing of families.
"""

import math
from dataclasses import replace

from ..rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from .config_reader import ConfigReader, UnsupportedModel

MAX_POSITION = 2**30
"""The maximum position: positions are 32-bit integers, and sums of two of them must not
overflow."""

DEFAULT_THETA = 10_000.0
PARTIAL = "partial_rotary_factor"

ROPE_KEYS = frozenset({
    "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim",
    "low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "short_mscale",
    "long_mscale", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta", "alpha",
    "full_attention", "sliding_attention", "chunked_attention",
})  # fmt: skip
"""Keys that some kinds of rotation or some implementations read; all other kinds refuse them."""


def yarn_mscale(factor: float, weight: float) -> float:
    """The factor that keeps attention equally sharp over a context `factor` times as long.

    Source: YaRN, arXiv 2309.00071, equation 22, with the weight that DeepSeek-V2 publishes.
    """
    return 0.1 * weight * math.log(factor) + 1.0


def read_rope(
    config: ConfigReader, default_theta: float = DEFAULT_THETA, *, is_partial: bool = False
) -> RopeConfig:
    """Read the rotation in either spelling; values that are given twice must be equal.

    Args:
      config: The table of config.json.
      default_theta: The base of a file that gives none.
      is_partial: Whether the family may rotate a part of each head; `partial_rope` reads the part.
    """
    table = rope_table(config)
    return _read_table(config, table, "rope_theta", default_theta, is_partial=is_partial)


def read_growing_rope(config: ConfigReader) -> RopeConfig:
    """Read the rotation of a family whose queries may grow with the position."""
    require_rope_table(config)
    table, growth, interval = rope_table(config), 0.0, 1
    if table.has("llama_4_scaling_beta"):
        growth = table.number("llama_4_scaling_beta", above=0.0)
        interval = table.integer("original_max_position_embeddings", maximum=MAX_POSITION)
    table.ignore(("max_position_embeddings",))
    rope = _read_table(config, table, "rope_theta", DEFAULT_THETA)
    return replace(rope, growth=growth, growth_interval=interval)


def require_rope_table(config: ConfigReader) -> None:
    """Refuse a file without rotary options, if the reference then uses those of its own model."""
    if not (config.has("rope_scaling") or config.has("rope_parameters")):
        raise config.error("rope_scaling", "a table of rotary options")


def read_ropes_by_kind(
    config: ConfigReader, default_theta: float, default_local_theta: float | None = None
) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of layers without a window and of layers with a window.

    Without a default for the base of layers with a window, the old spelling has one base for all.
    """
    local_key = "rope_theta" if default_local_theta is None else "rope_local_base_freq"
    default_local_theta = default_local_theta or default_theta
    if not _is_new(config):
        full = read_rope(config, default_theta)
        return full, RopeConfig(config.number(local_key, above=1.0, default=default_local_theta))
    by_kind = config.table("rope_parameters")
    full, sliding = by_kind.table("full_attention"), by_kind.table("sliding_attention")
    by_kind.refuse_rest()
    return (
        _read_table(config, full, "rope_theta", default_theta),
        _read_table(config, sliding, local_key, default_local_theta),
    )


def rope_table(config: ConfigReader) -> ConfigReader:
    """The table of rotary options, in either spelling."""
    return config.table("rope_parameters" if _is_new(config) else "rope_scaling")


def read_theta(config: ConfigReader, table: ConfigReader, outer_key: str, default: float) -> float:
    """The base of the rotation: outside the table, inside it, or in both with the same value."""
    theta = config.number(outer_key, above=1.0, default=default)
    if table.has("rope_theta"):
        inner_theta = table.number("rope_theta", above=1.0)
        if config.has(outer_key) and inner_theta != theta:
            raise table.error("rope_theta", f"the same value as the outer {outer_key} ({theta})")
        theta = inner_theta
    return theta


def read_kind(table: ConfigReader) -> str:
    """The kind of scaling, under its old key, its new key, or both with the same value."""
    kind = table.text("type", default="default")
    if table.has("rope_type"):
        if table.has("type") and table.text("rope_type") != kind:
            raise table.error("rope_type", f"the same value as type ({kind!r})")
        kind = table.text("rope_type")
    return kind


def _is_new(config: ConfigReader) -> bool:
    if config.has("rope_scaling") and config.has("rope_parameters"):
        raise config.error("rope_scaling", "no second spelling beside rope_parameters")
    return config.has("rope_parameters")


def _read_table(
    config: ConfigReader,
    table: ConfigReader,
    outer_key: str,
    default: float,
    *,
    is_partial: bool = False,
) -> RopeConfig:
    theta = read_theta(config, table, outer_key, default)
    for reader in (config, table):
        if reader.has(PARTIAL) and not is_partial:
            reader.expect(PARTIAL, 1.0)
    scaling = _read_scaling(config, table)
    table.ignore_rest(refused=ROPE_KEYS)
    return RopeConfig(theta, scaling)


def _read_scaling(
    config: ConfigReader, table: ConfigReader
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    kind = read_kind(table)
    if kind in ("default", "mrope"):
        # the positions of a text are the same on all axes
        table.ignore(("mrope_section", "mrope_interleaved"))
        return None
    if kind == "dynamic":
        # it changes only what is longer than `max_position_embeddings`, the limit of sequences
        table.number("factor", above=0.0)
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise UnsupportedModel(
            f"{table.name('rope_type')}: expected default, dynamic, linear, llama3, mrope or "
            f"yarn, got {kind!r}, which is not implemented."
        )
    factor = table.number("factor", above=0.0)
    if factor < 1.0:
        raise table.error("factor", "a number not below 1")
    # as in the reference: the value outside the table takes precedence; the default is max_position
    max_position = config.integer("max_position_embeddings", maximum=MAX_POSITION)
    original = table.integer(
        "original_max_position_embeddings", maximum=MAX_POSITION, default=max_position
    )
    original = config.integer(
        "original_max_position_embeddings", maximum=MAX_POSITION, default=original
    )
    if kind == "linear":
        return LinearScaling(factor)
    if kind == "llama3":
        return _read_llama3(table, factor, original)
    return _read_yarn(table, factor, original)


def _read_llama3(table: ConfigReader, factor: float, original: int) -> Llama3Scaling:
    low = table.number("low_freq_factor", above=0.0)
    high = table.number("high_freq_factor", above=0.0)
    if high < low:
        raise table.error("high_freq_factor", f"a number not below low_freq_factor ({low})")
    return Llama3Scaling(factor, low, high, original)


def _read_yarn(table: ConfigReader, factor: float, original: int) -> YarnScaling:
    attention_factor = None
    if table.has("attention_factor"):
        attention_factor = table.number("attention_factor", above=0.0)
    fast = table.number("beta_fast", above=0.0, default=32.0)
    slow = table.number("beta_slow", above=0.0, default=1.0)
    if fast < slow:
        raise table.error("beta_fast", f"a number not below beta_slow ({slow})")
    scales = [
        yarn_mscale(factor, table.number(key, above=0.0))
        for key in ("mscale", "mscale_all_dim")
        if table.has(key)
    ]
    if attention_factor is None and len(scales) == 2:
        attention_factor = scales[0] / scales[1]
    truncate = table.flag("truncate", default=True)
    table.ignore(("finetuned",))  # about training
    return YarnScaling(factor, original, fast, slow, attention_factor, truncate)
