"""The types of the batch job: its settings, the interface of its model, and the built model.

`JobModel` covers everything that uses a device or a tokenizer. Does not know how a job runs.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..progress.progress import Progress
from ..rows.answer_tables import AddedColumns
from ..rows.columns import Columns
from ..rows.lines import RequestRules
from ..rows.row_files import check_output
from ..rows.scan import ScanSummary
from ..structured.params import StructuredOutputsParams
from .job_files import check_job_files, job_outputs, side_files
from .job_identity import JobIdentity
from .job_runs import PhaseClock
from .journal import journal_path
from .lock import lock_path

if TYPE_CHECKING:
    from ...compile.grids.prefix_table import PrefixTable
    from ...modelzoo.pooling_config import Pooling
    from ..engine.shared_prefixes import RowLengths, Submission
    from ..rows.job_text import JobText
    from ..session import Session


@dataclass(frozen=True)
class Build:
    """A compiled plan, ready to run rows."""

    generator: "Session"
    plan: str
    """The resolved plan as TOML."""
    weights: str
    """The digest of every byte of the model's weights."""
    submission: "Callable[[Sequence[RowLengths], PrefixTable], Submission]"
    """Plans the order in which to submit rows, and the prefixes that they share."""
    with_waste: Callable[[dict[str, Any]], dict[str, Any]] = lambda statistics: statistics
    """Adds the wasted work of each bucket to the statistics of the run."""
    bundle: Mapping[str, Any] | None = None
    """The use of the bundle's executables, for the manifest; None without a bundle."""
    better_plan: Callable[[Mapping[int, int], float], str | None] = lambda outputs, seconds: None
    """A note on a plan that saves much of a run, if there is one.

    It takes, for each row by its number, the average number of output tokens of its sequences; and
    the seconds of the run.
    """


class JobModel(Protocol):
    """A model that is not loaded yet."""

    def weights(self) -> str:
        """The digest of the weights, computed by this process alone.

        Reads the weights, unless their digest is remembered.
        """
        ...

    def pooling(self) -> "Pooling":
        """The pooling with which the model makes one vector of a text."""
        ...

    def open_text(self, now: datetime) -> AbstractContextManager["JobText"]:
        """Open the tokenizer and the chat template; the template sees the time `now`."""
        ...

    def build(
        self,
        summary: ScanSummary,
        stored_plan: str | None,
        *,
        phases: PhaseClock,
        progress: Progress,
    ) -> Build:
        """Load the parameters and compile the plan.

        Args:
            summary: The scanned input, from which a plan is derived if none is given.
            stored_plan: The plan of the run that is resumed, which must be built exactly.
            phases: The clock, in phase `load`; `build` is entered when the parameters are loaded.
            progress: Shows the plan and the graphs.
        """
        ...


@dataclass(frozen=True)
class JobSettings:
    """The input, the outputs and the options of one job."""

    input_path: Path
    """The input, or the file into which standard input or a URL is copied."""
    output_path: Path
    model_name: str
    identity: JobIdentity
    """The part of the settings that a journal or a finished output must have in common."""
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    sampling_defaults_source: str = "noria"
    form: StructuredOutputsParams | None = None
    """The form of answers to rows that ask for none."""
    config_keys_ignored: tuple[str, ...] = ()
    """Keys of the model's configuration that nothing reads, as `key = value`."""
    tensors_not_read: Mapping[str, int] = field(default_factory=dict)
    """The number of the model's tensors that nothing reads, by the beginnings of their names."""
    error_file: Path | None = None
    also_read: Sequence[tuple[str, Path]] = ()
    """Descriptions and paths of other files and folders that are only read, such as the model's."""
    grace_seconds: float = 20.0
    on_error: Literal["row", "raise"] = "row"
    restart: bool = False
    expected_weights: str | None = None
    """The digest that the weights must have; None accepts any weights."""
    reads_stdin: bool = False
    input_url: str | None = None
    """The URL that the input was copied from; None for an input of this machine."""
    columns: Columns = field(default_factory=Columns)
    """The columns to read of an input that is a table."""
    ignores_unknown: bool = False
    """Whether unknown keys of requests are ignored."""
    price_per_hour: float | None = None
    """The price of all devices; None if it is not known."""
    now: datetime | None = None
    """The local time that chat templates see; None for the start of the job."""
    models: Mapping[str, str | None] | None = None
    """The adapter of a row, by the `model` that the row names.

    An adapter of None means the model itself. Without a mapping, every name means the model itself.
    """

    def __post_init__(self):
        if self.identity.part.num_parts > 1 and self.error_file is not None:
            raise ValueError(
                "error_file: expected none beside a part of the rows, as a part keeps its error "
                f"rows in their places, got {self.error_file}. Give it to noria merge instead."
            )

    @property
    def rules(self) -> RequestRules:
        """The rules by which the job reads its requests."""
        form = {} if self.form is None else {"structured_outputs": self.form}
        return RequestRules({**self.sampling_defaults, **form}, self.ignores_unknown, self.models)

    @property
    def added_columns(self) -> AddedColumns:
        """The columns that the job adds to those of every output table."""
        return AddedColumns.of(self.identity.configuration)

    @property
    def journal_path(self) -> Path:
        """The path of the journal, beside the output."""
        return journal_path(self.output_path)

    @property
    def lock_path(self) -> Path:
        """The path of the lock, beside the output."""
        return lock_path(self.output_path)

    @property
    def input_name(self) -> str:
        """The name of the input in the manifest."""
        return "stdin" if self.reads_stdin else self.input_url or self.input_path.name

    @property
    def outputs(self) -> list[Path]:
        """The output, and the error file if there is one."""
        return list(job_outputs(self.output_path, self.error_file).values())

    def check_files(self) -> None:
        """Check the outputs.

        Raises:
            UnusableFile: An output cannot be written, is also read, or is written twice.
        """
        side, read = side_files(self.output_path), list(self.also_read)
        if self.reads_stdin:
            side["the copy of the input"] = self.input_path
        else:
            read.append(("the input", self.input_path))
        check_job_files(self.output_path, self.error_file, read, side)
        for path in self.outputs:
            check_output(path, self.added_columns)


def facts_to_agree_on(settings: JobSettings, summary: ScanSummary) -> dict[str, str]:
    """The facts that must be equal on all processes of a job before they run it."""
    rows = hashlib.sha256()
    for row in summary.rows:
        rows.update(repr((row.key, row.requirements, row.bad and row.bad.error.code)).encode())
    return {
        **settings.identity.stored,
        "on-error": settings.on_error,
        "input": f"sha256:{summary.input_sha256}",
        "rows as tokenized": f"sha256:{rows.hexdigest()}",
    }
