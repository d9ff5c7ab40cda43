"""Run the command `noria` in its own process, and write and read its lines."""

import io
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fork_server import ForkedCommand

from noria.runtime.cli import main

COMMAND = (
    sys.executable,
    "-c",
    "import sys; from noria.runtime import cli; from noria.runtime.devices import machine; "
    # the same dtype on every machine
    "machine.instructions = list; sys.exit(cli.main_of_process())",
)


@dataclass(frozen=True)
class Noria:
    """Runs the command in one environment; each run is a fork of the next server."""

    environment: dict[str, str]
    model: Path
    servers: Iterator[socket.socket] | None = None
    """None: every command is a new process that imports all that it needs."""

    def with_cache(self, folder: Path) -> "Noria":
        return replace(self, environment=self.environment | {"XDG_CACHE_HOME": str(folder)})

    def without_server(self, **variables: str) -> "Noria":
        return replace(self, environment=self.environment | variables, servers=None)

    def start(self, *arguments: object, start_new_session: bool = False) -> subprocess.Popen[str]:
        options: dict[str, Any] = {
            "env": self.environment,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "start_new_session": start_new_session,
        }
        given = [*map(str, arguments)]
        if self.servers is None:
            return subprocess.Popen([*COMMAND, *given], **options)
        return ForkedCommand(next(self.servers), given, **options)

    def run(self, *arguments: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=300)
        assert process.returncode == expect, f"exit {process.returncode}:\n{out}\n{err}"
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run_here(self, *arguments: object) -> str:
        """Run a command in this process, which has imported all modules, and return its stdout."""
        said = io.StringIO()
        with redirect_stdout(said):
            assert main([*map(str, arguments)]) == 0
        return said.getvalue()

    def refuse(self, *arguments: object, expect: int = 2) -> str:
        """Return the refusal of a command, run in this process for speed."""
        said = io.StringIO()
        with redirect_stderr(said):
            assert main([*map(str, arguments)]) == expect, said.getvalue()
        return said.getvalue()

    def kill(self, output: Path, *arguments: object, after: int) -> None:
        """Start `noria batch` and kill it after some lines of its journal, before its output."""
        process = self.start("batch", "-o", output, "--model", self.model, *arguments)
        wait_for_records(process, output, after)
        process.kill()
        process.communicate()
        assert process.returncode < 0, f"the job ended with {process.returncode} before the kill"
        assert not output.exists()

    def batch(self, source: Path, output: Path, *options: object, expect: int = 0):
        """Run a job to its end; return the output's rows and the manifest."""
        arguments = ("-i", source, "-o", output, "--model", self.model)
        self.run("batch", *arguments, *options, expect=expect)
        return read_rows(output), read_manifest(output)


def wait_for_records(process: subprocess.Popen[str], output: Path, count: int) -> None:
    """Wait until a job has written more than `count` lines of its journal, besides its runs."""
    journal = output.with_name(f"{output.name}.journal")
    deadline = time.monotonic() + 120
    while not (journal.exists() and num_records(journal) > count):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)


def num_records(journal: Path) -> int:
    """Count the whole lines of a journal that are not the figures of a run."""
    lines = journal.read_bytes().split(b"\n")[:-1]
    return sum(b'{"kind":"run"' not in line for line in lines)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def read_manifest(output: Path) -> dict[str, Any]:
    return json.loads(output.with_name(f"{output.name}.manifest.json").read_text("utf-8"))


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def completion(custom_id: str, prompt: str | list[int], **body: Any) -> dict[str, Any]:
    """An OpenAI Batch line."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "m", "prompt": prompt, **body},
    }


def chat(custom_id: str, content: str, **body: Any) -> dict[str, Any]:
    """An OpenAI Batch line."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": content}], **body},
    }


def plan_text(
    buckets: str, *, target: str = "cpu", fingerprint: str = "", layout: str = "", others: str = ""
) -> str:
    """Return the text of a float32 plan, for any model unless a fingerprint is given.

    `layout` is a layout's name; `others` are tables after the buckets, such as the layout's rules.
    """
    lies = f'layout = "{layout}"\n' if layout else ""
    model = f'[model]\nsource = "model"\nfingerprint = "{fingerprint}"\n'
    numbers = '[numbers]\ndtype = "float32"\n'
    head = f'schema = 3\ntarget = "{target}"\n{lies}'
    return f"{head}\n{model}\n{numbers}\n[buckets]\n{buckets}{others}"


def answer(row: dict[str, Any]) -> Any:
    """Return the content of an output line, without ids and times."""
    if row["response"] is None:
        return row["error"]
    body = row["response"]["body"]
    return body.get("error") or (body["choices"], body["usage"])
