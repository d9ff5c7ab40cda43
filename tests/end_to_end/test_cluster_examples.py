"""The example files for clusters run as they are: stopped by a signal, started again, and merged.

Stand-ins take the place of `srun`, which starts processes with Slurm's variables, and of
`scontrol`, which notes what it queues again.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from command import (
    COMMAND,
    completion,
    num_records,
    plan_text,
    read_manifest,
    read_rows,
    write_lines,
)

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).resolve().parent.parent.parent / "examples" / "cluster"
NORIA = f"""#!/bin/sh
exec {shlex.join(COMMAND)} "$@"
"""
SRUN = """#!/usr/bin/env bash
pids=()
for ((i = 0; i < ${NTASKS:-1}; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NTASKS=${NTASKS:-1} "$@" &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "$code"
"""
SCONTROL = """#!/bin/sh
echo "$@" >> queued
"""
PLAN = plan_text(
    "max_length = 64\nprefill = [[16, 4]]\ndecode_slots = 8\nslot_groups = 2\n",
    target="cpu:2",
    layout="data",
    others='\n[mesh]\ndata = 2\n\n[rules]\nbatch = "data"\n',
)
ROWS = [
    completion(f"row-{i}", [3 + i % 50, 4, 5], max_tokens=50, ignore_eos=True) for i in range(1200)
]
"""More than the slots of eight parts, so that a signal leaves some of them to the next run."""


@pytest.fixture
def folder(noria, tmp_path):
    """A folder with the names that the examples use, and the stand-ins in `bin`."""
    for name, text in [("noria", NORIA), ("srun", SRUN), ("scontrol", SCONTROL)]:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "MODEL").symlink_to(noria.model)
    write_lines(tmp_path / "in.jsonl", ROWS[:300])
    return tmp_path


def start(noria, folder, script: str, **variables: object) -> subprocess.Popen[str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = noria.environment | {"PATH": path} | {k: str(v) for k, v in variables.items()}
    return subprocess.Popen(
        ["bash", "-c", script], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str], expect: int = 0) -> None:
    said = process.communicate(timeout=240)[1]
    assert process.returncode == expect, said


def wait_for_rows(process: subprocess.Popen[str], output: Path) -> None:
    journal, deadline = output.with_name(f"{output.name}.journal"), time.monotonic() + 120
    while not (journal.exists() and num_records(journal) > 5):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


def signal_noria(folder: Path, number: signal.Signals) -> None:
    """Send a signal to the processes of noria that run in a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_here = (process / "cwd").readlink() == folder
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if is_here and b"main_of_process" in command:
            os.kill(int(process.name), number)


def free_job() -> int:
    """A job of Slurm whose port is free: jax adds 61440 to the number of the job."""
    for job in range(os.getpid() % 4000, 4096):
        with socket.socket() as server:
            try:
                server.bind(("localhost", 61440 + job))
            except OSError:
                continue
            return job
    raise AssertionError("no port is free")


def runs(output: Path) -> list[str]:
    return [run["end"] for run in read_manifest(output)["runs"]]


def test_a_loop_starts_a_stopped_job_again(noria, folder):
    write_lines(folder / "in.jsonl", ROWS[:200])
    process = start(noria, folder, (FOLDER / "loop.sh").read_text(), PAUSE=0)
    wait_for_rows(process, folder / "out.jsonl")
    signal_noria(folder, signal.SIGTERM)
    finish(process)
    assert runs(folder / "out.jsonl") == ["SIGTERM", "finished"]
    assert len(read_rows(folder / "out.jsonl")) == 200


def test_an_array_of_slurm_queues_a_stopped_task_again_and_is_merged(noria, folder):
    script = (FOLDER / "slurm_replicas.sh").read_text()
    task = {"SLURM_ARRAY_TASK_COUNT": 2, "SLURM_ARRAY_JOB_ID": 7}
    process = start(noria, folder, script, SLURM_ARRAY_TASK_ID=0, **task)
    wait_for_rows(process, folder / "part0.jsonl")
    signal_noria(folder, signal.SIGTERM)
    finish(process, expect=75)
    assert (folder / "queued").read_text() == "requeue 7_0\n"
    for index in range(2):
        finish(start(noria, folder, script, SLURM_ARRAY_TASK_ID=index, **task))
    (merge,) = re.findall(r"--wrap '(noria merge .*)'", script)
    finish(start(noria, folder, merge))
    assert len(read_rows(folder / "out.jsonl")) == 300
    assert runs(folder / "part0.jsonl") == ["SIGTERM", "finished"]


def test_a_pod_of_slurm_finds_its_processes(noria, folder):
    (folder / "plan.toml").write_text(PLAN)
    write_lines(folder / "in.jsonl", ROWS[:40])
    slurm = {"SLURM_JOB_ID": free_job(), "SLURM_STEP_NODELIST": "localhost"}
    finish(start(noria, folder, (FOLDER / "slurm_pod.sh").read_text(), NTASKS=2, **slurm))
    (run,) = read_manifest(folder / "out.jsonl")["runs"]
    assert run["processes"].startswith("2 processes") and run["rows"] == 40


def test_a_container_of_kubernetes_passes_the_signal_on_and_is_replaced(noria, folder):
    (manifest,) = yaml.safe_load_all((FOLDER / "kubernetes_replicas.yaml").read_text())
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    write_lines(folder / "in.jsonl", ROWS)
    output = folder / "part3.jsonl"
    process = start(noria, folder, container["args"][0], JOB_COMPLETION_INDEX=3)
    wait_for_rows(process, output)
    process.send_signal(signal.SIGTERM)  # to bash alone
    finish(process, expect=75)
    finish(start(noria, folder, container["args"][0], JOB_COMPLETION_INDEX=3))
    assert runs(output) == ["SIGTERM", "finished"]
    assert [row["custom_id"] for row in read_rows(output)] == [
        f"row-{i}" for i in range(3, 1200, 8)
    ]
