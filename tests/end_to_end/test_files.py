"""Jobs whose input and output are pipes or tables, with the real engine."""

import json
import subprocess

import pytest
from command import COMMAND, completion, read_rows, write_lines

ROWS = [completion(f"row-{i}", [3 + i, 4, 5], max_tokens=4) for i in range(5)]


@pytest.fixture(scope="module")
def answers(noria, tmp_path_factory):
    """The texts of all rows, from a job of plain files."""
    folder = tmp_path_factory.mktemp("plain")
    rows, _ = noria.batch(write_lines(folder / "in.jsonl", ROWS), folder / "out.jsonl")
    return [row["response"]["body"]["choices"] for row in rows]


def test_a_pipe_gets_the_finished_file_and_messages_go_to_stderr(noria, answers, tmp_path):
    done = subprocess.run(
        [*COMMAND, "batch", "-i", "-", "-o", "-", "--model", str(noria.model)],
        input="".join(json.dumps(row) + "\n" for row in ROWS),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=noria.environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["response"]["body"]["choices"] for row in rows] == answers
    assert "5 rows, 0 errors" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_table_runs_with_the_sampling_of_the_command_line(noria, answers, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    prompts = [row["body"]["prompt"] for row in ROWS]
    table = pyarrow.table({"tokens": prompts, "key": [f"row-{i}" for i in range(5)]})
    parquet.write_table(table, tmp_path / "in.parquet")
    names = ("--prompt-column", "tokens", "--id-column", "key")
    arguments = ("batch", "-i", tmp_path / "in.parquet", "-o", tmp_path / "out.parquet")
    noria.run(*arguments, "--model", noria.model, *names, "--sampling", "max_tokens=4")
    lines = parquet.read_table(tmp_path / "out.parquet").column("line").to_pylist()
    rows = [json.loads(line) for line in lines]
    assert [row["custom_id"] for row in rows] == [row["custom_id"] for row in ROWS]
    assert [row["response"]["body"]["choices"] for row in rows] == answers


def test_a_job_and_a_merge_between_urls(noria, answers, tmp_path):
    store, work = tmp_path / "store", tmp_path / "work"
    store.mkdir()
    url, options = f"file://{store}", ("--work-folder", work, "--model", noria.model)
    write_lines(store / "in.jsonl", ROWS)
    for part in range(2):
        places = ("-i", f"{url}/in.jsonl", "-o", f"{url}/part{part}.jsonl")
        numbers = ("--dtype", "float32", "--rows", f"{part}/2")
        done = noria.run("batch", *places, *options, *numbers)
        assert f"{url}/part{part}.jsonl: " in done.stderr
    parts = [f"{url}/part{part}.jsonl" for part in range(2)]
    noria.run_here("merge", *parts, "-o", f"{url}/out.jsonl", "--work-folder", work)
    rows = read_rows(store / "out.jsonl")
    assert [row["response"]["body"]["choices"] for row in rows] == answers
    assert not list(work.iterdir())
    same = ("-i", f"{url}/in.jsonl", "-o", f"{url}/in.jsonl", *options)
    assert "got the input as an output" in noria.refuse("batch", *same)


def test_a_url_of_a_file_that_is_read_is_refused(noria, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", ROWS)
    options = ("--model", noria.model, "--restart")
    before, work = source.read_bytes(), ("--work-folder", tmp_path / "work")
    for places in [
        (source, f"file://{source}"),
        (f"file://{source}", source),
        (f"file://{source}", f"file://{tmp_path}/./in.jsonl"),
    ]:
        said = noria.refuse("batch", "-i", places[0], "-o", places[1], *options, *work)
        assert f"{source}: is the input too. Choose another output" in said
    inside = f"file://{noria.model}/config.json"
    assert "is the model too" in noria.refuse("batch", "-i", source, "-o", inside, *options, *work)
    assert source.read_bytes() == before and [*tmp_path.iterdir()] == [source]


def test_changed_rows_of_a_finished_job_run_alone(noria, tmp_path):
    source, output = write_lines(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    before, _ = noria.batch(source, output)
    write_lines(source, [*ROWS[1:], completion("row-0", [9, 9], max_tokens=3)])
    arguments = ("batch", "-i", source, "-o", output, "--model", noria.model)
    assert "keep the answers of equal rows with --update" in noria.refuse(*arguments)
    done = noria.run(*arguments, "--update")
    assert "resumed: 4 finished rows, 1 to go" in done.stderr
    after = read_rows(output)
    assert after[:4] == before[1:]
    assert after[4]["response"]["body"]["usage"]["completion_tokens"] <= 3


def test_options_of_pipes_and_sampling_that_cannot_work_are_refused(noria, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", ROWS)
    files = ("batch", "-i", source, "-o", tmp_path / "out.jsonl", "--model", noria.model)
    for sampling, message in [
        ("max_tokens", "expected KEY=VALUE"),
        ("max_token=3", "Did you mean 'max_tokens'?"),
        ("temperature=-1", "temperature"),
        ("max_tokens=ten", "Write KEY=VALUE with one of"),
    ]:
        assert message in noria.refuse(*files, "--sampling", sampling)


def test_the_price_of_a_job_is_that_of_its_hours(noria, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", ROWS)
    arguments = ("batch", "-i", source, "-o", tmp_path / "out.jsonl", "--model", noria.model)
    peaks = (
        "source = 'own'\nmemory_bytes = 1e11\nmemory_rate = 1e11\nlink_rate = 1e10\nwraps = []\n"
    )
    table = f"[cpu]\n{peaks}flops = {{ float32 = 1e12 }}\n"
    (tmp_path / "prices.toml").write_text(table)
    options = ("--prices", tmp_path / "prices.toml")
    assert "expected a table [cpu] with price_per_hour" in noria.refuse(*arguments, *options)
    (tmp_path / "prices.toml").write_text(f"{table}price_per_hour = 3.6\n")
    _, manifest = noria.batch(source, tmp_path / "out.jsonl", *options)
    assert [run["price_per_hour"] for run in manifest["runs"]] == [3.6]
    assert manifest["price"] == pytest.approx(manifest["wall_seconds"] / 1000)
