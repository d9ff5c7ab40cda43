"""The figures of a job over all its runs, which signals and kills stop."""

import itertools
import json
import random
import signal
import time
from collections import Counter
from datetime import UTC, datetime

import pytest
from command import completion, num_records, read_manifest, wait_for_records, write_lines

PHASES = ("scan", "load", "build", "run")
PRICES = """\
[cpu]
source = "own"
memory_bytes = 1e11
memory_rate = 1e11
link_rate = 1e10
wraps = []
flops = { float32 = 1e12 }
price_per_hour = 3600.0
"""


def rows_and_tokens(output) -> Counter:
    """Count the rows in a journal, and the tokens that their lines state."""
    journal, counts = output.with_name(f"{output.name}.journal"), Counter()
    for record in journal.read_bytes().splitlines():
        _, tab, line = record[9:].partition(b"\t")
        if tab:
            usage = json.loads(line)["response"]["body"]["usage"]
            counts += Counter(rows=1, tokens=usage["completion_tokens"])
    return counts


def test_a_part_that_is_resumed_five_times_and_merged_has_the_sums_of_its_runs(noria, tmp_path):
    rng = random.Random(5)
    source = write_lines(
        tmp_path / "in.jsonl",
        [
            completion(f"row-{i}", [rng.randrange(3, 250) for _ in range(9)], max_tokens=30)
            for i in range(300)
        ],
    )
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    options = ("-i", source, "--set", "buckets.decode_slots=2", "--prices", prices)
    options += ("--dtype", "float32")
    output = tmp_path / "0.jsonl"
    arguments = ("batch", *options, "--model", noria.model)
    part = (*arguments, "-o", output, "--rows", "0/2")
    found, lifetimes, starts = [Counter()], [], []
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
        journal = output.with_name("0.jsonl.journal")
        known = num_records(journal) if journal.exists() else 4
        starts.append(time.time())
        process = noria.start(*part)
        wait_for_records(process, output, known + 8)
        process.send_signal(number)
        process.communicate(timeout=120)
        lifetimes.append(time.time() - starts[-1])
        found.append(rows_and_tokens(output))
    noria.run(*part)
    noria.run(*arguments, "-o", tmp_path / "1.jsonl", "--rows", "1/2")
    noria.run("merge", output, tmp_path / "1.jsonl", "-o", tmp_path / "merged.jsonl")

    manifest = read_manifest(output)
    runs = manifest["runs"]
    assert [run["end"] for run in runs] == [
        "killed", "SIGTERM", "SIGINT", "killed", "SIGTERM", "finished",
    ]  # fmt: skip
    assert [Counter(rows=run["rows"], tokens=run["output_tokens"]) for run in runs[:5]] == [
        now - before for before, now in itertools.pairwise(found)
    ]
    assert sum(run["rows"] for run in runs) == 150
    assert sum(run["output_tokens"] for run in runs) == manifest["output_tokens"]
    for run, lifetime, start in zip(runs, lifetimes, starts, strict=False):
        wall = sum(run[f"{phase}_seconds"] for phase in PHASES)
        # the process also starts and ends; a killed run ends with its last row
        assert wall < lifetime and run["run_seconds"] > 0
        began = datetime.fromisoformat(run["started_at"])
        assert 0 <= (began - datetime.fromtimestamp(start, UTC)).total_seconds() < lifetime

    other, merged = read_manifest(tmp_path / "1.jsonl"), read_manifest(tmp_path / "merged.jsonl")
    every = [*runs, *other["runs"]]
    seconds = {
        f"{phase}_seconds": sum(run[f"{phase}_seconds"] for run in every) for phase in PHASES
    }
    assert {key: merged[key] for key in seconds} == pytest.approx(seconds)
    assert merged["output_tokens"] == manifest["output_tokens"] + other["output_tokens"]
    rate = merged["output_tokens"] / seconds["run_seconds"]
    assert merged["output_tokens_per_second"] == pytest.approx(rate)
    assert merged["price"] == pytest.approx(sum(seconds.values()))  # at 3600 an hour
    assert merged["elapsed_seconds"] >= merged["wall_seconds"]
    assert [part["runs"] for part in merged["parts"]] == [runs, other["runs"]]
