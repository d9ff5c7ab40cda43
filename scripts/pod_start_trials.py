"""Start pods in ten ways that are wrong or disturbed, and record how each process ends.

    python scripts/pod_start_trials.py model --output benchmarks/pod_starts

`model` is a small model on disk. Each case starts two or three processes of `noria batch`, of which
process 1 is given something else, comes late, does not come or is killed. A case fails if a process
ends with another code or last message than expected, later than expected, or with a stack trace.
"""

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import trial_jobs

ROWS = 40
START_SECONDS = 20
PEER_SECONDS = 10
MARGIN_SECONDS = 30.0
"""The time for imports, and for a process to tell the others."""
KILLED = (-signal.SIGKILL, "")
FINE = (0, "40 rows, 0 errors|^$")


@dataclass(frozen=True)
class Case:
    """A start, and the code and the last message of every process."""

    name: str
    expected: Sequence[tuple[int, str]]
    """For each process a code and a pattern; the process after the last one is not started."""
    options: Sequence[str] = ()
    """Options of process 1, which replace equal ones before them."""
    size: int = 2
    """The number of processes that the command line says."""
    late: float = 0.0
    """Seconds after which process 1 is started."""
    start_seconds: int = START_SECONDS
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of the environment of process 1."""
    killed_when: str = ""
    """`imports` or `compiles`; process 1 is killed then."""
    seconds: float = START_SECONDS
    """The time within which all processes end, without the margin."""


def make_cases(folder: Path) -> list[Case]:
    """All cases; `{other}` in an option stands for an address on which nobody listens."""
    others = trial_jobs.write_rows(folder / "other.jsonl", ROWS + 1)
    release = folder / "release" / "noria-9.9.dist-info"
    release.mkdir(parents=True)
    (release / "METADATA").write_text("Metadata-Version: 2.1\nName: noria\nVersion: 9.9\n")
    late = "process 1 did not. Start the same command exactly once"
    refused = r"expected process 0 to answer at .* within 20 s, but it did not \(Connection refused"
    unknown = r"expected process 0 to answer at .* within 20 s, but it did not \(.*(name|service)"
    version = "expected one version of noria on all processes, got .* and 9.9 on process 1"
    gone = "process 0: process 1 ended while the processes connected"
    lost = f"process 1 has been silent for .*the limit is {PEER_SECONDS} s"
    return [
        Case("process 2 is not started", [(2, "process 2 did not")] * 2, size=3),
        Case(
            "a typo in an option",
            [(2, "process 1 failed before the start: its options"), (2, "unrecognized arg")],
            ["--dtpye", "float32"],
            seconds=0,
        ),
        Case("another port", [(2, late), (2, refused)], ["--coordinator", "{other}"]),
        Case(
            "a host that does not exist",
            [(2, late), (2, unknown)],
            ["--coordinator", "no-such-host.invalid:9000"],
        ),
        Case(
            "another input",
            [(2, "process 0 has .*, process 1 has")] * 2,
            ["-i", str(others)],
            seconds=0,
        ),
        Case(
            "another plan",
            [(2, "overrides: .*process 1 has .*buckets.decode_slots=8")] * 2,
            ["--set", "buckets.decode_slots=8"],
            seconds=0,
        ),
        Case(
            "another version of noria",
            [(2, version)] * 2,
            variables={"PYTHONPATH": str(release.parent)},
            seconds=0,
        ),
        Case("30 s late", [FINE] * 2, late=30, start_seconds=60, seconds=120),
        Case("killed while it imports", [(75, gone), KILLED], killed_when="imports", seconds=0),
        Case(
            "killed while it compiles",
            [(75, lost), KILLED],
            killed_when="compiles",
            seconds=PEER_SECONDS,
        ),
    ]


@dataclass
class Ended:
    """A process that has ended."""

    code: int
    seconds: float
    """Seconds from its start, or from its death for the others of a killed process."""
    message: str
    """Its last line."""
    broken: str
    """The promise that was broken, if any."""


class Pods:
    """Starts the processes of one job, each case with its own output and cache."""

    def __init__(self, model: Path, folder: Path):
        self._model, self._folder = model, folder
        self._source = trial_jobs.write_rows(folder / "in.jsonl", ROWS)

    def run(self, number: int, case: Case) -> list[Ended]:
        """Run a case; return the ends of its processes."""
        folder = self._folder / f"case{number}"
        folder.mkdir()
        address = trial_jobs.free_address()
        job = trial_jobs.batch(self._model, self._source, folder / "out.jsonl", case.size)
        limits = ("--start-timeout-seconds", "--peer-timeout-seconds")
        job += [limits[0], str(case.start_seconds), limits[1], str(PEER_SECONDS)]
        own = [option.format(other=trial_jobs.free_address()) for option in case.options]
        variables = trial_jobs.environment(folder / "cache")
        messages = [folder / f"stderr{rank}" for rank in range(len(case.expected))]
        processes: list[subprocess.Popen[str]] = []
        starts: list[float] = []
        with ExitStack() as files:
            for rank, path in enumerate(messages):
                words = [*job, *trial_jobs.member(address, case.size, rank)]
                time.sleep(case.late if rank == 1 else 0)
                starts.append(time.monotonic())
                stderr = files.enter_context(path.open("w"))
                extra = (own, case.variables) if rank == 1 else ([], {})
                processes.append(
                    trial_jobs.start([*words, *extra[0]], variables | dict(extra[1]), stderr=stderr)
                )
            if (killed := kill(case, processes[1], messages[0])) is not None:
                starts = [killed, *starts[1:]]
            ends = wait(processes)
        return [
            judge(
                case,
                expected,
                process.returncode,
                end - begun,
                path.read_text().replace(f"{folder}/", ""),
            )
            for expected, process, begun, end, path in zip(
                case.expected, processes, starts, ends, messages, strict=True
            )
        ]


def kill(case: Case, process: subprocess.Popen[str], messages: Path) -> float | None:
    """Kill process 1 if the case says so; return the moment."""
    if not case.killed_when:
        return None
    if case.killed_when == "imports":
        maps = Path(f"/proc/{process.pid}/maps")
        trial_jobs.wait_until(lambda: "jaxlib" in maps.read_text(), 120, "an import of jax")
    else:
        plan = re.compile("^prefill:", re.MULTILINE)
        trial_jobs.wait_until(lambda: plan.search(messages.read_text()), 120, "a plan")
    process.kill()
    return time.monotonic()


def wait(processes: Sequence[subprocess.Popen[str]]) -> list[float]:
    """Wait for the ends of all processes; return the moments."""
    ends: dict[int, float] = {}
    while len(ends) < len(processes):
        for rank, process in enumerate(processes):
            if rank not in ends and process.poll() is not None:
                ends[rank] = time.monotonic()
        time.sleep(0.01)
    return [ends[rank] for rank in range(len(processes))]


def judge(case: Case, expected: tuple[int, str], code: int, seconds: float, said: str) -> Ended:
    """Compare the end of a process with what is expected of it."""
    last = (said.splitlines() or [""])[-1]
    broken = ""
    if code != expected[0] or not re.search(expected[1], last):
        broken = f"expected {expected[0]} and {expected[1]!r}"
    elif "Traceback" in said:
        broken = "expected no stack trace"
    elif code >= 0 and seconds > case.seconds + MARGIN_SECONDS:
        broken = f"expected an end within {case.seconds + MARGIN_SECONDS:g} s"
    return Ended(code, round(seconds, 1), last, broken)


def report(cases: Sequence[Case], found: Sequence[Sequence[Ended]]) -> str:
    """The record as Markdown."""
    kept = sum(not any(one.broken for one in ends) for ends in found)
    lines = [
        "# Starts of pods that are wrong or disturbed",
        "",
        f"{kept} of {len(cases)} starts ended as promised, "
        f"{trial_jobs.made_by('pod_start_trials.py')}. Processes wait for at most "
        f"{START_SECONDS} s for each other.",
        "",
        "| process 1 | process | seconds | exit code | last message |",
        "|---|--:|--:|--:|---|",
    ]
    for case, ends in zip(cases, found, strict=True):
        for rank, end in enumerate(ends):
            message = end.message.replace("|", "\\|")
            lines.append(
                f"| {case.name} | {rank} | {end.seconds:.1f} | {end.code} | {message or '-'} |"
            )
    lines += [
        "",
        "Seconds are from the start of each process, or from the death of the one that is killed.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", type=Path)
    add("--cases", nargs="*", help="names of the cases to run; all by default")
    add("--output", type=Path, help="path without suffix of .json and .md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        cases = make_cases(Path(name))
        cases = [case for case in cases if options.cases is None or case.name in options.cases]
        pods, found = Pods(options.model, Path(name)), []
        for number, case in enumerate(cases):
            found.append(pods.run(number, case))
            for rank, end in enumerate(found[-1]):
                if end.broken:
                    print(f"broken: {case.name}, process {rank}: {end}", flush=True)
    rows = [
        {"case": case.name, "process": rank, **asdict(end)}
        for case, ends in zip(cases, found, strict=True)
        for rank, end in enumerate(ends)
    ]
    trial_jobs.write_record(options.output, report(cases, found), rows)
    if any(row["broken"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
