"""Compare noria with vLLM on prompts that begin alike, and noria with itself without sharing.

The workloads are those of `make_sharing_workloads.py`. Both engines get the same weights, token
ids, dtype and threads, and make exactly `max_tokens` greedy ids a row. vLLM runs with its prefix
cache, in several settings, and its best one counts. If the rows of a file are shuffled, vLLM also
gets them sorted by their ids, so that rows that begin alike follow each other.

A second measurement runs a sample of the rows with and without noria's sharing. The measure is
output tokens a second of generation, as in `bench_peers.py`. Each workload's results replace its
earlier ones in the output, and the results of other workloads stay.

    python scripts/bench_sharing.py --work-dir build/sharing --output benchmarks/sharing \\
        --python-vllm .venv-vllm/bin/python
"""

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import product, starmap
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "peers")]

from engine_protocol import Job  # noqa: E402  (beside the engines, which stand alone)
from engine_runs import (  # noqa: E402
    Rows,
    Setting,
    export_weights,
    limit_threads,
    machine,
    python_with,
    read_rows,
    run_noria,
    run_peer,
    summary,
)
from make_sharing_workloads import ORDERS, WORKLOADS, batch_lines  # noqa: E402
from prefix_count import count_prefixes  # noqa: E402

WITHOUT_SHARING = "--no-sharing"
CHUNKS = 16, 64, 256
MAX_MODEL_LEN = 2048


def main() -> None:
    options = _parse_options()
    bench = SharingBench(options)
    path = options.output.with_suffix(".json") if options.output else None
    report = json.loads(path.read_text("utf-8")) if path and path.exists() else {}
    for name in options.workloads:
        report[name] = bench.measure(name)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            path.with_suffix(".md").write_text(page(report), encoding="utf-8")
    print(f"\n{page(report)}")


class SharingBench:
    """The model's files, and runs of workloads with it."""

    def __init__(self, options: argparse.Namespace):
        from transformers import AutoTokenizer

        self.options = options
        self.work = options.work_dir.resolve()
        self.environment = limit_threads(options.threads)
        export_weights(options.gguf, self.work)
        self.tokenizer = AutoTokenizer.from_pretrained(self.work / "hf")

    def measure(self, name: str) -> dict[str, Any]:
        """Return the figures of one workload: both engines, and noria without sharing."""
        options = self.options
        order = options.order or WORKLOADS[name].order
        result: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "threads": options.threads,
            "dtype": options.dtype,
            "order": order,
        }
        if options.comparison_rows and "noria" in options.engines:
            rows = self._rows(name, options.comparison_rows)
            runs = [
                self._noria(rows, "with sharing"),
                self._noria(rows, "without sharing", WITHOUT_SHARING),
            ]
            result["sharing"] = _sizes(rows) | {"runs": _compared(runs)}
        rows = self._rows(name, options.rows)
        result["engines"] = _sizes(rows) | {"runs": _compared(self._engine_runs(rows, order))}
        return result

    def _rows(self, name: str, num_rows: int | None) -> Rows:
        path = self.work / f"{name}.jsonl"
        lines = batch_lines(name, num_rows, self.options.order)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        rows = read_rows(path, self.work / "hf")
        print(f"\n{name}: {json.dumps(_sizes(rows))}", flush=True)
        return rows

    def _engine_runs(self, rows: Rows, order: str) -> list[dict[str, Any]]:
        runs = [self._noria(rows, "with sharing")] if "noria" in self.options.engines else []
        if "vllm" in self.options.engines:
            for setting in self._vllm_settings():
                runs.append(self._vllm(setting, rows))
                if order == "shuffled":
                    runs.append(self._vllm(setting, rows, is_sorted=True))
        return runs

    def _noria(self, rows: Rows, label: str, *own: str) -> dict[str, Any]:
        arguments = ["--dtype", self.options.dtype, *self.options.noria_option, *own]
        run = run_noria(rows, arguments, self.work, self.environment)
        uses = run["manifest"]["generator"]["buckets"]["prefill"].values()
        run |= {
            "setting": f"noria, {label}",
            "options": arguments,
            "prompt_tokens": run["manifest"]["prompt_tokens"],
            "real_prompt_tokens": sum(use["real_tokens"] for use in uses),
            "computed_prompt_tokens": sum(use["computed_tokens"] for use in uses),
        }
        print(summary(run), flush=True)
        return run

    def _vllm_settings(self) -> Iterator[Setting]:
        python = self.options.python_vllm or python_with("vllm")
        if python is None:
            sys.exit("vLLM is not installed here; give --python-vllm, or --engines noria.")
        common = {
            "dtype": self.options.dtype,
            "enable_prefix_caching": True,
            "max_model_len": MAX_MODEL_LEN,
            "cache_gib": self.options.vllm_cache_gib,
        }
        for slots, size in product(self.options.vllm_slots, self.options.vllm_block_sizes):
            given = common | {"max_num_seqs": slots, "block_size": size}
            yield Setting("vllm", python, self.work / "hf", self.options.dtype, given)

    def _vllm(self, setting: Setting, rows: Rows, is_sorted: bool = False) -> dict[str, Any]:
        """Run vLLM on the rows in the order of the file, or sorted by their ids."""
        indices = list(range(len(rows.prompts)))
        if is_sorted:
            indices.sort(key=lambda index: rows.prompts[index])
        job = Job(
            str(setting.model),
            [rows.prompts[index] for index in indices],
            [rows.max_tokens[index] for index in indices],
            self.options.threads,
            setting.options,
        )
        run = run_peer(setting, job, self.work, self.environment)
        texts = self.tokenizer.batch_decode(run.pop("token_ids"), skip_special_tokens=True)
        prompt_tokens = sum(map(len, rows.prompts))
        rows_at_once, block = setting.options["max_num_seqs"], setting.options["block_size"]
        order = "rows sorted" if is_sorted else "order of the file"
        run |= {
            "setting": f"vllm, {rows_at_once} rows at once, blocks of {block}, {order}",
            "options": setting.options,
            "prompt_tokens": prompt_tokens,
            "real_prompt_tokens": prompt_tokens - run["cached_tokens"],
            "computed_prompt_tokens": prompt_tokens - run["cached_tokens"],
            "texts": [text for _, text in sorted(zip(indices, texts, strict=True))],
        }
        print(summary(run), flush=True)
        return run


def page(report: dict[str, Any]) -> str:
    """Return the report as Markdown: the engines beside each other, then noria without sharing."""
    lines = ["# Prompts that begin alike", "", "Made by `scripts/bench_sharing.py`.", ""]
    lines += [f"- {_conditions(name, result)}" for name, result in report.items()]
    lines += [
        "",
        "Distinct prompt tokens are those that remain if prompts are cut every "
        f"{_alternatives(CHUNKS)} tokens and common beginnings are computed once.",
        "",
        "| workload | rows | output tokens | prompt tokens | distinct prompt tokens "
        "| noria, output tokens/s | vLLM at its best | noria / vLLM | with / without sharing |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        *starmap(_overview, report.items()),
    ]
    lines += ["", "## Engines", "", *_run_table(report, "engines")]
    lines += ["", "## With and without sharing", "", *_run_table(report, "sharing")]
    return "\n".join(lines) + "\n"


def _conditions(name: str, result: dict[str, Any]) -> str:
    versions: dict[str, str] = {}
    for run in result["engines"]["runs"]:
        versions |= run["versions"]
    packages = [f"{package} {version}" for package, version in versions.items()]
    return ", ".join(
        [
            f"{name}: {result['machine']['processor']}",
            f"{result['threads']} threads",
            result["dtype"],
            f"{result['order']} rows",
            *packages,
            result["date"],
        ]
    )


def _overview(name: str, result: dict[str, Any]) -> str:
    sizes = result["engines"]
    ours, theirs = _best_speed(sizes["runs"], "noria"), _best_speed(sizes["runs"], "vllm")
    pair = [run["output_tokens_per_second"] for run in result.get("sharing", {"runs": []})["runs"]]
    cells = [
        name,
        f"{sizes['rows']:,}",
        f"{sizes['output_tokens']:,}",
        f"{sizes['prompt_tokens']:,}",
        " / ".join(f"{count:,}" for count in sizes["distinct_prompt_tokens"].values()),
        f"{ours:.1f}" if ours else "-",
        f"{theirs:.1f}" if theirs else "-",
        f"{ours / theirs:.2f}" if ours and theirs else "-",
        f"{pair[0] / pair[1]:.2f}" if pair else "-",
    ]
    return f"| {' | '.join(cells)} |"


def _best_speed(runs: list[dict[str, Any]], engine: str) -> float | None:
    speeds = [run["output_tokens_per_second"] for run in runs if run["engine"] == engine]
    return max(speeds, default=None)


def _run_table(report: dict[str, Any], part: str) -> list[str]:
    """Return a table of a part's runs, with the ratio of the first run's speed to that of each."""
    lines = [
        "| workload | rows | run | output tokens/s | first / it "
        "| prefilled tokens, real / computed | of all | generation s | load s "
        "| warm-up or compile s | same answers as first | cores busy elsewhere |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, result in report.items():
        sizes = result.get(part, {"runs": []})
        for run in sizes["runs"]:
            speed = run["output_tokens_per_second"]
            ratio = sizes["runs"][0]["output_tokens_per_second"] / speed
            real, computed = run["real_prompt_tokens"], run["computed_prompt_tokens"]
            lines.append(
                f"| {name} | {sizes['rows']} | {run['setting']} | {speed:.1f} | {ratio:.2f} "
                f"| {real:,} / {computed:,} | {computed / run['prompt_tokens']:.1%} "
                f"| {run['generation_seconds']:.1f} | {run['load_seconds']:.1f} "
                f"| {run['warm_up_seconds']:.1f} | {run['rows_equal_to_first']} "
                f"| {run['cores_busy_elsewhere']} |"
            )
    return lines


def _sizes(rows: Rows) -> dict[str, Any]:
    counts = {chunk: count_prefixes(rows.prompts, chunk) for chunk in CHUNKS}
    return {
        "rows": len(rows.prompts),
        "prompt_tokens": sum(map(len, rows.prompts)),
        "distinct_prompt_tokens": {str(chunk): count.distinct for chunk, count in counts.items()},
        "output_tokens": sum(rows.max_tokens),
    }


def _compared(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace the answers of every run by the number of those that the first run gave, too."""
    texts = [run.pop("texts") for run in runs]
    for run, own in zip(runs, texts, strict=True):
        run["rows_equal_to_first"] = sum(a == b for a, b in zip(own, texts[0], strict=True))
    return runs


def _alternatives(numbers: tuple[int, ...]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}"


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    engines = ["noria", "vllm"]
    parser.add_argument("--work-dir", type=Path, required=True, help="for weights and job files")
    parser.add_argument("--output", type=Path, help="results: this path with .json and .md")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rows", type=int, help="rows for both engines (default: all)")
    parser.add_argument(
        "--comparison-rows",
        type=int,
        default=200,
        help="rows for noria with and without sharing; 0 leaves this out (default: 200)",
    )
    parser.add_argument("--order", choices=ORDERS, help="order of rows (default: the workload's)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engines", nargs="*", choices=engines, default=engines)
    parser.add_argument(
        "--noria-option", action="append", default=[], help="an option for `noria batch`"
    )
    parser.add_argument("--gguf", help="a SmolLM2 GGUF file; default: the embedded model's")
    parser.add_argument("--python-vllm", help="a Python with vllm")
    parser.add_argument(
        "--vllm-slots", nargs="+", type=int, default=[64, 256], help="rows at once, each tried"
    )
    parser.add_argument(
        "--vllm-block-sizes", nargs="+", type=int, default=[32, 128], help="each tried"
    )
    parser.add_argument("--vllm-cache-gib", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()
