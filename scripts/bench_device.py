"""Measure decode and prefill of a random 8B model against this accelerator's measured ceilings.

If torch is installed, transformers' compiled static-cache path runs for comparison. The shape is
Llama 3.1 8B's, unless flags change it. Parameters are made on the device, so the host needs no
memory for them. Decode is measured with the graph that a job runs: several steps a call, every slot
live, its cache nearly full. Prefill is measured with the prefill graph. The ceilings are measured,
too: the bytes a second that a copy reads and writes, and the operations a second of products in the
same dtype. A decode step must read the cache of all rows and every weight except the
embedding table. The reported fractions are those of the two ceilings that a call reaches.

    python scripts/bench_device.py --output benchmarks/device.json
    python scripts/bench_device.py --target cpu --layers 2 --embed 64 --mlp 128 --query-heads 4 \\
        --kv-heads 2 --head-dim 16 --vocab 256 --batches 1,4 --context 64 --prompt 64 --product 256
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEPS_PER_CALL = 8


def main() -> None:
    options = _parse()
    _check_packages()
    # Run this before jax starts: jax keeps most of a GPU's memory until its process ends.
    peer = _run_transformers(options)
    import jax

    from noria.compile.targets import find_target
    from noria.runtime.devices.machine import describe_machine

    options.target = options.target or jax.default_backend()
    bench = DeviceBench(find_target(options.target), options)
    ceilings = bench.ceilings()
    print(json.dumps(ceilings), flush=True)
    rows = [bench.decode(batch) for batch in options.batches]
    rows.append(bench.prefill(options.prompt))
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine(),
        "settings": {key: str(value) for key, value in vars(options).items()},
        "ceilings": ceilings,
        "noria": [row | _fractions(row, ceilings) for row in rows],
        "transformers": peer,
    }
    table = markdown(report)
    print(f"\n{table}")
    if options.output:
        text = json.dumps(report, indent=1) + "\n"
        options.output.with_suffix(".json").write_text(text, encoding="utf-8")
        options.output.with_suffix(".md").write_text(table, encoding="utf-8")


class DeviceBench:
    """One model's parameters on the device, and timed runs of its graphs."""

    def __init__(self, target, options: argparse.Namespace):
        import jax.numpy as jnp

        from noria.compile.abstract_model import AbstractModel
        from noria.compile.attention_kernels import cache_dtype
        from noria.modelzoo.config import DecoderConfig

        self.placement = target.placement()
        self.options = options
        self.dtype = jnp.dtype(options.dtype)
        self.config = DecoderConfig.alike(
            vocab_size=options.vocab,
            embed=options.embed,
            mlp=options.mlp,
            num_query_heads=options.query_heads,
            num_kv_heads=options.kv_heads,
            head_dim=options.head_dim,
            windows=(None,) * options.layers,
            max_position=max(options.context, options.prompt) + 1,
        )
        platform = self.placement.platform
        self.cache_dtype = cache_dtype(self.config, platform, self.dtype)
        self.definition = AbstractModel(self.config)
        self.parameters = self._random_parameters()

    def ceilings(self) -> dict[str, float]:
        """Return the bytes a second of a copy, and the flops a second of a square product."""
        import jax
        import jax.numpy as jnp

        def random(*shape: int):
            # products of constants draw less power, and so run at higher clocks
            body = partial(jax.random.normal, shape=shape, dtype=self.dtype)
            return jax.jit(body, out_shardings=self.placement.replicated)(jax.random.key(0))

        source = random(self.options.copy_mib * 2**20 // self.dtype.itemsize)
        negate = jax.jit(jnp.negative)
        copy_seconds = self._fastest(lambda: negate(source))
        a = random(self.options.product, self.options.product)
        product = jax.jit(jnp.matmul)
        product_seconds = self._fastest(lambda: product(a, a))
        return {
            "copy_bytes_per_second": 2 * source.nbytes / copy_seconds,
            "product_flops_per_second": 2 * self.options.product**3 / product_seconds,
        }

    def decode(self, batch: int) -> dict[str, Any]:
        """Return the seconds of a step with `batch` slots, near the end of the context's length."""
        result = {"phase": "decode", "rows": batch, "tokens": batch}
        return result | self._or_error(partial(self._decode_seconds, batch))

    def prefill(self, length: int) -> dict[str, Any]:
        """Return the seconds of one prompt."""
        result = {"phase": "prefill", "rows": 1, "tokens": length}
        return result | self._or_error(partial(self._prefill_seconds, length))

    def _decode_seconds(self, batch: int) -> tuple[float, float, dict]:
        import jax
        import jax.numpy as jnp

        from noria.compile.graphs import signatures
        from noria.runtime.engine.padding import decode_pages

        grid = self._grid(batch, self.options.context, prompt=1)
        graph, build_seconds = self._compiled("decode", grid)
        calls = 1 + self.options.repeats
        start_length = self.options.context - calls * STEPS_PER_CALL

        def filled():
            state = signatures.decode_state(self.definition, grid, self.cache_dtype)
            return state._replace(
                prompt_length_B=jnp.full(batch, start_length, jnp.int32),
                length_B=jnp.full(batch, start_length, jnp.int32),
                limit_B=jnp.full(batch, self.options.context + 1, jnp.int32),
                is_active_B=jnp.ones(batch, bool),
            )

        state = jax.jit(filled, out_shardings=self.placement.replicated)()
        is_live_B = jax.device_put(jnp.ones(batch, bool), self.placement.replicated)
        pages = jax.device_put(decode_pages(grid), self.placement.replicated)
        seconds = []
        for _ in range(calls):
            started = time.perf_counter()
            state, output = graph(self.parameters, state, is_live_B, pages)
            tokens_BQ = jax.device_get(output.tokens_BQ)
            seconds.append(time.perf_counter() - started)
            assert (tokens_BQ >= 0).all(), "every slot must emit in every step"
        work = self.work(grid.decode_call())
        return statistics.median(seconds[1:]) / STEPS_PER_CALL, build_seconds, work

    def _prefill_seconds(self, length: int) -> tuple[float, float, dict]:
        import jax

        from noria.compile.graphs import signatures
        from noria.runtime.engine.padding import pack_greedy

        grid = self._grid(1, length, prompt=length)
        graph, build_seconds = self._compiled("prefill", grid)
        make_state = partial(signatures.decode_state, self.definition, grid, self.cache_dtype)
        state = jax.jit(make_state, out_shardings=self.placement.replicated)()
        arguments = pack_greedy([[1] * length], 0, grid.prefill[0], grid, self.config.vocab_size)
        arguments = jax.device_put(arguments, self.placement.replicated)
        seconds = []
        for _ in range(1 + self.options.repeats):
            started = time.perf_counter()
            state, output = graph(self.parameters, state, *arguments)
            assert jax.device_get(output.is_clean_B).all(), "activations must be finite"
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[1:]), build_seconds, self.work(grid.prefill[0].call())

    def work(self, call) -> dict[str, float]:
        """Return the minimum floating-point operations and bytes of one call."""
        from noria.compile.planning.work import Work

        found = Work(self.definition, self.options.dtype).parts(call)
        parts = [part for part in found if part.name != "activations"]
        return {
            "bytes": sum(part.bytes for part in parts),
            "flops": sum(part.flops for part in parts),
        }

    def _grid(self, slots: int, max_length: int, prompt: int):
        from noria.compile.grids.bucket_grid import BucketGrid

        return BucketGrid(
            max_length=max_length,
            prefill=((prompt, 1),),
            decode_slots=slots,
            steps_per_call=STEPS_PER_CALL,
        )

    def _compiled(self, kind: str, grid):
        """Compile the grid's only graph of a kind; return it with the seconds of the compile."""
        from noria.compile.build import compile_graph, plan_graphs

        graphs = plan_graphs(self.definition, grid, self.placement, self.dtype)
        (graph,) = (graph for graph in graphs if graph.key.kind == kind)
        compiled, seconds = compile_graph(graph)
        return compiled, seconds

    def _random_parameters(self) -> dict[str, Any]:
        """Return random normal matrices and vectors of ones, made on the devices that hold them."""
        import jax
        import jax.numpy as jnp

        abstract = self.definition.abstract_parameters(self.dtype)
        logical_axes = self.definition.logical_axes()
        lying = self.placement.parameters(logical_axes)
        placements = {
            name: self.placement.format(name, logical_axes[name], leaf.shape, lying[name])
            for name, leaf in abstract.items()
        }

        def make(number, shape: tuple[int, ...]):
            if len(shape) == 1:
                return jnp.ones(shape, self.dtype)
            key = jax.random.fold_in(jax.random.key(0), number)
            return 0.02 * jax.random.normal(key, shape, self.dtype)

        makers: dict[Any, Callable] = {}
        parameters = {}
        for number, (name, leaf) in enumerate(abstract.items()):
            kind = leaf.shape, placements[name]
            if kind not in makers:
                body = partial(make, shape=leaf.shape)
                makers[kind] = jax.jit(body, out_shardings=placements[name])
            parameters[name] = makers[kind](number)
        return jax.block_until_ready(parameters)

    def _fastest(self, run: Callable[[], Any]) -> float:
        """Return the shortest seconds of a call; queued calls hide the time of the host."""
        import jax

        calls, seconds = 10, []
        jax.block_until_ready(run())
        for _ in range(self.options.repeats):
            started = time.perf_counter()
            last = None
            for _ in range(calls):
                last = run()
            jax.block_until_ready(last)
            seconds.append((time.perf_counter() - started) / calls)
        return min(seconds)

    def _or_error(self, measure: Callable[[], tuple[float, float, dict]]) -> dict[str, Any]:
        """Return a measurement, or the device's error if, say, the batch does not fit in memory."""
        try:
            seconds, build_seconds, work = measure()
        except RuntimeError as error:
            return {"error": str(error).splitlines()[0]}
        return {"seconds": seconds, "build_seconds": build_seconds, **work}


def _fractions(row: dict[str, Any], ceilings: dict[str, float]) -> dict[str, float]:
    if "seconds" not in row:
        return {}
    seconds = row["seconds"]
    return {
        "tokens_per_second": row["tokens"] / seconds,
        "of_copy_bandwidth": row["bytes"] / seconds / ceilings["copy_bytes_per_second"],
        "of_product_rate": row["flops"] / seconds / ceilings["product_flops_per_second"],
    }


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a table: noria's figures, then transformers' tokens a second."""
    ceilings, machine = report["ceilings"], report["machine"]
    peer = report["transformers"]
    theirs = {(row["phase"], row["rows"]): row for row in peer.get("rows", [])}
    settings = report["settings"]
    lines = [
        f"# {', '.join(sorted(set(machine['devices'])))}: {settings['layers']} layers of "
        f"{settings['embed']}, {settings['dtype']}",
        "",
        f"Copy {ceilings['copy_bytes_per_second'] / 1e9:.0f} GB/s, products "
        f"{ceilings['product_flops_per_second'] / 1e12:.2f} TFLOP/s, both measured. Decode over "
        f"{settings['context']} positions. Made by `{report['command']}`.",
        "",
        "| phase | rows | ms | tokens/s | of copy | of products | transformers tokens/s |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in report["noria"]:
        other = theirs.get((row["phase"], row["rows"]), {})
        lines.append(f"| {row['phase']} | {row['rows']} | {_cells(row)} | {_speed(other)} |")
    if "missing" in peer:
        lines += ["", f"transformers was not measured: {peer['missing']}"]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['error'][:60]} | - | - | -"
    return (
        f"{1000 * row['seconds']:.2f} | {row['tokens_per_second']:.0f} "
        f"| {row['of_copy_bandwidth']:.0%} | {row['of_product_rate']:.0%}"
    )


def _speed(row: dict[str, Any]) -> str:
    return f"{row['tokens'] / row['seconds']:.0f}" if "seconds" in row else row.get("error", "-")


def _run_transformers(options: argparse.Namespace) -> dict[str, Any]:
    """Run transformers in its own process; return its rows, or the reason for none."""
    if options.python_torch is None:
        return {"missing": "torch and transformers are not installed here; see --python-torch."}
    script = HERE / "peers" / "transformers_device.py"
    job = json.dumps({key: value for key, value in vars(options).items() if key != "output"})
    done = subprocess.run(
        [options.python_torch, script], input=job, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        return {"missing": (done.stderr.strip() or "no message").splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def _check_packages() -> None:
    for name in ("jax", "flax", "noria"):
        if importlib.util.find_spec(name) is None:
            sys.exit(f"{name} is not installed here: pip install -e '.[cuda12]' (or tpu, cuda13).")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {
        "layers": 32,
        "embed": 4096,
        "mlp": 14336,
        "query-heads": 32,
        "kv-heads": 8,
        "head-dim": 128,
        "vocab": 128256,
        "context": 1024,
        "prompt": 2048,
        "copy-mib": 1024,
        "product": 8192,
        "repeats": 5,
    }
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"(default: {size})")
    parser.add_argument("--batches", type=_sizes, default=[1, 8, 64, 256], help="decode slots")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--target", help="cpu, gpu or tpu (default: jax's default backend)")
    parser.add_argument("--output", type=Path, help="JSON file; a table (.md) is written, too")
    has_torch = all(map(importlib.util.find_spec, ("torch", "transformers")))
    parser.add_argument(
        "--python-torch",
        default=sys.executable if has_torch else None,
        help="a Python with torch and transformers",
    )
    options = parser.parse_args()
    if options.context <= (1 + options.repeats) * STEPS_PER_CALL:
        parser.error(
            f"--context: expected more than {(1 + options.repeats) * STEPS_PER_CALL}, the tokens "
            f"that {options.repeats} repeats decode, got {options.context}."
        )
    return options


def _sizes(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    main()
