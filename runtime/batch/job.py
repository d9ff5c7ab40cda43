"""The types of the batch job: its settings, the interface of its model, and the built model.

`JobModel` covers everything that uses a device or a tokenizer. Does not know how a job runs.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import UserError
from ..files.disk import Disk
from ..pods.peers import ALONE, Peers
from ..process.stop_signals import StopSignals
from ..progress.progress import Progress
from ..rows.answer_tables import AddedColumns
from ..rows.lines import PLAIN, RequestRules
from ..rows.part import WHOLE, Part
from ..rows.scan import ScanSummary
from .job_files import JobFiles
from .job_runs import PhaseClock
from .journal_records import OF_DEVICES, SETUP

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
class ModelFacts:
    """The facts of a job's model: those that lines and manifests state, and the expected digest."""

    name: str
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """The sampling parameters of requests that leave them out."""
    sampling_defaults_source: str = "noria"
    config_keys_ignored: tuple[str, ...] = ()
    """Keys of the model's configuration that nothing reads, as `key = value`."""
    tensors_not_read: Mapping[str, int] = field(default_factory=dict)
    """The number of the model's tensors that nothing reads, by the beginnings of their names."""
    expected_weights: str | None = None
    """The digest that the weights must have; None accepts any weights."""


@dataclass(frozen=True)
class JobIdentity:
    """The facts that a journal or a finished output must have in common with a job.

    Everything else in the settings of a job may change from one run to the next.
    """

    configuration: Mapping[str, str]
    """Everything besides a row that decides its answer; a journal with another configuration is
    refused."""
    part: Part = WHOLE
    """The part of the input's rows that the job runs."""
    part_of_stages: Part | None = None
    """The part of a job with stages whose rows the input has; None for other jobs."""
    setup: str = ALONE.setup
    """The processes of the job, as in `Peers.setup`; the order of sums depends on them."""
    allow_other_setup: bool = False
    """Whether other processes or devices may have begun the job."""
    updates: bool = False
    """Whether a finished output of another input may be replaced; equal rows keep their answers."""
    now: datetime | None = None
    """The local time that chat templates see; None for the start of the job."""

    @property
    def stored(self) -> dict[str, str]:
        """The configuration that a journal or a finished output of this job must have."""
        part = self.part_of_stages or self.part
        return {**self.configuration, "rows": str(part), SETUP: self.setup}

    @property
    def added_columns(self) -> AddedColumns:
        """The columns that the job adds to those of every output table."""
        return AddedColumns.of(self.configuration)

    @property
    def keeps_plan(self) -> bool:
        """Whether the job keeps the plan of what is finished: one with stages, or an update."""
        return self.part_of_stages is not None or self.updates

    @property
    def may_differ(self) -> frozenset[str]:
        """The keys of `stored` whose values may differ from the stored ones."""
        if not self.allow_other_setup:
            return frozenset()
        devices = () if self.keeps_plan else OF_DEVICES
        return frozenset({SETUP, *(key for key in devices if key in self.configuration)})


@dataclass(frozen=True)
class JobSettings:
    """The settings of one job."""

    files: JobFiles
    identity: JobIdentity
    """The part of the settings that a journal or a finished output must have in common."""
    facts: ModelFacts
    rules: RequestRules = PLAIN
    """The rules by which the job reads its requests."""
    grace_seconds: float = 20.0
    """The time in which rows in flight may finish after a signal."""
    price_per_hour: float | None = None
    """The price of all devices; None if it is not known."""

    def __post_init__(self):
        if self.identity.part.num_parts > 1 and self.files.error_file is not None:
            raise UserError(
                "error_file: expected none beside a part of the rows, as a part keeps its error "
                f"rows in their places, got {self.files.error_file}. Give it to noria merge "
                "instead."
            )


@dataclass
class Job:
    """A job in one of its processes."""

    settings: JobSettings
    model: JobModel
    peers: Peers
    disk: Disk
    progress: Progress
    phases: PhaseClock
    stop: StopSignals


def facts_to_agree_on(
    identity: JobIdentity, rules: RequestRules, summary: ScanSummary
) -> dict[str, str]:
    """The facts that must be equal on all processes of a job before they run it."""
    rows = hashlib.sha256()
    for row in summary.rows:
        rows.update(repr((row.key, row.requirements, row.bad and row.bad.error.code)).encode())
    return {
        **identity.stored,
        "on-error": rules.on_error,
        "input": f"sha256:{summary.input_sha256}",
        "rows as tokenized": f"sha256:{rows.hexdigest()}",
    }
