"""One process of a restart trial: a job on a host of any name, which notes when it writes.

    python scripts/restart_process.py EVENTS HOST MACHINE SILENCE stand-in IN OUT SECONDS_PER_STEP
    python scripts/restart_process.py EVENTS HOST MACHINE SILENCE batch ...

`stand-in` is the whole job (`run_job`: its lock, journal and output) with the stand-in of the tests
for model and device, and without jax. Otherwise the words are a command of noria.

A line of EVENTS has a moment, a word (`ask`, `take` or `release` for the lock, `row` for a row in
the journal), the process, and for a row the number of the journal's file.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from noria.runtime import cli, errors
from noria.runtime.batch import lock as locks
from noria.runtime.batch.journal import Journal
from noria.runtime.batch.lock import JobLock
from noria.runtime.console import tell


def note_events(path: Path) -> None:
    """Note when this process takes and releases the lock, and when it writes a row."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    enter, release, record = JobLock.__enter__, JobLock.release, Journal.record_row

    def note(word: str, file: int = 0) -> None:
        os.write(log, f"{time.monotonic()} {word} {os.getpid()} {file}\n".encode())

    def take(lock: JobLock) -> JobLock:
        note("ask")
        entered = enter(lock)
        note("take")
        return entered

    def leave(lock: JobLock) -> None:
        note("release")
        release(lock)

    def write(journal: Journal, *facts: object, **others: object) -> None:
        note("row", os.fstat(journal._descriptor).st_ino)
        record(journal, *facts, **others)  # pyright: ignore[reportArgumentType]

    JobLock.__enter__, JobLock.release, Journal.record_row = take, leave, write


def run_stand_in(source: str, output: str, seconds_per_step: str) -> int:
    """Run the job of the tests; errors end it as they end a command."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "runtime" / "batch"))
    import fake_model as fake

    model = fake.FakeModel(fake.FakeGenerator(seconds_per_step=float(seconds_per_step)))
    try:
        return fake.run_job(fake.settings(Path(source), Path(output)), model)
    except Exception as error:
        code = errors.exit_code(error)
        if code == errors.EXIT_BUG:
            raise
        tell(sys.stderr, f"noria: {errors.message(error)}")
        return code


def main() -> int:
    """Run the job; return its exit code."""
    events, host, machine, silence, *command = sys.argv[1:]
    note_events(Path(events))
    locks.SILENCE_SECONDS = float(silence)
    locks.socket.gethostname = lambda: host
    locks._machine = lambda: machine
    run: dict[str, Callable[..., int]] = {"stand-in": run_stand_in}
    if command[0] in run:
        return run[command[0]](*command[1:])
    return cli.main(command)


if __name__ == "__main__":
    sys.exit(main())
