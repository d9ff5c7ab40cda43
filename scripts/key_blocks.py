"""Time decode attention with the keys of a segment in blocks of several sizes, on this CPU.

In each shape, one token of each row attends to a segment, in float32 as in the CPU's cache. The
listed number of layers run one after the other. Each cell is the shortest of several calls, in ms.

    python scripts/key_blocks.py > benchmarks/key_blocks.md
"""

import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from noria.modelzoo.attention.attend import Visibility, attend_dense
from noria.modelzoo.cache.segments import split_blocks
from noria.runtime.devices.machine import describe_machine

SIZES = (96, 64, 48, 32, 16)
SHAPES = (
    (30, 64, 3, 3, 64, 192),
    (8, 64, 8, 4, 128, 192),
    (8, 64, 8, 4, 128, 576),
    (8, 16, 8, 1, 64, 192),
    (8, 16, 2, 7, 64, 2112),
    (8, 64, 3, 8, 96, 192),
)
"""Layers, rows, key/value heads, query heads of each, head size, entries of the segment."""
CALLS = 10

KeysValues = tuple[jax.Array, jax.Array]


def main() -> None:
    machine = describe_machine()
    print("# Keys in blocks of positions\n")
    print(
        f"{machine['processor']}, jax {machine['versions']['jax']}. Made by `python {sys.argv[0]}`."
        "\nDecode attention to a segment of the cache: ms by the positions in a block of keys. In "
        "brackets: the ratio of the\ntime with all keys of a head in one block to this time.\n"
    )
    columns = ["layers, rows, K, G, H, entries", "one block", *map(str, SIZES)]
    print(f"| {' | '.join(columns)} |\n|---|{'--:|' * (len(columns) - 1)}")
    for shape in SHAPES:
        whole = milliseconds(shape, None)
        cells = [", ".join(map(str, shape)), f"{whole:.1f}"]
        for size in SIZES:
            of_blocks = milliseconds(shape, size)
            cells.append(f"{of_blocks:.1f} ({whole / of_blocks:.2f})")
        print(f"| {' | '.join(cells)} |", flush=True)


def milliseconds(shape: Sequence[int], size: int | None) -> float:
    """Return the shortest time of attention in all layers, with keys in blocks of a size."""
    L, B, K, G, H, S = shape
    rng = np.random.default_rng(0)

    def random(*sizes: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(sizes, dtype=np.float32))

    layers = []
    for _ in range(L):
        k_BKHS = random(B, K, H, S)
        k_BKHS = k_BKHS if size is None else jax.block_until_ready(split_blocks(k_BKHS, size))
        layers.append((k_BKHS, random(B, K, S, H)))
    position_BS = jnp.broadcast_to(jnp.arange(S), (B, S))
    visibility = Visibility(jnp.full((B, 1), S), position_BS)

    @jax.jit
    def attend_all(q_BTKGH: jax.Array, layers: list[KeysValues]) -> jax.Array:
        out_BTKGH = q_BTKGH
        for k_BKHS, v_BKSH in layers:
            # each layer waits for the one before, as in a model
            query = q_BTKGH + 1e-3 * out_BTKGH
            out_BTKGH, _ = attend_dense(query, k_BKHS, v_BKSH, visibility)
        return out_BTKGH

    q_BTKGH, times = random(B, 1, K, G, H), []
    for _ in range(1 + CALLS):
        start = time.perf_counter()
        jax.block_until_ready(attend_all(q_BTKGH, layers))
        times.append(time.perf_counter() - start)
    return 1e3 * min(times[1:])


if __name__ == "__main__":
    main()
