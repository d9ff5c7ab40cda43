"""Measure the temporary memory of attention, computed at once and block by block.

One head of 64, float32, causal, one row of T tokens. Bytes come from XLA's `memory_analysis()`.
Rabe and Staats (2021, 2112.05682) publish a factor of 59 between the two, for inference at T =
16384.

    python scripts/attention_memory.py > benchmarks/attention_memory.md
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp

from noria.modelzoo.attention.attend import Attend, Visibility, attend_dense
from noria.modelzoo.attention.blockwise import BLOCK_SCORES, QUERY_BLOCK, attend_blockwise
from noria.runtime.devices.machine import describe_machine

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
BLOCKS = ((128, 128), (256, 512), (512, 1024), (1024, 4096))
HEAD_DIM = 64


def main() -> None:
    machine = describe_machine()
    made_on = f"{machine['processor']}, jax {machine['versions']['jax']}"
    print("# What attention needs beside its arguments and results\n")
    print(
        f"{made_on}. Made by `python {sys.argv[0]}`.\n"
        f"One head of {HEAD_DIM}, float32, causal, one row: MiB, and in brackets how many times "
        "less that is than all at once.\n"
        f"Blocks are queries x keys, {QUERY_BLOCK}x{BLOCK_SCORES // QUERY_BLOCK} by default.\n"
    )
    names = ["all at once", *(f"{queries}x{keys}" for queries, keys in BLOCKS)]
    print(f"| tokens | {' | '.join(names)} |\n|--:|{'--:|' * len(names)}")
    for length in LENGTHS:
        dense = temporary_bytes(attend_dense, length)
        cells = [f"{dense / 2**20:.0f}"]
        for queries, keys in BLOCKS:
            attend = partial(attend_blockwise, query_block=queries, block_scores=queries * keys)
            size = temporary_bytes(attend, length)
            cells.append(f"{size / 2**20:.1f} ({dense / size:.0f})")
        print(f"| {length} | {' | '.join(cells)} |", flush=True)


def temporary_bytes(attend: Attend, length: int) -> int:
    """Return the bytes of temporaries of a compiled graph that holds only attention."""
    shapes = ((1, length, 1, 1, HEAD_DIM), (1, 1, HEAD_DIM, length), (1, 1, length, HEAD_DIM))
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    position_BT = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def graph(
        q_BTKGH: jax.Array, k_BKHS: jax.Array, v_BKSH: jax.Array, position_BT: jax.Array
    ) -> jax.Array:
        return attend(q_BTKGH, k_BKHS, v_BKSH, Visibility(position_BT, position_BT))[0]

    compiled = jax.jit(graph).lower(*arguments, position_BT).compile()
    return compiled.memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    main()
