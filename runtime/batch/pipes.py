"""Connects a job with pipes: `-i -` reads standard input, `-o -` writes to standard output.

Rows are read twice, so standard input is first copied into a file beside the journal, where an
unfinished job leaves it. The output is finished in a file too, and then copied.

Does not know about rows. Guarantees: the copy of standard input is there as long as the journal,
and no other input takes its place before the job has finished; a finished output is removed only
after its last byte was written.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..errors import EXIT_RESUMABLE, JobError, UnusableFile
from ..files.disk import Disk, replace_file
from ..files.manifest import fingerprint, manifest_path
from ..files.remote import Url
from ..rows.part import Part
from .job_files import JobFiles

PIPE = Path("-")
"""The path that stands for standard input or standard output."""
_PIECE_BYTES = 2**20


def copy_path(output: Path) -> Path:
    """The path of the copy of standard input, beside an output."""
    return output.with_name(f"{output.name}.input")


def output_for_stdout(
    place: Path | Url, rows: str, pipeline: Path | None, configuration: Mapping[str, str]
) -> Path:
    """The output of a job that writes to standard output, in the current folder.

    The name is a hash of the job's configuration, and of the names of its input, rows and pipeline.
    So the same command finds its journal again. Jobs that differ in none of these have one name.
    """
    names = {
        "input": str(place) if isinstance(place, Url) else os.path.abspath(place),
        "rows": str(Part.parse(rows)),
        "pipeline": os.path.abspath(pipeline or ""),
    }
    return Path(f"noria-stdout-{fingerprint({**configuration, **names})[7:19]}.jsonl")


@contextmanager
def stdin_copied(files: JobFiles, disk: Disk) -> Iterator[None]:
    """Copy standard input to the input path of a job that reads it; else do nothing.

    Raises:
        UnusableFile: Another file has the name of the copy, or an unfinished job has another input.
    """
    if not files.reads_stdin:
        yield
        return
    path = files.input
    is_of_job = files.journal.exists() or files.manifest.exists()
    if path.exists() and not is_of_job and not files.restart:
        raise UnusableFile(
            f"{path}: expected no file, as standard input is copied to this name, got one without "
            f"a journal. Run with -i {path}, move it away, or discard it with --restart."
        )
    if sys.stdin is None:
        raise UnusableFile("-i -: expected standard input, got none. Pipe the input in.")
    pieces = iter(lambda: sys.stdin.buffer.read(_PIECE_BYTES), b"")
    is_unfinished = path.exists() and files.journal.exists() and not files.restart
    if is_unfinished and not _is_content_of(path, pieces):
        raise UnusableFile(
            f"-i -: expected the input of the unfinished job, which {path} has, got another one. "
            f"Run with -i {path}, or discard the finished rows with --restart."
        )
    try:
        if not is_unfinished:
            replace_file(disk, path, pieces)
        yield
    finally:
        if not files.journal.exists():
            disk.remove(path)


def _is_content_of(path: Path, pieces: Iterable[bytes]) -> bool:
    """Whether pieces are the content of a file, and all of it."""
    with path.open("rb") as file:
        return all(file.read(len(piece)) == piece for piece in pieces) and not file.read(1)


def write_to_stdout(output: Path, disk: Disk) -> None:
    """Write a finished output to standard output, and remove it with its manifest.

    Raises:
        JobError: Standard output has no reader; the finished output is kept.
    """
    try:
        with output.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    except OSError as error:
        raise JobError(
            f"-o -: standard output cannot be written ({error.strerror or error}). The finished "
            f"output is kept in {output}; the same command writes it again.",
            EXIT_RESUMABLE,
        ) from error
    # the output goes first: a manifest that is left without its output has no effect
    disk.remove(output)
    disk.remove(manifest_path(output))
