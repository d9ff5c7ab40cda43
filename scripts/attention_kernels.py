"""Compare the memory, bytes and flops of XLA's attention and Pallas kernels, for absent TPUs.

The layer has the shape of Llama 3 8B in bfloat16 on one device: 32 query heads over 8 key/value
heads of 128. Nothing runs and nothing is timed. The compiler counts a loop's body once, and the
arguments and results of a kernel once. So the bytes that each moves are counted here by blocks:

- XLA, prefill: the compiler's bytes for one pair of blocks, times the number of pairs with a
  visible position. The compiler does not tell bytes on the chip from bytes off it.
- splash: the bytes between the chip and the memory off it. Queries and results count once, keys
  and values once for every visible pair of blocks.

The figures of whole graphs are the compiler's own: they leave out the reads and operations inside
kernels.

    python scripts/attention_kernels.py > benchmarks/attention_kernels.md
"""

import math
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from noria.compile.abstract_model import AbstractModel
from noria.compile.attention_kernels import AttentionPlan
from noria.compile.build import compile_graph, plan_graphs
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.targets import find_target
from noria.modelzoo.attention.attend import Attend, Visibility, attend_masked, merge
from noria.modelzoo.attention.blockwise import attend_blockwise, block_sizes
from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.kernels import splash
from noria.runtime.files.layout_files import read_layout_table
from noria.sharding.layout import Layout

TARGETS = ("tpu:v5e:2x2", "tpu:v5p:2x2x1")
PROMPTS = (2048, 8192, 32768)
SLOTS = 32
GRAPH_TARGET, LAYOUT, LAYERS = "tpu:v5e:2x4", "weight-stationary-1d@tensor=8", 2
K, G, H = 8, 4, 128
EMBED, MLP, VOCAB = 4096, 14336, 128256
ITEMSIZE = jnp.dtype(jnp.bfloat16).itemsize
Attended = tuple[jax.Array, jax.Array]


class Cost(NamedTuple):
    """The compiler's figures of one graph."""

    temp: int
    bytes: float
    flops: float


def main() -> None:
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "libtpu"))
    print("# Attention kernels for TPU, as compiled\n")
    print(f"{versions}. Made by `python {sys.argv[0]}`; its docstring explains the counts.")
    print("Temporaries do not include arguments and results. A prompt is one row.\n")
    print("## Prefill: XLA's blocks and splash\n")
    print("| target | tokens | XLA temp MB | splash temp MB | XLA moves GB | splash moves GB |")
    print("|---|--:|--:|--:|--:|--:|")
    for target in TARGETS:
        for length in PROMPTS:
            print(f"| {target} | {length} | {prefill_cells(target, length)} |", flush=True)
    print(f"\n## Whole graphs: {LAYERS} layers on {GRAPH_TARGET}, {LAYOUT}, per device\n")
    print(
        "| graph | kernel | temp MB | bytes accessed GB | compiler's GFLOP |\n|---|---|--:|--:|--:|"
    )
    for length in PROMPTS:
        for kernel in ("xla", "splash"):
            cost = graph_cost(length, kernel)
            print(f"| prefill of {length} | {kernel} | {graph_cells(cost)} |", flush=True)


def prefill_cells(target: str, length: int) -> str:
    """Return the cells of one prompt length: temporaries and bytes moved, by XLA and splash."""
    kernels: list[Attend]
    kernels = [attend_blockwise, partial(splash.attend_splash, needs_lse=False)]
    temps = [attention_cost(target, attend, length).temp for attend in kernels]
    block_T, block_S = block_sizes(length, length)
    moved = [
        visible_pairs(length, block_T, block_S) * pair_cost(target, block_T, block_S).bytes,
        splash_bytes(length),
    ]
    return " | ".join([f"{temp / 1e6:.1f}" for temp in temps] + [f"{x / 1e9:.2f}" for x in moved])


def graph_cells(cost: Cost) -> str:
    return f"{cost.temp / 1e6:.1f} | {cost.bytes / 1e9:.2f} | {cost.flops / 1e9:.1f}"


def graph_cost(length: int, kernel: str) -> Cost:
    """Compile the prefill graph of a length as a build does, with the named kernel."""
    config = DecoderConfig.alike(
        vocab_size=VOCAB,
        embed=EMBED,
        mlp=MLP,
        num_query_heads=K * G,
        num_kv_heads=K,
        head_dim=H,
        windows=(None,) * LAYERS,
        max_position=length,
    )
    grid = BucketGrid(length, ((length, 1),), SLOTS)
    placement = find_target(GRAPH_TARGET).placement(Layout.from_table(read_layout_table(LAYOUT)))
    definition = AbstractModel(config, placement.arrangement(config))
    asked = AttentionPlan(prefill=kernel)
    dtype = jnp.dtype(jnp.bfloat16)
    graphs = plan_graphs(definition, grid, placement, dtype, attention=asked)
    compiled, _ = compile_graph(next(graph for graph in graphs if graph.key.kind == "prefill"))
    return cost_of(compiled)


def attention_cost(target: str, attend: Attend, length: int) -> Cost:
    """Compile a graph that holds only the attention of one prompt."""

    def graph(
        q_BTKGH: jax.Array, k_BKHS: jax.Array, v_BKSH: jax.Array, query_BT: jax.Array,
        key_BS: jax.Array,
    ) -> jax.Array:  # fmt: skip
        seen = Visibility(query_BT, key_BS, None, is_in_order=True)
        return attend(q_BTKGH, k_BKHS, v_BKSH, seen)[0]

    positions = [((1, length), jnp.int32)] * 2
    return compiled_cost(target, graph, [*_arrays(length, length), *positions])


@cache
def pair_cost(target: str, block_T: int, block_S: int) -> Cost:
    """Compile the work of `attend_blockwise` on one pair of blocks: attend, then merge."""

    def graph(
        q_BTKGH: jax.Array, k_BKHS: jax.Array, v_BKSH: jax.Array, mask_BTS: jax.Array,
        out_BTKGH: jax.Array, lse_BTKG: jax.Array,
    ) -> Attended:  # fmt: skip
        part = attend_masked(q_BTKGH, k_BKHS, v_BKSH, mask_BTS)
        return merge([(out_BTKGH, lse_BTKG), part])

    heads = (1, block_T, K, G)
    others = [((1, block_T, block_S), jnp.bool_), ((*heads, H), jnp.float32), (heads, jnp.float32)]
    return compiled_cost(target, graph, [*_arrays(block_T, block_S), *others])


def compiled_cost(
    target: str, graph: Callable[..., Any], shapes: list[tuple[tuple[int, ...], Any]]
) -> Cost:
    """Compile a graph for the first device of a target."""
    on_device = SingleDeviceSharding(find_target(target).devices[0])
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=on_device) for shape in shapes]
    return cost_of(jax.jit(graph).lower(*arguments).compile())


def cost_of(compiled: jax.stages.Compiled) -> Cost:
    said = compiled.cost_analysis() or {}
    temp = compiled.memory_analysis().temp_size_in_bytes
    return Cost(temp, said.get("bytes accessed", 0.0), said.get("flops", 0.0))


def visible_pairs(length: int, block_T: int, block_S: int) -> int:
    """Return the number of block pairs with a visible position, for a causal prompt."""
    ends = (min((i + 1) * block_T, length) for i in range(math.ceil(length / block_T)))
    return sum(math.ceil(end / block_S) for end in ends)


def splash_bytes(length: int) -> int:
    """Return the bytes that splash moves to the chip and back, by its block specifications."""
    block = splash.prompt_block_size(length)
    pairs = visible_pairs(length, block, block)
    return K * G * (2 * length + 2 * block * pairs) * H * ITEMSIZE


def _arrays(num_queries: int, num_keys: int) -> list[tuple[tuple[int, ...], Any]]:
    shapes = (1, num_queries, K, G, H), (1, K, H, num_keys), (1, K, num_keys, H)
    return [(shape, jnp.bfloat16) for shape in shapes]


if __name__ == "__main__":
    main()
