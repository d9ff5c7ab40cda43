"""The files of a job or a merge: their paths, and their checks before any of them is opened.

Does not know how rows run.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UnusableFile
from ..files.file_checks import check_files
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
