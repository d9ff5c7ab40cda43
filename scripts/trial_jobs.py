"""Jobs of a small model that trials start and disturb, and the records of trials."""

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from noria.runtime.devices.machine import describe_machine

COMMAND = "import sys; from noria.runtime import cli; sys.exit(cli.main_of_process())"
"""The program `noria`."""
MAX_TOKENS = 24
SETTINGS = ("--dtype", "float32", "--set", "buckets.prefill=[[32, 4]]")
SLOTS = ("--set", "buckets.decode_slots=4")


def write_rows(path: Path, count: int) -> Path:
    """Write a number of rows with random prompts, always the same ones."""
    draw = random.Random(1)
    own = {"model": "m", "max_tokens": MAX_TOKENS, "ignore_eos": True}
    with path.open("w") as file:
        for row in range(count):
            prompt = [draw.randrange(3, 200) for _ in range(draw.randint(1, 24))]
            url = {"method": "POST", "url": "/v1/completions"}
            line = {"custom_id": f"row-{row}", **url, "body": own | {"prompt": prompt}}
            file.write(json.dumps(line) + "\n")
    return path


def batch(model: Path, source: Path, output: Path, processes: int = 1) -> list[str]:
    """The arguments of a job, of one process or of each process of a pod."""
    files = ("batch", "-i", source, "-o", output, "--model", model)
    target = ("--target", f"cpu:{processes}", "--layout", f"data-parallel@data={processes}")
    return [*map(str, (*files, *SETTINGS, *SLOTS, *target))]


def free_address() -> str:
    """An address on this machine with a port that is free."""
    with socket.create_server(("localhost", 0)) as free:
        return f"localhost:{free.getsockname()[1]}"


def member(address: str, processes: int, rank: int) -> list[str]:
    """The options of one process of a pod."""
    size = ("--num-processes", str(processes))
    return ["--coordinator", address, *size, "--process-id", str(rank)]


def environment(cache: Path) -> dict[str, str]:
    """The environment of a job that keeps its programs in a folder."""
    return os.environ | {"XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu"}


def start(
    arguments: Sequence[str],
    variables: Mapping[str, str],
    before: Sequence[str] = (),
    program: Sequence[str] = ("-c", COMMAND),
    stderr: int | TextIO = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Start a process of Python.

    Args:
        arguments: The arguments of the program.
        variables: The environment.
        before: A command that starts the process, such as `nohup`.
        program: The program, as options of Python.
        stderr: The place of messages.
    """
    return subprocess.Popen(
        [*before, sys.executable, "-P", *program, *arguments],
        env=dict(variables),
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        text=True,
    )


def masked(output: Path) -> str:
    """The text of an output without its times."""
    return re.sub(r'"created":\d+', '"created":0', output.read_text("utf-8"))


def made_by(script: str) -> str:
    """The end of a record's first sentence: the script and the machine."""
    machine = describe_machine()
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"by `scripts/{script}` on {machine['processor']} with {machine['cores']} cores, Python "
        f"{machine['python']}, {versions}"
    )


def write_record(output: Path | None, page: str, trials: Sequence[Mapping[str, object]]) -> None:
    """Print a page, and write it and the trials into files with two suffixes."""
    print(page)
    if output is not None:
        found = {"machine": describe_machine(), "trials": trials}
        output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        output.with_suffix(".md").write_text(page)


def share(values: Sequence[float], part: float) -> float:
    """The smallest of some values that at least a part of them do not exceed."""
    return sorted(values)[max(0, -int(-part * len(values) // 1) - 1)]


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: It does not hold after some seconds.
    """
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"expected {what} within {seconds:g} s.")
        time.sleep(0.005)
