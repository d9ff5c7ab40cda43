"""Reader of rotations of a part of each head, from the first feature on, in config.json.

Knows nothing of families.
"""

from dataclasses import replace

from ..rope_config import RopeConfig
from .config_reader import ConfigReader, UnsupportedModel
from .hugging_face import MAX_EMBED, MAX_HEAD_DIM, MAX_HEADS
from .rope_options import DEFAULT_THETA, PARTIAL, read_rope, rope_table


def read_partial_rope(
    config: ConfigReader, default_share: float, default_theta: float = DEFAULT_THETA
) -> RopeConfig:
    """Read the rotation and the share of features that it rotates."""
    rotated = read_rotated(config, rope_table(config), default_share)
    return replace(read_rope(config, default_theta, is_partial=True), rotated=rotated)


def read_rotated(config: ConfigReader, table: ConfigReader, default_share: float = 1.0) -> int:
    """Read the number of rotated features of a head."""
    num_heads = config.integer("num_attention_heads", maximum=MAX_HEADS)
    default = config.integer("hidden_size", maximum=MAX_EMBED) // num_heads or None
    head_dim = config.integer("head_dim", maximum=MAX_HEAD_DIM, default=default)
    share = config.number(PARTIAL, above=0.0, maximum=1.0, default=default_share)
    if table.has(PARTIAL):
        inner = table.number(PARTIAL, above=0.0, maximum=1.0)
        if config.has(PARTIAL) and inner != share:
            raise table.error(PARTIAL, f"the same value as the outer {PARTIAL} ({share})")
        share = inner
    rotated = int(head_dim * share)
    if rotated < 2 or rotated % 2:
        raise UnsupportedModel(
            f"{PARTIAL}: expected an even number of rotated entries, got {rotated} of {head_dim}."
        )
    return rotated
