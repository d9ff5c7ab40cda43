"""Scripts that measure jobs run a tiny model in this process; other engines have stand-ins."""

import importlib.metadata
import io
import json
import re
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
from model_on_disk import write_model
from numerics_helpers import ROOT, script

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.planning.cost import Calibration, KindFactors
from noria.runtime import cli
from noria.sharding.call import KINDS

PROMPTS = ["the water wheel turns", "buckets of fixed size", "driven by the stream"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_model(folder)
    return folder


def run_here(command, *arguments, **options) -> None:
    """Run the command `noria` in this process, instead of in a new one."""
    words = [str(word) for word in command]
    assert cli.main(words[words.index("batch") :]) == 0


SUBPROCESS = SimpleNamespace(run=run_here)


@pytest.fixture
def work(monkeypatch, model, tmp_path):
    """A folder of a benchmark of engines, with the tiny model; peers are stand-ins."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts" / "peers"), *sys.path])
    runs = script("scripts/peers/engine_runs.py")
    script("scripts/peers/engine_protocol.py")
    folder = tmp_path / "work"
    shutil.copytree(model, folder / "hf")

    def run_alone(command, environment):
        if Path(command[0]).name == "noria":
            run_here(command)
        else:
            answer_as_a_peer(*map(Path, command[2:]))
        return 1.0, 0.0

    monkeypatch.setattr(runs, "run_alone", run_alone)
    monkeypatch.setattr(runs, "limit_threads", lambda num_threads: {})
    monkeypatch.setattr(runs, "export_weights", lambda gguf, folder: "model.gguf")
    return folder


def answer_as_a_peer(job: Path, result: Path) -> None:
    asked = json.loads(job.read_text())
    ids = [[5] * count for count in asked["max_tokens"]]
    seconds = dict.fromkeys(("load_seconds", "warm_up_seconds", "generation_seconds"), 1.0)
    found = {"output_tokens": sum(map(len, ids)), "cached_tokens": 0, "token_ids": ids}
    result.write_text(json.dumps({**seconds, **found, "versions": {"vllm": "0"}}))


def write_chats(path: Path) -> Path:
    """Write rows of chats, whose answers have exactly four tokens."""
    own = {"model": "m", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with path.open("w") as file:
        for i, prompt in enumerate(PROMPTS):
            body = own | {"messages": [{"role": "user", "content": prompt}]}
            row = {"custom_id": f"{i}", "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps(row | {"body": body}) + "\n")
    return path


def test_rules_for_samples_are_compared_by_their_tokens(run, model, tmp_path):
    output = tmp_path / "stop.md"
    sizes = ("--questions", 2, "-n", 2, "--agree", 2, "--probes", "--max-tokens", 8)
    said = run(
        "stop_samples.py", "--model", model, *sizes, "--output", output, subprocess=SUBPROCESS
    )
    page = output.read_text()
    assert page in said
    for rule in ("none", "2 agree"):
        assert re.search(rf"\n\| {rule} \| \d+ \| \d+ \| \d+ \| \d+% \|", page), page


def test_chunks_are_beside_whole_prompts_by_padding_and_speed(run, model, tmp_path):
    output = tmp_path / "chunks"
    bench = script("scripts/bench_chunks.py")
    chunks = bench.PLAN.format(
        model="tiny", max_length=64, prefill=[[64, 1]], slots=2, chunk="chunk = 16"
    )

    def run_job(work_dir, name, *others):
        # the speed is that of the embedded model
        return bench.run(work_dir, model if name == "smollm2" else name, *others)

    constants = {
        "LONGEST": 48,
        "LADDERS": {"ladder": [16, 48]},
        "PEER_PROMPTS": write_chats(tmp_path / "chats.jsonl"),
        "CHUNKS_OF_64": chunks,
        "plans": lambda: {"ladder": bench._plan([16, 48], 64, "")},
        "subprocess": SUBPROCESS,
        "run": run_job,
    }
    bench.subprocess = SUBPROCESS
    arguments = ("--work-dir", tmp_path / "work", "--output", output, "--prompts", 3, "--turns", 1)
    run("bench_chunks.py", "padding", "speed", *arguments, **constants)
    report = json.loads(output.with_suffix(".json").read_text())
    (padding,) = report["padding"]["runs"]
    assert padding["computed_tokens"] >= padding["real_tokens"] > 0
    page = output.with_suffix(".md").read_text()
    assert "\n| ladder | " in page and "\n| chunks of 64, 4 rows | " in page


def test_predictions_are_beside_the_seconds_of_jobs(run, model, tmp_path):
    output, calibration = tmp_path / "predictions", tmp_path / "calibration.json"
    factors = {kind: KindFactors() for kind in KINDS}
    table = Calibration("m", "float32", {}, "", factors, 0.0).to_json()
    calibration.write_text(json.dumps(table))
    grid = BucketGrid(64, ((32, 2),), 2, page=16)
    chats = write_chats(tmp_path / "chats.jsonl")
    constants = {
        "MODEL": str(model),
        "PROMPTS": chats,
        "subprocess": SUBPROCESS,
        "write_job": lambda path, **sizes: chats,
        "grids": lambda job: {"small": grid},
    }
    arguments = (calibration, "--work-dir", tmp_path / "work", "--output", output, "--turns", 1)
    run("check_predictions.py", *arguments, **constants)
    runs = json.loads(output.with_suffix(".json").read_text())["runs"]
    assert [graph["graph"] for graph in runs[0]["graphs"]] == ["prefill 32x2", "decode 64"]
    assert "\n| chats | small | decode 64 | " in output.with_suffix(".md").read_text()


def test_starts_are_measured_with_compilation_and_from_a_bundle(run, model, tmp_path, monkeypatch):
    def start_here(command, **options):
        text, *words = map(str, command[2:])
        if words[0] == "compile":
            return cli.main(words)
        monkeypatch.setattr(sys, "argv", [text, *words])
        said = io.StringIO()
        with redirect_stdout(said):
            exec(text, {})
        return SimpleNamespace(stdout=said.getvalue())

    plan, output = tmp_path / "small.toml", tmp_path / "start"
    plan.write_text(
        'schema = 3\ntarget = "cpu"\n[model]\nsource = "m"\nfingerprint = ""\n'
        '[numbers]\ndtype = "float32"\n[buckets]\nmax_length = 16\nprefill = [[8, 1]]\n'
        "decode_slots = 1\n"
    )
    arguments = (plan, "--model", model, "--work-dir", tmp_path / "work")
    constants = {"subprocess": SimpleNamespace(run=start_here, PIPE=None)}
    run("bench_start.py", *arguments, "--prepare", **constants)
    run("bench_start.py", *arguments, "--output", output, "--repeat", 1, **constants)
    found = json.loads(output.with_suffix(".json").read_text())["plans"]["small"]
    assert {kind: len(starts) for kind, starts in found["runs"].items()} == {"cold": 1, "bundle": 1}
    assert f"\n| small | {found['graphs']} | " in output.with_suffix(".md").read_text()


def test_formats_of_numbers_are_measured_beside_a_peer(run, work, tmp_path):
    output = tmp_path / "numbers"
    constants = {
        "CASES": {"int8": ("float32", "weights=int8")},
        "PEERS": {"vLLM, float32": "float32"},
        "SHAPES": {"prefill": (4, 8, 8), "decode": (2, 8, 8)},
        "REPEATS": 1,
    }
    prompts = ("--prompts", write_chats(tmp_path / "chats.jsonl"))
    arguments = ("--work-dir", work, "--output", output, *prompts, "--python-vllm", "python")
    run("bench_numbers.py", *arguments, **constants)
    report = json.loads(output.with_suffix(".json").read_text())
    assert list(report["cases"]) == ["int8", "vLLM, float32"]
    assert report["versions"]["jax"] == importlib.metadata.version("jax")
    assert "\n| int8 | " in output.with_suffix(".md").read_text()


@pytest.mark.reference
def test_engines_have_a_row_for_each_setting(run, work, tmp_path):
    output = tmp_path / "peers.json"
    constants = {
        "PROMPTS": write_chats(tmp_path / "chats.jsonl"),
        "SHORTEST_PROMPT": 1,
        "_matmul_ceiling": lambda threads, environment: {"float32": 1.0},
    }
    peers = ("--python-vllm", "python", "--python-llamacpp", "python")
    arguments = ("--work-dir", work, "--output", output, "--dtypes", "float32", *peers)
    said = run("bench_peers.py", *arguments, **constants)
    engines = [run["engine"] for run in json.loads(output.read_text())["runs"]]
    expected = {"noria": 1, "transformers": 4, "vllm": 1, "llamacpp": 6}
    assert {engine: engines.count(engine) for engine in engines} == expected
    assert re.search(r"\n\| noria, float32 \| [\d.]+ \| 1.00 \|", said), said


@pytest.mark.reference
def test_prompts_that_begin_alike_are_measured_with_and_without_sharing(run, work, tmp_path):
    output = tmp_path / "sharing"
    lines = write_chats(tmp_path / "chats.jsonl").read_text().splitlines()
    constants = {"batch_lines": lambda name, num_rows, order: lines, "CHUNKS": (4, 8)}
    arguments = ("--work-dir", work, "--output", output, "--python-vllm", "python")
    vllm = ("--vllm-slots", 4, "--vllm-block-sizes", 16, "--order", "shuffled")
    name = next(iter(script("scripts/make_sharing_workloads.py").WORKLOADS))
    run("bench_sharing.py", *arguments, *vllm, "--workloads", name, **constants)
    found = json.loads(output.with_suffix(".json").read_text())[name]
    settings = [run["setting"] for run in found["engines"]["runs"]]
    assert settings[0] == "noria, with sharing" and settings[2].endswith("rows sorted")
    assert [run["rows_equal_to_first"] for run in found["sharing"]["runs"]] == [3, 3]
    assert f"\n| {name} | 3 | 12 | " in output.with_suffix(".md").read_text()


def test_rows_with_schemas_are_beside_rows_without(run, work, tmp_path):
    output = tmp_path / "structured"
    schemas = {"labels": {"json": {"enum": ["positive", "negative"]}}}
    arguments = ("--work-dir", work, "--output", output, "--rows", 3, "--max-tokens", 24)
    run("bench_structured.py", *arguments, SCHEMAS=schemas)
    with_forms, without = json.loads(output.with_suffix(".json").read_text())["runs"]
    assert with_forms["valid"] == 3 and without["ms_per_decode_step"] > 0
    assert "\n| noria | 3 | " in output.with_suffix(".md").read_text()


def test_adapters_are_measured_beside_none(run, model):
    sizes = ("--adapters", 1, "--rank", 2, "--slots", 2, "--tokens", 4, "--repeats", 1)
    said = run("adapter_speed.py", *sizes, MODEL=str(model), IDS=(10, 250))
    assert re.fullmatch(r"(.+: [\d.]+ ms a step\n){3}", said), said


def test_signals_at_random_moments_end_jobs_as_promised(run, tmp_path):
    model, output = tmp_path / "model", tmp_path / "signals"
    write_model(model)
    # signals during imports cost little
    sizes = ("--trials", 1, "--early", 2, "--rows", 60, "--processes", 1)
    said = run("signal_trials.py", model, *sizes, "--output", output)
    assert "3 of 3 signals were answered as promised" in said
    trials = json.loads(output.with_suffix(".json").read_text())["trials"]
    assert len(trials) == 3 and all(trial["is_equal"] for trial in trials)
    assert "| processes | trials | stopped |" in output.with_suffix(".md").read_text()


def test_restarts_beside_owners_of_a_lock_keep_all_promises(run, tmp_path):
    output = tmp_path / "restarts"
    # one of each owner, without a model
    sizes = ("--trials", 6, "--commands", 0, "--silence", 1.5)
    said = run("restart_trials.py", tmp_path, *sizes, "--output", output, STEP_SECONDS=0.04)
    assert "6 of 6 restarts kept all promises" in said
    trials = json.loads(output.with_suffix(".json").read_text())["trials"]
    assert len({trial["owner"] for trial in trials}) == 6
    assert not any(trial["broken"] for trial in trials)
    assert "\n| killed, on this machine | stand-in | 1 | 0 | 1 | " in said


def test_trials_of_restarts_see_two_writers_and_late_rows_that_are_read(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    trials = script("scripts/restart_trials.py")

    def found(text: str, gone: int | None = None):
        words = [line.split() for line in text.split(", ")]
        events = [trials.Event(0.0, word, int(pid), int(file)) for word, pid, file in words]
        return trials.find_breaches(events, gone)

    assert found("take 1 0, row 1 7, release 1 0, take 2 0, row 2 7, release 2 0") == ([], 0)
    assert found("take 1 0, take 2 0, release 2 0")[0] == ["processes 1 and 2 had the lock"]
    assert found("take 1 0, row 2 7")[0] == ["process 2 wrote a row without the lock"]
    late = "take 1 0, row 1 7, take 2 0, row 1 7, row 2 {}, release 1 0, row 2 {}, release 2 0"
    assert found(late.format(8, 8), gone=1) == ([], 1)
    assert found(late.format(7, 7), gone=1) == (["a late row is in a journal that is read"], 1)


def test_starts_of_pods_that_are_wrong_end_as_promised(run, tmp_path):
    model, output = tmp_path / "model", tmp_path / "starts"
    write_model(model)
    cases = ("a typo in an option", "another version of noria")
    said = run("pod_start_trials.py", model, "--cases", *cases, "--output", output)
    assert "2 of 2 starts ended as promised" in said
    trials = json.loads(output.with_suffix(".json").read_text())["trials"]
    assert [(trial["case"], trial["process"]) for trial in trials] == [
        (case, process) for case in cases for process in range(2)
    ]
    assert re.search(r"\n\| another version of noria \| 1 \| [\d.]+ \| 2 \| noria: ", said)
