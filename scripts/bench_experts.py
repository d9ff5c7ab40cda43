"""Measure one sparse layer against transformers, `ragged_dot` and other ways to dispatch.

    pip install torch transformers    # this script needs both; noria does not
    python scripts/bench_experts.py --output benchmarks/experts.json

The first table runs the same layer in float32 in each implementation, one call of each alternately.
All are lossless, except the one with a capacity. The memory floor is the time to read the weights
of the chosen experts, at the rate at which a sum reads an array larger than the processor's caches.
The second table compares ways to group choices by expert and to move their tokens, at published
expert counts: a sort of the choices, ranks from a running sum of one-hot rows, and the one-hot
products of GShard (2006.16668), which do both at once.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noria.modelzoo.moe.dispatch import sort_choices
from noria.modelzoo.moe.experts import ExpertWeights
from noria.modelzoo.moe.mix import Mixture
from noria.modelzoo.moe.routing import Choices, Router
from noria.modelzoo.moe_config import LOSSLESS, Dispatch, Routing
from noria.runtime.devices.machine import describe_machine

EXPERTS, CHOSEN, EMBED, HIDDEN = 8, 2, 1024, 3584
TOKENS = (32, 512)
PLACED = ((8, 2), (64, 6), (128, 8), (256, 8))
PLACED_TOKENS = (32, 512, 4096)
PLACED_EMBED = 512
CAPACITY_FACTOR = 1.25
MOST_ONE_HOT = 2**26
"""The largest number of entries of a one-hot mask whose products are run."""

Run = Callable[[], Any]


def main() -> None:
    options = _parse()
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine(),
        "layer": [measure_layer(tokens, options.repeats) for tokens in TOKENS],
        "placing": [
            measure_placing(*sizes, tokens, options.repeats)
            for sizes in PLACED
            for tokens in PLACED_TOKENS
        ],
    }
    table = markdown(report)
    print(table)
    if options.output:
        text = json.dumps(report, indent=1) + "\n"
        options.output.with_suffix(".json").write_text(text, encoding="utf-8")
        options.output.with_suffix(".md").write_text(table, encoding="utf-8")


def measure_layer(tokens: int, repeats: int) -> dict[str, Any]:
    """Return one layer's milliseconds by implementation, its floor, and its computed rows."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * shape[-2] ** -0.5

    weights = ExpertWeights(normal(EXPERTS, 2, EMBED, HIDDEN), normal(EXPERTS, HIDDEN, EMBED))
    router = Router(normal(EMBED, EXPERTS))
    x_BTD = rng.standard_normal((1, tokens, EMBED), np.float32)
    of_noria = {
        "noria, lossless": LOSSLESS,
        f"noria, capacity {CAPACITY_FACTOR}": Dispatch("capacity", CAPACITY_FACTOR),
        "jax.lax.ragged_dot": Dispatch("ragged"),
    }
    arrays = jax.device_put((x_BTD, np.ones((1, tokens), bool), router, weights))
    layers = {name: _mixture(dispatch) for name, dispatch in of_noria.items()}
    runs: dict[str, Run] = {name: partial(_run, layer, arrays) for name, layer in layers.items()}
    theirs = _transformers(router, weights)
    runs |= {f"transformers, {kind}": partial(run, x_BTD) for kind, run in theirs.items()}
    expected = np.asarray(runs["jax.lax.ragged_dot"]().out_BTD)
    for run in theirs.values():
        np.testing.assert_allclose(run(x_BTD), expected, atol=1e-4)
    use = layers["noria, lossless"](*arrays).use
    used = int((np.asarray(use.load_SE) > 0).sum())
    return {
        "tokens": tokens,
        "milliseconds": side_by_side(runs, repeats),
        "floor_milliseconds": used * 3 * EMBED * HIDDEN * 4 / read_rate(repeats) * 1e3,
        "rows_over_choices": int(np.asarray(use.rows_SE).sum()) / (tokens * CHOSEN),
    }


def measure_placing(experts: int, chosen: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Return milliseconds, flops and bytes of grouping choices and moving tokens, by method."""
    rng = np.random.default_rng(1)
    scores_ME = rng.standard_normal((tokens, experts))
    expert_MZ = np.argsort(-scores_ME, axis=1)[:, :chosen].astype(np.int32)
    x_MD = rng.standard_normal((tokens, PLACED_EMBED), np.float32)
    capacity = Dispatch("capacity", CAPACITY_FACTOR).capacity(*expert_MZ.shape, experts)
    methods: dict[str, Callable] = {
        "sorted": partial(_sorted, experts=experts),
        "running sum": partial(_running_sum, experts=experts),
    }
    if tokens * experts * capacity <= MOST_ONE_HOT:
        methods["one-hot products"] = partial(_one_hot, experts=experts, capacity=capacity)
    arrays = jax.device_put((x_MD, expert_MZ))
    compiled = {name: jax.jit(f).lower(*arrays).compile() for name, f in methods.items()}
    costs = {name: executable.cost_analysis() or {} for name, executable in compiled.items()}
    runs = {name: partial(_run, executable, arrays) for name, executable in compiled.items()}
    return {
        "experts": experts,
        "chosen": chosen,
        "tokens": tokens,
        "milliseconds": side_by_side(runs, repeats),
        "flops": {name: cost.get("flops") for name, cost in costs.items()},
        "bytes": {name: cost.get("bytes accessed") for name, cost in costs.items()},
    }


def side_by_side(runs: Mapping[str, Run], repeats: int) -> dict[str, float]:
    """Return the median milliseconds of each run; the runs alternate."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:  # the first call warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(of_one) * 1e3 for name, of_one in seconds.items()}


def read_rate(repeats: int) -> float:
    """Return the bytes a second that a sum reads from memory."""
    x = jax.device_put(np.ones((8, 2**24), np.float32))
    total = jax.jit(lambda x: x.sum(axis=1))
    return x.nbytes / (side_by_side({"sum": partial(_run, total, (x,))}, repeats)["sum"] / 1e3)


def _mixture(dispatch: Dispatch) -> Callable:
    def unit(gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.silu(gate) * up

    return jax.jit(Mixture(Routing(EXPERTS, CHOSEN), dispatch, unit))


def _run(function: Callable, arrays: tuple) -> Any:
    return jax.block_until_ready(function(*arrays))


def _transformers(router: Router, weights: ExpertWeights) -> dict[str, Callable]:
    """Return Mixtral's block with the same weights, in each implementation of transformers."""
    import torch
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=EMBED,
        intermediate_size=HIDDEN,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
    )
    gate_up = np.asarray(weights.gate_up_EPDF).transpose(0, 1, 3, 2).reshape(EXPERTS, -1, EMBED)
    down = np.asarray(weights.down_EFD).transpose(0, 2, 1)
    runs = {}
    for kind in ("eager", "grouped_mm"):
        config._experts_implementation = kind
        block = MixtralSparseMoeBlock(config).eval()
        block.load_state_dict({
            "gate.weight": torch.tensor(np.asarray(router.weight_DE).T),
            "experts.gate_up_proj": torch.tensor(gate_up),
            "experts.down_proj": torch.tensor(down),
        })  # fmt: skip

        def run(x_BTD: np.ndarray, block: torch.nn.Module = block) -> np.ndarray:
            with torch.no_grad():
                return block(torch.from_numpy(x_BTD)).numpy()

        runs[kind] = run
    return runs


def _sorted(x_MD: jax.Array, expert_MZ: jax.Array, experts: int) -> jax.Array:
    weight_MZ = jnp.ones(expert_MZ.shape, jnp.float32)
    return x_MD[sort_choices(Choices(expert_MZ, weight_MZ), experts).token_U]


def _running_sum(x_MD: jax.Array, expert_MZ: jax.Array, experts: int) -> jax.Array:
    choice = expert_MZ.reshape(-1)
    is_chosen = (choice[:, None] == jnp.arange(experts)[None]).astype(jnp.int32)
    count = jnp.cumsum(is_chosen, axis=0)
    rank = jnp.take_along_axis(count, choice[:, None], axis=1)[:, 0] - 1
    row = (jnp.cumsum(count[-1]) - count[-1])[choice] + rank
    token = jnp.arange(choice.size, dtype=jnp.int32) // expert_MZ.shape[1]
    return x_MD[jnp.zeros_like(token).at[row].set(token)]


def _one_hot(x_MD: jax.Array, expert_MZ: jax.Array, experts: int, capacity: int) -> jax.Array:
    choice = expert_MZ.reshape(-1)
    is_chosen = (choice[:, None] == jnp.arange(experts)[None]).astype(jnp.int32)
    rank = (jnp.cumsum(is_chosen, axis=0) * is_chosen).sum(axis=1) - 1
    of_row = jax.nn.one_hot(rank, capacity, dtype=x_MD.dtype)
    mask = jnp.einsum("ae,ac->aec", is_chosen.astype(x_MD.dtype), of_row)
    mask_MEC = mask.reshape(*expert_MZ.shape, experts, capacity).sum(axis=1)
    return jnp.einsum("mec,md->ecd", mask_MEC, x_MD)


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as two tables."""
    machine = report["machine"]
    lines = [
        "# One sparse layer",
        "",
        f"{machine['processor']}, jax {machine['versions']['jax']}. Made by "
        f"`{report['command']}`. Medians, in ms.",
        "",
        f"E {EXPERTS}, k {CHOSEN}, D {EMBED}, F {HIDDEN}, float32. The ratio is to the faster form "
        "of transformers. Rows are computed rows over choices.",
        "",
    ]
    first = report["layer"][0]["milliseconds"]
    lines.append(f"| tokens | {' | '.join(first)} | ratio | memory floor | rows |")
    lines.append("|--:" * (len(first) + 4) + "|")
    for row in report["layer"]:
        times = row["milliseconds"]
        best = min(time for name, time in times.items() if name.startswith("transformers"))
        cells = [f"{row['tokens']}", *(f"{time:.1f}" for time in times.values())]
        cells += [f"{times['noria, lossless'] / best:.2f}", f"{row['floor_milliseconds']:.1f}"]
        cells.append(f"{row['rows_over_choices']:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"Grouping choices and moving tokens of {PLACED_EMBED} float32. Methods that "
              f"need a capacity use factor {CAPACITY_FACTOR}.", ""]  # fmt: skip
    lines.append("| E / k | tokens | method | ms | Mflop | MB |")
    lines.append("|--:|--:|:--|--:|--:|--:|")
    for row in report["placing"]:
        for name, milliseconds in row["milliseconds"].items():
            sizes = f"{row['experts']} / {row['chosen']} | {row['tokens']}"
            cost = (f"{(row[unit][name] or 0) / 1e6:.1f}" for unit in ("flops", "bytes"))
            lines.append(f"| {sizes} | {name} | {milliseconds:.2f} | {' | '.join(cost)} |")
    return "\n".join(lines) + "\n"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="JSON file; a table (.md) is written, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
