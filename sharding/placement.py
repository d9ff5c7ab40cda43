"""How parameters lie on a target's devices: sharding, and memory layout where it matters.

Knows nothing of graphs or files. Loader and lowering ask here, so they cannot disagree.
"""

from collections.abc import Iterable, Mapping

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

_TABLES = ("embedding.table", "head.table")


def parameter_placement(
    names: Iterable[str], platform: str, sharding: Sharding
) -> dict[str, Sharding | Format]:
    """Where and how each parameter lies.

    On TPU the default layout of a `[V, D]` table is transposed when D is not a multiple of 128;
    every call would then copy it to gather rows, so tables are asked for row by row.
    """
    row_major = Format(Layout(major_to_minor=(0, 1)), sharding)
    return {
        name: row_major if platform == "tpu" and name in _TABLES else sharding for name in names
    }


def place(
    parameters: Mapping[str, jax.Array], platform: str, sharding: Sharding
) -> dict[str, jax.Array]:
    """Bring loaded parameters into the layout that the graphs expect; a no-op off TPU."""
    placements = parameter_placement(parameters, platform, sharding)
    return {name: jax.device_put(x, placements[name]) for name, x in parameters.items()}
