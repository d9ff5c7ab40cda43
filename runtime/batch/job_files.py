"""The files of a job, and their checks before any of them is opened.

Two paths are the same file if their resolved paths are equal, or their device and inode. So links,
hard links and file systems that ignore case are recognised. If a folder is read, such as a model's,
all files in it count as read.

Does not know how rows run. Guarantees: a command that passes the check writes no file that it
reads, writes no file twice, and can write all of them, judged by names and permissions.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UnusableFile
from ..files.disk import check_replaceable, temporary_name
from ..files.manifest import manifest_path
from ..progress.progress import Progress
from ..rows.answer_tables import AddedColumns
from ..rows.columns import Columns
from ..rows.row_files import OpenRows, check_output, open_rows


@dataclass(frozen=True)
class OutputFiles:
    """The files that a job or a merge writes."""

    output: Path
    error_file: Path | None = None

    @property
    def named_outputs(self) -> dict[str, Path]:
        """The output, and the error file if there is one, by description."""
        named = {"the output": self.output, "the error file": self.error_file}
        return {description: path for description, path in named.items() if path is not None}

    @property
    def outputs(self) -> list[Path]:
        """The output, and the error file if there is one."""
        return list(self.named_outputs.values())

    @property
    def manifest(self) -> Path:
        """The path of the manifest, beside the output."""
        return manifest_path(self.output)

    @property
    def journal(self) -> Path:
        """The path of the journal, beside the output."""
        return self.output.with_name(f"{self.output.name}.journal")

    @property
    def lock(self) -> Path:
        """The path of the first lock, beside the output."""
        return self.output.with_name(f"{self.output.name}.lock")

    @property
    def side_files(self) -> dict[str, Path]:
        """The files that are kept beside the output, by description."""
        return {"the manifest": self.manifest, "the journal": self.journal, "the lock": self.lock}

    def check_formats(self, added: AddedColumns) -> None:
        """Check that the formats of the outputs can be written, with columns that a job adds.

        Raises:
            UnusableFile: A format is unknown, its package is missing, or two columns have one name.
        """
        for path in self.outputs:
            check_output(path, added)

    def check_written(
        self, read: Iterable[tuple[str, Path | None]], copies: Mapping[str, Path] | None = None
    ) -> None:
        """Check the files as `check_files` does; `copies` are other files beside the output.

        Raises:
            UnusableFile: A file cannot be used, or both outputs have one name in two folders.
        """
        check_files(self.named_outputs, read, {**self.side_files, **(copies or {})})
        if self.error_file is not None and self.error_file.name == self.output.name:
            raise UnusableFile(
                f"{self.error_file}: expected file names of the output and the error file that "
                f"differ, as the manifest knows them by name, got {self.output.name} in two "
                "folders. Choose another name."
            )


@dataclass(frozen=True)
class JobFiles(OutputFiles):
    """The files that a job reads and writes."""

    input: Path = field(kw_only=True)
    """The input, or the file into which standard input or a URL is copied."""
    reads_stdin: bool = False
    input_url: str | None = None
    """The URL that the input was copied from; None for an input of this machine."""
    columns: Columns = field(default_factory=Columns)
    """The columns to read of an input that is a table."""
    also_read: Sequence[tuple[str, Path]] = ()
    """Descriptions and paths of other files and folders that are only read, such as the model's."""
    restart: bool = False
    """Whether the files of an earlier run are discarded."""

    @property
    def input_name(self) -> str:
        """The name of the input in the manifest."""
        return "stdin" if self.reads_stdin else self.input_url or self.input.name

    @property
    def read(self) -> Sequence[tuple[str, Path]]:
        """Descriptions and paths of the input, and of everything else that is only read."""
        return [("the input", self.input), *self.also_read]

    def check(self, added: AddedColumns) -> None:
        """Check the outputs, whose tables have columns that the job adds.

        Raises:
            UnusableFile: An output cannot be written, is also read, or is written twice.
        """
        if self.reads_stdin:
            self.check_written(self.also_read, {"the copy of the input": self.input})
        else:
            self.check_written([*self.also_read, ("the input", self.input)])
        self.check_formats(added)

    def open_rows(self, progress: Progress) -> AbstractContextManager[OpenRows]:
        """Open the input as lines; those of a table are kept on the disk of the output.

        Raises:
            InputError: The input cannot be converted, or the disk has no room for its lines.
        """
        return open_rows(
            self.input,
            self.columns,
            self.output.parent,
            note=progress.note,
            on_progress=progress.show_reading,
        )


def stages_folder(output: Path) -> Path:
    """The folder with the files of an output's stages, in a job with stages."""
    return output.with_name(f"{output.name}.stages")


def check_files(
    outputs: Mapping[str, Path],
    read: Iterable[tuple[str, Path | None]],
    side_files: Mapping[str, Path] | None = None,
) -> None:
    """Check that files can be written, are not read too, and are not written twice.

    Args:
        outputs: Files that replace existing files, by description.
        read: Description and path of every file or whole folder that is read; paths of None are
          ignored.
        side_files: Other files that are written, by description; their folders exist or can be
          created.

    Raises:
        UnusableFile: A file cannot be used; the error names it, its other use and the remedy.
    """
    for path in outputs.values():
        _check_folder(path)
    written = {**outputs, **(side_files or {})}
    for description, path in list(written.items()):
        written[f"the temporary file of {description}"] = path.with_name(temporary_name(path.name))
    for description, path in written.items():
        if path.parent.is_dir():
            _check_name(path)
        role = "" if description in outputs else f"{description} "
        for source_name, source in read:
            if source is not None and _is_read(path, source):
                raise UnusableFile(
                    f"{path}: {role}is {source_name} too. Choose another output; a file that is "
                    "read is never written."
                )
    for (description, path), (other, other_path) in itertools.combinations(written.items(), 2):
        if _is_one_file(path, other_path):
            raise UnusableFile(f"{path}: {description} is {other} too. Choose two files.")
    for path in written.values():
        check_replaceable(path)


def _check_folder(path: Path) -> None:
    if path.is_dir():
        raise UnusableFile(f"{path}: expected a file to write, got a directory. Name a file in it.")
    if not path.parent.is_dir():
        raise UnusableFile(f"{path}: expected its directory to exist. Create {path.parent}.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UnusableFile(
            f"{path}: expected a directory to write to, got {path.parent}, where this user may "
            "not write. Choose another directory."
        )


def _check_name(path: Path) -> None:
    """Refuse a name that is too long for the file system, before the job starts."""
    limit = os.pathconf(path.parent, "PC_NAME_MAX")
    if (length := len(os.fsencode(path.name))) > limit:
        raise UnusableFile(
            f"{path}: expected a name of at most {limit} bytes, got {length}. Choose a shorter "
            "name for the output."
        )


def _identities(path: Path) -> set[object]:
    """The identities of a path; two paths are the same file if they share one."""
    identities: set[object] = {os.path.realpath(path)}
    with suppress(OSError):
        status = os.stat(path)
        identities.add((status.st_dev, status.st_ino))
    return identities


def _is_one_file(path: Path, other: Path) -> bool:
    # two files that do not exist yet may become the same file if the file system ignores case
    is_one_name = os.path.realpath(path).casefold() == os.path.realpath(other).casefold()
    return is_one_name or bool(_identities(path) & _identities(other))


def _is_read(path: Path, source: Path) -> bool:
    identities = _identities(path)
    if identities & _identities(source):
        return True
    if not source.is_dir():
        return False
    if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(source)):
        return True
    # a file that does not exist yet has no hard link in the folder
    return path.exists() and any(identities & _identities(file) for file in _inside(source))


def _inside(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        yield from (Path(root, name) for name in names)
