"""Measure the tokens that rules for samples save, and the answers that they change.

python scripts/stop_samples.py --model smollm2 --output benchmarks/stop_samples.md

The questions are arithmetic. Each is one row with several samples, and a sample with the answer of
the majority is kept. The first job has no rule that stops samples. In each other job, either the
samples of a row stop when k of them agree, or a sample stops when its last probes have found the
same answer. All jobs have the same questions and seeds, so samples differ only in where they stop.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from noria.runtime.devices.machine import describe_machine

ANSWER = r"(?s)(?:.*\D)?(\d{1,9})"
"""The last number of a text."""
COMMAND = "import sys; from noria.runtime.cli import main; sys.exit(main())"


def main() -> None:
    options = _parse()
    questions = make_questions(options.questions)
    rules: dict[str, dict[str, Any]] = {"none": {}}
    rules |= {f"{k} agree": {"stop_when": k} for k in options.agree}
    for every, probes in options.probes:
        rules[f"{probes} probes every {every}"] = {"probe_every": every, "probes": probes}
    with tempfile.TemporaryDirectory() as folder:
        # once more at the start, so that no measured job compiles
        for name in ["none", *rules]:
            found = run_job(Path(folder), questions, rules[name], options)
            rules[name] = {**rules[name], "found": found}
            print(name, {key: found[key] for key in found if key != "answers"}, flush=True)
    results = {name: rule["found"] for name, rule in rules.items()}
    report = table(results, [answer for _, answer in questions], options)
    print(report)
    if options.output is not None:
        options.output.write_text(report, encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="smollm2")
    add("--questions", type=int, default=200)
    add("-n", type=int, default=8, help="samples of each question")
    add("--agree", type=int, nargs="*", default=[2, 3, 4, 5, 6], help="values of stop_when")
    add("--probes", type=_pair, nargs="*", default=[(8, 2), (8, 3)], help="probe_every,probes")
    add("--temperature", type=float, default=0.7)
    add("--max-tokens", type=int, default=128)
    add("--output", type=Path, help="the report, as Markdown")
    return parser.parse_args()


def _pair(text: str) -> tuple[int, int]:
    every, probes = map(int, text.split(","))
    return every, probes


def make_questions(count: int) -> list[tuple[str, int]]:
    """Questions with their answers: sums, differences and products of small numbers."""
    draw = random.Random(0)
    questions = []
    for _ in range(count):
        a, b = draw.randint(10, 99), draw.randint(2, 99)
        match draw.choice("+-*"):
            case "+":
                questions.append((f"What is {a} + {b}?", a + b))
            case "-":
                questions.append((f"What is {a + b} - {b}?", a))
            case _:
                questions.append(
                    (f"What is {a % 10 + 2} * {b % 10 + 2}?", (a % 10 + 2) * (b % 10 + 2))
                )
    return questions


def run_job(
    folder: Path,
    questions: Sequence[tuple[str, int]],
    rule: Mapping[str, Any],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Run all questions as one job; return its tokens, seconds and answers."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    own = {key: value for key, value in rule.items() if key != "found"}
    rows = [
        {
            "id": f"question-{i}",
            "messages": [{"role": "user", "content": f"{question} Think, then give the number."}],
            "n": options.n,
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
            "noria": {"answer": ANSWER, "keep": "majority", **own},
        }
        for i, (question, _) in enumerate(questions)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = ["-i", str(source), "-o", str(output), "--model", options.model]
    arguments = ["batch", *files, "--restart", "--quiet"]
    subprocess.run([sys.executable, "-c", COMMAND, *arguments], check=True)
    manifest = json.loads(output.with_name("out.jsonl.manifest.json").read_text("utf-8"))
    lines = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    choices = [line["response"]["body"]["choices"][0] for line in lines]
    decode = manifest["generator"]["buckets"]["decode"].values()
    return {
        "kept": manifest["output_tokens"],
        "decoded": sum(use["emitted_tokens"] for use in decode),
        "stopped": manifest["stopped_samples"],
        "seconds": round(manifest["run_seconds"], 1),
        "answers": [choice["noria"]["answer"] for choice in choices],
    }


def table(
    results: Mapping[str, Mapping[str, Any]], expected: Sequence[int], options: argparse.Namespace
) -> str:
    """The report of all jobs, as Markdown."""
    machine, whole = describe_machine(), results["none"]
    command = ["python", "scripts/stop_samples.py", *sys.argv[1:]]
    lines = [
        "# Samples that stop early",
        "",
        f"{len(expected)} arithmetic questions, {options.n} samples each, temperature "
        f"{options.temperature}, at most {options.max_tokens} tokens, model {options.model}; "
        f"{machine['processor']}, {machine['cores']} cores. The answer of a row is that of most "
        f"samples. *Decoded* tokens include those that were cut; *changed* are answers that differ "
        f"from those without a rule. Made by",
        "",
        f"    {' '.join(command)}",
        "",
        "| rule | samples stopped | tokens kept | decoded | share | run s | changed | right |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, found in results.items():
        pairs = zip(found["answers"], whole["answers"], strict=True)
        changed = sum(own != other for own, other in pairs)
        right = sum(own == str(n) for own, n in zip(found["answers"], expected, strict=True))
        cells = [
            name,
            found["stopped"],
            found["kept"],
            found["decoded"],
            f"{found['decoded'] / whole['decoded']:.0%}",
            found["seconds"],
            f"{changed / len(expected):.1%}",
            f"{right / len(expected):.1%}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
