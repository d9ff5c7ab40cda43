"""One job on several processes over one mesh of eight simulated devices, with real signals.

The mesh is data=2, tensor=4. With two processes of four devices, the sums of tensor parallelism
stay inside a process; with four processes of two devices, they cross processes.
"""

import json
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from command import (
    Noria,
    answer,
    completion,
    num_records,
    plan_text,
    read_manifest,
    read_rows,
    write_lines,
)
from file_identity import identity
from model_on_disk import write_model

from noria.runtime.checkpoint import open_model

LIMIT = ("--peer-timeout-seconds", 5)
LIMIT_SECONDS = 5 + 5
PLAN = plan_text(
    """\
max_length = 64
prefill = [[16, 4]]
decode_slots = 8
page = 16
slot_groups = 2
steps_per_call = 2
""",
    target="cpu:8",
    layout="data-tensor",
    others="""
[mesh]
data = 2
tensor = 4

[rules]
batch = "data"
query_heads = "tensor"
mlp = "tensor"
vocab = "tensor"
""",
)


@dataclass(frozen=True)
class PodJob:
    """A job, and methods to start it on several processes."""

    noria: Noria
    source: Path
    plan: Path
    whole: Path
    """The output of two processes that ran without a disturbance."""

    def arguments(self, output: Path, *options: object) -> tuple[object, ...]:
        files = ("-i", self.source, "-o", output, "--model", self.noria.model, "--plan", self.plan)
        return ("batch", *files, *options)

    def start(self, output: Path, size: int = 2, *options: object, each=lambda rank: ()):
        """Start all processes of a pod."""
        return self.start_each(size, lambda rank: self.arguments(output, *options, *each(rank)))

    def start_each(self, size: int, arguments: Callable[[int], tuple[object, ...]]):
        """Start the processes of any command, each with its own arguments."""
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        pod = ("--coordinator", f"localhost:{port}", "--num-processes", size)
        return [
            self.noria.start(*arguments(rank), *pod, "--process-id", rank) for rank in range(size)
        ]

    def run(self, output: Path, size: int = 2, *options: object, expect: int = 0) -> list[str]:
        """Run a pod to its end; return each process's stderr."""
        ended = wait(self.start(output, size, *options))
        assert [code for code, _ in ended] == [expect] * size, ended
        return [said for _, said in ended]


def wait(processes: list[subprocess.Popen[str]], timeout: float = 120) -> list[tuple[int, str]]:
    """Return the exit code and stderr of each process."""
    try:
        said = [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, err) for process, err in zip(processes, said, strict=True)]


def journal_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.journal")


def wait_for_rows(processes: list[subprocess.Popen[str]], output: Path, count: int = 4) -> None:
    """Wait until the pod is in the middle of its rows."""
    deadline = time.monotonic() + 120
    # a header and a plan stand before the rows
    journal = journal_of(output)
    while not (journal.exists() and num_records(journal) >= count + 2):
        is_running = all(process.poll() is None for process in processes)
        assert is_running and time.monotonic() < deadline, wait(processes)
        time.sleep(0.01)


def masked(path: Path) -> str:
    return re.sub(r'"created":\d+', '"created":0', path.read_text("utf-8"))


@pytest.fixture(scope="module")
def job(noria, tmp_path_factory) -> PodJob:
    folder = tmp_path_factory.mktemp("pod")
    model = folder / "model"
    write_model(model, kv_heads=4, num_experts=4)
    rng = random.Random(5)
    rows = [
        completion(
            f"row-{i}",
            [rng.randrange(3, 250) for _ in range(rng.randint(1, 12))],
            temperature=0.8 * (i % 2),
            max_tokens=rng.randint(12, 24),
            ignore_eos=True,
        )
        for i in range(24)
    ]
    for row in rows[3::6]:
        rule = {"answer": "([a-z])", "stop_when": 2, "probe_every": 3, "probes": 1}
        row["body"] |= {"n": 3, "noria": rule}
    # greedy rows are repeated, sampled rows are not
    rows += [row | {"custom_id": f"again-{i}"} for i, row in enumerate(rows[:4])]
    source = write_lines(folder / "in.jsonl", rows)
    plan = folder / "plan.toml"
    plan.write_text(PLAN)
    made = PodJob(replace(noria, model=model), source, plan, folder / "whole.jsonl")
    made.run(made.whole)
    return made


@pytest.fixture(scope="module")
def stopped(job, tmp_path_factory) -> tuple[Path, list[tuple[int, str]]]:
    """A job of two processes after a SIGTERM to one: its folder, exit codes and stderr."""
    output = tmp_path_factory.mktemp("stopped") / "out.jsonl"
    processes = job.start(output)
    wait_for_rows(processes, output)
    processes[1].send_signal(signal.SIGTERM)
    return output.parent, wait(processes)


def copy_of(stopped, tmp_path: Path) -> Path:
    """The output of a copy of the stopped job."""
    return shutil.copytree(stopped[0], tmp_path / "copy") / "out.jsonl"


def test_two_processes_answer_as_one_does_and_compile_nothing_in_the_run(job, tmp_path):
    output = tmp_path / "out.jsonl"
    job.noria.run(*job.arguments(output))
    assert masked(output) == masked(job.whole)
    manifest = read_manifest(job.whole)
    assert manifest["compiles_during_run"] == 0
    assert manifest["rows"]["repeated"] == 2
    with open_model(job.noria.model) as files:
        digest = files.weights_digest().result()
    assert manifest["weights"] == read_manifest(output)["weights"] == digest
    experts = manifest["generator"]["experts"]
    assert experts == read_manifest(output)["generator"]["experts"]
    assert experts["prefill"]["choices"] and experts["decode"]["choices"]
    assert manifest["setups"] == ["2 processes of 4 devices, gloo on cpu:8"]
    assert read_manifest(output)["setups"] == ["1 process on cpu:8"]


@pytest.mark.slow
def test_four_processes_of_two_devices_write_the_bytes_of_two_of_four(job, tmp_path):
    output = tmp_path / "out.jsonl"
    job.run(output, 4)
    assert masked(output) == masked(job.whole)


def answers(path: Path) -> list:
    """Return the answers without their ids, which differ between plans."""
    return [answer(row) for row in read_rows(path)]


def test_a_pod_takes_its_executables_all_together_or_not_at_all(job, tmp_path):
    bundle, output = tmp_path / "bundle", tmp_path / "out.jsonl"
    files = ("--model", job.noria.model, "--plan", job.plan, "-o", bundle)
    compiling = job.start_each(2, lambda rank: ("compile", *files))
    ended = wait(compiling)
    assert [code for code, _ in ended] == [0, 0], ended
    assert "compile [1/" in ended[0][1] and "compile [" not in ended[1][1]
    leader, follower = job.run(output, 2, "--plan", bundle)
    assert "executables taken" in leader
    assert "compile [" not in leader + follower and "instead" not in leader + follower
    assert answers(output) == answers(job.whole)
    # a bundle is its plan, so a process without one agrees, and all compile
    output = tmp_path / "mixed.jsonl"
    mixed = wait(job.start(output, 2, each=lambda rank: ("--plan", bundle) if rank else ()))
    assert [code for code, _ in mixed] == [0, 0], mixed
    assert "process 0: its --plan is no bundle. The bundle is not used" in mixed[0][1]
    assert answers(output) == answers(job.whole)
    # one process lacks an executable: all compile, or one compiler might wait for the others
    next((bundle / "process-1-of-2" / "graphs").iterdir()).unlink()
    output = tmp_path / "compiled.jsonl"
    leader = job.run(output, 2, "--plan", bundle)[0]
    assert re.search("process 1: .*No such file.* The bundle is not used", leader)
    assert not re.search(f"bundle {bundle}: .*executables taken", leader)
    assert re.search(r"compile cache: \d+ executables taken|compile \[1/", leader)
    assert answers(output) == answers(job.whole)
    alone = job.noria.run(*job.arguments(tmp_path / "alone.jsonl", "--plan", bundle))
    assert "bundle.json: No such file" in alone.stderr


@pytest.mark.slow
def test_processes_that_compile_another_model_refuse_by_name(job, tmp_path):
    other = tmp_path / "other"
    write_model(other, kv_heads=4, num_experts=4, num_layers=3)
    models = (job.noria.model, other)
    files = ("--plan", job.plan, "-o", tmp_path / "bundle")
    for code, said in wait(
        job.start_each(2, lambda rank: ("compile", "--model", models[rank], *files))
    ):
        assert code == 2
        assert "model: process 0 has" in said and "Traceback" not in said
    assert not (tmp_path / "bundle").exists()


def test_a_complete_job_run_again_ends_on_every_process(job):
    before = identity(job.whole)
    leader, follower = job.run(job.whole)
    assert "complete already" in leader and "complete already" not in follower
    assert identity(job.whole) == before


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_process_is_named_and_the_job_goes_on_later(job, tmp_path, victim):
    output = tmp_path / "out.jsonl"
    processes = job.start(output, 2, *LIMIT)
    wait_for_rows(processes, output)
    killed = time.monotonic()
    processes[victim].kill()
    (code, said) = wait(processes)[1 - victim]
    assert time.monotonic() - killed < LIMIT_SECONDS
    assert code > 0
    # a lock that is left behind would stop a run on another host
    assert victim == 0 or not output.with_name("out.jsonl.lock").exists()
    assert f"noria: process {1 - victim}: process {victim}" in said
    assert "stack trace" not in said and "    @ " not in said and "[Gloo]" not in said
    job.run(output)
    assert masked(output) == masked(job.whole)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_hanging_process_is_named_and_ends_itself_when_it_wakes(job, tmp_path, victim):
    output = tmp_path / "out.jsonl"
    processes = job.start(output, 2, *LIMIT)
    wait_for_rows(processes, output)
    stopped_at = time.monotonic()
    processes[victim].send_signal(signal.SIGSTOP)
    code, said = wait([processes[1 - victim]])[0]
    assert time.monotonic() - stopped_at < LIMIT_SECONDS
    assert code > 0
    assert f"process {victim} has been silent for" in said
    processes[victim].send_signal(signal.SIGCONT)
    assert wait([processes[victim]])[0][0] > 0
    job.run(output)
    assert masked(output) == masked(job.whole)


def test_a_sigterm_to_one_process_drains_all_and_the_job_goes_on_later(job, stopped, tmp_path):
    assert [code for code, _ in stopped[1]] == [75, 75]
    leader = stopped[1][0][1]
    assert "SIGTERM: finishing" in leader and "run the same command again" in leader
    output = copy_of(stopped, tmp_path)
    assert not output.exists()
    assert "resumed" in job.run(output)[0]
    assert masked(output) == masked(job.whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "targets", "status"),
    [
        (signal.SIGTERM, [0], 75),
        (signal.SIGTERM, [0, 1], 75),
        (signal.SIGINT, [0, 1], 130),
        (signal.SIGINT, [1], 130),
    ],
)
def test_a_signal_to_any_process_ends_all_with_its_status(job, tmp_path, number, targets, status):
    output = tmp_path / "out.jsonl"
    processes = job.start(output)
    wait_for_rows(processes, output)
    for target in targets:
        processes[target].send_signal(number)
    assert [code for code, _ in wait(processes)] == [status] * 2
    job.run(output)
    assert masked(output) == masked(job.whole)


def wait_for_the_build(process: subprocess.Popen[str]) -> None:
    """Wait until process 0 has printed the plan, before the build."""
    assert process.stderr is not None
    assert any(line.startswith("prefill:") for line in process.stderr)


@pytest.mark.slow
def test_a_process_killed_during_the_build_is_named_by_one_that_compiles(job, tmp_path):
    # no compile cache, so that the build takes a while
    cold = replace(job, noria=job.noria.with_cache(tmp_path / "cache"))
    processes = cold.start(tmp_path / "out.jsonl", 2, *LIMIT)
    wait_for_the_build(processes[0])
    killed = time.monotonic()
    processes[1].kill()
    (code, said) = wait(processes)[0]
    assert time.monotonic() - killed < LIMIT_SECONDS
    assert code > 0
    assert "process 1 has been silent for" in said


@pytest.mark.slow
def test_a_signal_during_the_build_ends_all(job, tmp_path):
    output = tmp_path / "out.jsonl"
    processes = job.start(output)
    wait_for_the_build(processes[0])
    processes[1].send_signal(signal.SIGTERM)
    assert [code for code, _ in wait(processes)] == [75, 75]
    job.run(output)
    assert masked(output) == masked(job.whole)


def test_another_set_up_is_refused_and_allowed_with_its_flag_which_the_manifest_notes(
    job, stopped, tmp_path
):
    output = copy_of(stopped, tmp_path)
    refused = job.noria.refuse(*job.arguments(output))
    assert "processes: there 2 processes of 4 devices, gloo on cpu:8, now 1 process on" in refused
    assert "--allow-different-numerics" in refused
    job.noria.run(*job.arguments(output, "--allow-different-numerics"))
    assert read_manifest(output)["setups"] == [
        "2 processes of 4 devices, gloo on cpu:8",
        "1 process on cpu:8",
    ]
    assert masked(output) == masked(job.whole)


def test_processes_that_were_given_different_things_refuse_by_name(job, tmp_path):
    edited = tmp_path / "edited.jsonl"
    edited.write_text(job.source.read_text().replace("row-7", "row-seven"))
    output = tmp_path / "out.jsonl"
    given = ((), ("-i", edited, "--seed", 7))
    for code, said in wait(job.start(output, each=lambda rank: given[rank])):
        assert code == 2
        assert "seed: process 0 has 0, process 1 has 7" in said
        assert re.search("input: process 0 has sha256:[0-9a-f]+, process 1 has sha256:", said)
        assert "compile [" not in said and "Traceback" not in said


@pytest.mark.slow
def test_a_full_disk_of_process_0_ends_all_and_the_job_goes_on_later(job, stopped, tmp_path):
    resource = pytest.importorskip("resource")
    output = copy_of(stopped, tmp_path)
    processes = job.start(output)
    room = journal_of(output).stat().st_size + 1000
    resource.prlimit(processes[0].pid, resource.RLIMIT_FSIZE, (room, room))
    ended = wait(processes)
    assert [code for code, _ in ended] == [75, 75]
    assert all("cannot be written" in said for _, said in ended)
    job.run(output)
    assert masked(output) == masked(job.whole)


@pytest.mark.slow
def test_a_bad_row_ends_all_where_that_was_asked_for(job, tmp_path):
    rows = [*job.source.read_text().splitlines(), json.dumps(completion("long", [5] * 60))]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(rows) + "\n")
    output = tmp_path / "out.jsonl"
    ended = wait(job.start(output, 2, "-i", source, "--on-error", "raise"))
    assert [code for code, _ in ended] == [1, 1]
    assert all("context_length_exceeded" in said for _, said in ended)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--coordinator", "localhost:1"], "expected all three, or none of them"),
        (["--num-processes", "2", "--process-id", "0"], "expected all three, or none of them"),
        (["--coordinator", "x:1", "--num-processes", "2", "--process-id", "2"], "expected 0 to 1"),
        (["--distributed", "auto", "--process-id", "0"], "--distributed auto alone"),
        (
            ["--coordinator", "localhost:1", "--num-processes", "3", "--process-id", "1"],
            "target cpu:8: expected a number of devices that 3 processes share evenly, got 8. Ask "
            "for --target cpu:9.",
        ),
    ],
)
def test_options_that_make_no_pod_are_refused_at_once(job, tmp_path, options, message):
    assert message in job.noria.refuse(*job.arguments(tmp_path / "out.jsonl", *options))


def test_a_cluster_that_jax_cannot_detect_is_refused(job, tmp_path):
    arguments = job.arguments(tmp_path / "out.jsonl", "--distributed", "auto")
    refused = job.noria.run(*arguments, expect=2)
    assert "expected a cluster that jax can detect" in refused.stderr


def test_a_coordinators_port_that_is_taken_is_refused(job, tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        pod = ("--coordinator", f"localhost:{port}", "--num-processes", 2, "--process-id", 0)
        refused = job.noria.refuse(*job.arguments(tmp_path / "out.jsonl", *pod))
    assert f"process 0 cannot listen on port {port}" in refused
