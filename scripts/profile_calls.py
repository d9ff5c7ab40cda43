"""Profile a decode call and a prefill call of the embedded model on this CPU, by kind of work.

Times are from jax's profiler. The time of an instruction is that of the thread that executes it,
without the other instructions that the thread executes within it. The work of the library's other
threads is not added. Of several calls, the one with the shortest total counts. The ceilings are the
rate of a large product in the dtype, from `scripts/peers/matmul_ceiling.py`, and the rate at which
all cores together read an array much larger than the caches.

    python scripts/profile_calls.py --output benchmarks/cpu_profile.md
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported: libtpu's profiler needs its chips

import jax
import jax.numpy as jnp
import numpy as np
from call_groups import Groups
from call_times import Call, bound, by_group, table

from noria.compile.build import compile_graph, plan_graphs
from noria.compile.graphs.graph_kinds import EMPTY_STATE
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.targets import find_target
from noria.runtime import session
from noria.runtime.bundles.cpu_kernels import load_kernels
from noria.runtime.checkpoint import open_model
from noria.runtime.devices import backends
from noria.runtime.devices.machine import describe_machine, usable_cores
from noria.runtime.engine.padding import decode_pages, pack_greedy

CALLS, READ_FLOATS = 8, 2**25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--dtypes", nargs="+", default=["bfloat16", "float32"])
    add("--slots", type=int, default=64)
    add("--length", type=int, default=464, help="positions of the longest row")
    add("--prompt", type=int, default=352)
    add("--output", type=Path)
    options = parser.parse_args()
    backends.prepare_jax("cpu")
    load_kernels("cpu", partial(print, file=sys.stderr))
    machine, rate = describe_machine(), read_rate()
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("jax", "jaxlib"))
    page = [
        "# Where the time of a call goes on a CPU\n",
        f"{machine['processor']}, {machine['cores']} cores, {' '.join(machine['instructions'])}; "
        f"{versions}; load {machine['load_average']}.\nMade by `{' '.join(['python', *sys.argv])}`,"
        f" whose docstring says\nwhat is counted how. SmolLM2-135M, {options.slots} slots; a decode"
        f" call of 8 steps up to {options.length} positions,\nand a prompt of {options.prompt} "
        f"tokens.",
    ]
    bounds = []
    for dtype in options.dtypes:
        profiler, ceiling = Profiler(dtype, options), measured_ceiling(dtype)
        calls = {kind: profiler.profile(kind) for kind in ("decode", "prefill")}
        # again, as others may have had the cores
        ceiling, rate = max(ceiling, measured_ceiling(dtype)), max(rate, read_rate())
        for kind, call in calls.items():
            page += table(f"{kind} in {dtype}", call, ceiling)
            bounds.append(f"- {kind} in {dtype}: {bound(call, ceiling, rate)}")
    text = "\n".join([*page, "\n## The bounds that are left\n", *bounds, ""])
    print(text)
    if options.output:
        options.output.write_text(text, "utf-8")


class Profiler:
    """The embedded model in one dtype, with full slots."""

    def __init__(self, dtype: str, options: argparse.Namespace):
        target = find_target("cpu")
        self.placement, self.options = target.placement(), options
        with open_model("smollm2") as files:
            self.model = session.load_model(files, target, session.LoadOptions(dtype))
        self.grid = BucketGrid(options.length, ((options.prompt, 1),), options.slots)

    def profile(self, kind: str) -> Call:
        """The fastest of several calls."""
        dtype = jnp.dtype(self.model.dtype)
        graphs = plan_graphs(self.model.definition, self.grid, self.placement, dtype)
        planned = {graph.key.kind: graph for graph in graphs}
        graph, _ = compile_graph(planned[kind])
        steps = self.grid.steps_per_call if kind == "decode" else 1
        groups = Groups(graph.as_text(), steps)
        state = jax.jit(partial(self._state, planned[EMPTY_STATE.kind].body))()
        arguments = self._arguments(kind)
        found = []
        for number in range(2 + CALLS):
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    state, output = graph(self.model.parameters, state, *arguments)
                    jax.block_until_ready((state, output))
                if number >= 2:
                    found.append(by_group(folder, groups))
        cache = sum(
            x.nbytes for x in jax.tree.leaves(state.cache) if jnp.issubdtype(x.dtype, jnp.floating)
        )
        read = steps * cache if kind == "decode" else 0
        return Call(min(found, key=Counter.total), groups.flops, read)

    def _state(self, make_state: Callable[[], Any]):
        B, state = self.options.slots, make_state()
        length_B = jnp.full(B, self.grid.max_length - (2 + CALLS) * self.grid.steps_per_call)
        return state._replace(
            prompt_length_B=length_B,
            length_B=jnp.copy(length_B),
            limit_B=jnp.full(B, self.grid.max_length + 1),
            is_active_B=jnp.ones(B, bool),
        )

    def _arguments(self, kind: str):
        if kind == "decode":
            return jnp.ones(self.options.slots, bool), jax.device_put(decode_pages(self.grid))
        vocab, bucket = self.model.definition.config.vocab_size, self.grid.prefill[0]
        prompt = [number % 1000 for number in range(self.options.prompt)]
        return jax.device_put(pack_greedy([prompt], 0, bucket, self.grid, vocab))


def measured_ceiling(dtype: str) -> float:
    """GFLOP/s of the fastest large product."""
    script = Path(__file__).resolve().parent / "peers" / "matmul_ceiling.py"
    command = [sys.executable, str(script), str(usable_cores()), dtype]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return max(json.loads(output).values())


def read_rate() -> float:
    """GB/s at which the cores read an array together."""
    parts, seconds = np.ones((usable_cores() or 1, READ_FLOATS), np.float32), []
    with ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(2 * CALLS):
            started = time.perf_counter()
            list(pool.map(np.max, parts))
            seconds.append(time.perf_counter() - started)
    return parts.nbytes / min(seconds) / 1e9


if __name__ == "__main__":
    main()
