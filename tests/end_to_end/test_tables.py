"""The jobs of docs/tables.md, from a table to a table: killed once, and in parts."""

import csv
import json
import re
import shlex
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest
from command import Noria, num_records, read_manifest
from model_on_disk import EMBED, write_model

ROOT = Path(__file__).resolve().parent.parent.parent
COMMANDS = [
    shlex.split(command)[2:]
    for command in re.findall(
        r"^noria batch .*$", re.sub(r" *\\\n\s*", " ", (ROOT / "docs/tables.md").read_text()), re.M
    )
]
JOBS = {Path(words[words.index("-o") + 1]).stem: words for words in COMMANDS}
MOMENTS = {"verdicts": "2-judge.jsonl", "labels": "1-label.jsonl", "choices": "1-choose.jsonl"}
MOMENTS |= {"scores": "1-score.jsonl", "vectors": ""}
"""The stage that is killed, by job."""
NUM_ROWS = 48


@pytest.fixture(scope="module")
def tiny(noria, tmp_path_factory) -> Noria:
    """The model of the other tests with more positions, as its tokens are short."""
    model = tmp_path_factory.mktemp("tables") / "model"
    write_model(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 384}))
    return Noria(noria.environment, model, noria.servers)


def repeated(example: Path, path: Path) -> Path:
    """Write the rows of an example several times, with texts of their own."""
    with example.open(newline="") as file:
        header, *rows = csv.reader(file)
    cells = [rows[i % len(rows)] for i in range(NUM_ROWS)]
    kept = header.index("stars") if "stars" in header else -1
    cells = [
        [cell if k == kept else f"{cell} {i}" for k, cell in enumerate(row)]
        for i, row in enumerate(cells)
    ]
    if path.suffix == ".parquet":
        columns = dict(zip(header, zip(*cells, strict=True), strict=True))
        parquet.write_table(pyarrow.table(columns), path)
        return path
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *cells])
    return path


def arguments(job: str, folder: Path, model: Path) -> list[object]:
    """The words of a job's command, for a larger table, another model and no output."""
    words = [ROOT / word if word.startswith("examples/") else word for word in JOBS[job]]
    given = dict(zip(words[::2], words[1::2], strict=True))
    del given["-o"]
    source = folder / ("in.parquet" if job == "vectors" else "in.csv")
    given |= {"-i": repeated(given["-i"], source), "--model": model, "--dtype": "float32"}
    if job == "verdicts":
        # the text of a random model has more tokens than the answer
        stages = Path(given["--pipeline"]).read_text()
        given["--pipeline"] = folder / "judge.toml"
        longer = 'name = "judge"\nmax_prompt_tokens = 320'
        given["--pipeline"].write_text(stages.replace('name = "judge"', longer))
    # few rows at once, so that the job can be killed between two
    buckets = ["decode_slots=8"]
    if job in ("vectors", "scores"):
        buckets = ["max_length=48", "prefill=[[48,1]]"]
    pairs = [*given.items(), *(("--set", f"buckets.{bucket}") for bucket in buckets)]
    return [word for pair in pairs for word in pair]


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory) -> Callable[[str], tuple[list[object], Path]]:
    """Runs a job once; returns its command without an output, and the output."""

    @cache
    def run(job: str) -> tuple[list[object], Path]:
        folder = tmp_path_factory.mktemp(job)
        command, whole = ["batch", *arguments(job, folder, tiny.model)], folder / "whole.parquet"
        tiny.run(*command, "-o", whole)
        return command, whole

    return run


def masked(path: Path) -> list[dict]:
    rows = parquet.read_table(path).to_pylist()
    for row in rows:
        row["line"] = re.sub(r'"created":\d+', '"created":0', row["line"])
    return rows


def test_the_page_has_the_five_jobs():
    assert set(JOBS) == set(MOMENTS)


@pytest.mark.parametrize("job", MOMENTS)
def test_a_killed_job_from_table_to_table_ends_as_if_undisturbed(tiny, undisturbed, tmp_path, job):
    command, whole = undisturbed(job)
    output = tmp_path / "out.parquet"
    process = tiny.start(*command, "-o", output)
    stage = output.with_name("out.parquet.stages") / MOMENTS[job] if MOMENTS[job] else output
    wait_for(process, stage.with_name(f"{stage.name}.journal"), 12)
    process.kill()
    process.communicate()
    assert process.returncode == -9 and not output.exists()
    done = tiny.run(*command, "-o", output)
    kept, left = re.search(r"resumed: (\d+) finished rows, (\d+) to go", done.stderr).groups()
    assert int(kept) and int(left)
    rows = masked(output)
    assert rows == masked(whole) and len(rows) == NUM_ROWS
    assert not any(row["error_code"] for row in rows)
    CHECKS[job](rows)


def wait_for(process, journal: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while not (journal.exists() and num_records(journal) >= count):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)


def check_labels(rows: list[dict]) -> None:
    assert [row["custom_id"] for row in rows][:2] == ["r1 0", "r2 1"]
    assert {row["mood"] for row in rows} <= {"good", "bad"}
    assert all(1 <= row["score"] <= 5 and type(row["score"]) is int for row in rows)
    assert [row["stars"] for row in rows][:3] == ["5", "1", "3"]


def check_choices(rows: list[dict]) -> None:
    assert {row["text"] for row in rows} <= {*"ABCD"} and rows[0]["key"] == "B 0"


def check_verdicts(rows: list[dict]) -> None:
    assert {row["verdict"] for row in rows} <= {"right", "wrong"}
    assert rows[1]["question"] == "How many legs has a spider? 1"


def check_vectors(rows: list[dict]) -> None:
    assert all(len(row["embedding"]) == EMBED and row["text"] is None for row in rows)


def check_scores(rows: list[dict]) -> None:
    for row in rows:
        first, *others = row["token_logprobs"]
        assert first is None and len(others) == row["prompt_tokens"] - 1 and max(others) < 0


CHECKS = {
    "labels": check_labels,
    "choices": check_choices,
    "verdicts": check_verdicts,
    "vectors": check_vectors,
    "scores": check_scores,
}


def test_parts_of_a_table_merge_to_the_table_of_the_whole_job(tiny, undisturbed, tmp_path):
    command, whole = undisturbed("labels")
    parts = [tmp_path / f"part{i}.parquet" for i in range(2)]
    for i, part in enumerate(parts):
        tiny.run(*command, "-o", part, "--rows", f"{i}/2")
    tiny.run_here("merge", *parts, "-o", tmp_path / "merged.parquet")
    merged = tmp_path / "merged.parquet"
    assert masked(merged) == masked(whole)
    assert parquet.read_schema(merged) == parquet.read_schema(whole)
    assert read_manifest(merged)["rows"]["total"] == NUM_ROWS


def test_options_of_tables_that_cannot_work_are_refused(noria, tmp_path):
    source, output = ROOT / "examples/tables/quiz.csv", tmp_path / "out.parquet"
    command = ("batch", "-i", source, "-o", output, "--model", noria.model)
    stages = ("--pipeline", ROOT / "examples/tables/quiz.toml")
    schema = ("--form", ROOT / "examples/tables/label.json")
    for options, message in [
        (("--url", "videos"), "--url: expected /v1/chat/completions, /v1/completions or"),
        (("--carry", "a", "--carry", "b=a"), "--carry b=a: expected COLUMN or COLUMN=NAME"),
        ((*stages, "--url", "embeddings"), "expected neither --prompt-column nor --url beside it"),
        ((*stages, "--carry", "a=text"), "several for 'text'"),
        ((*stages, *schema, "--carry", "a=mood"), "several for 'mood'"),
        (("--prompt-column", "question", "--carry", "e"), "expected one column 'e', got 0"),
        (("--form", tmp_path / "no.json"), "no.json: expected a file that can be read"),
    ]:
        assert message in noria.refuse(*command, *options)
    assert not list(tmp_path.iterdir())
