"""The nouns of the batch job: its settings, the model it is given, the error that ends it.

`JobModel` is everything that touches a device or a tokenizer, as the job sees it. Knows nothing of
how a job runs.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..engine.submission_order import RowLengths, submission_order
from ..pods.peers import ALONE
from ..text.tokenizer import Tokenizer
from .job_files import check_files, job_outputs, side_files
from .journal import journal_path
from .journal_records import SETUP
from .lock import lock_path
from .manifest import PhaseClock
from .part import WHOLE, Part
from .progress import Progress
from .scan import Encode, ScanSummary

if TYPE_CHECKING:
    from ..engine.generation import GenerationSession


@dataclass(frozen=True)
class Build:
    """Everything compiled: the generator, the resolved plan, and the order it likes rows in."""

    generator: "GenerationSession"
    plan: str
    weights: str
    """The digest of every byte of the model's weights."""
    order: Callable[[Sequence[RowLengths]], list[int]] = submission_order


@dataclass(frozen=True)
class JobText:
    """The text side of a model: how rows become token ids, how ids are named."""

    encode: Encode
    tokens: Tokenizer | None
    reads_clock: Callable[[], bool] = lambda: False
    """Whether a prompt that was encoded shows the instant of the job."""
    gave_up: Callable[[], str | None] = lambda: None
    """The chat template's file and the reason why it was given up; None while it is used."""


class JobModel(Protocol):
    """A model that is not loaded yet."""

    def weights(self) -> str:
        """The digest of the weights, by this process alone; reads them unless it is remembered."""
        ...

    def open_text(self, now: datetime) -> AbstractContextManager[JobText]:
        """The tokenizer, and the chat template, which sees `now` whenever it asks for the time."""
        ...

    def build(
        self,
        summary: ScanSummary,
        stored_plan: str | None,
        *,
        phases: PhaseClock,
        progress: Progress,
    ) -> Build:
        """Load and compile. Called in phase `load`; enters `build` when parameters are in place.

        With `stored_plan`, the plan of the run that is resumed, it must build exactly that.
        """
        ...


@dataclass(frozen=True)
class JobSettings:
    """What one job reads and writes, and how it ends."""

    input_path: Path
    output_path: Path
    model_name: str
    configuration: Mapping[str, str]
    """Everything that decides an answer besides its row; a journal of another one is refused."""
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    sampling_defaults_source: str = "noria"
    config_keys_ignored: tuple[str, ...] = ()
    """Keys of the model's configuration that nothing reads, as `key = value`."""
    error_file: Path | None = None
    also_read: Sequence[tuple[str, Path]] = ()
    """Other files and folders that are only read, such as the model's, each after a description."""
    grace_seconds: float = 20.0
    on_error: Literal["row", "raise"] = "row"
    restart: bool = False
    part: Part = WHOLE
    setup: str = ALONE.setup
    """Which processes run it, in `Peers.setup`'s words; it decides in what order sums run."""
    allow_other_setup: bool = False
    expected_weights: str | None = None
    """The digest that the weights must have; None accepts all weights."""
    now: datetime | None = None
    """The local time that chat templates see; by default the start of the job."""

    def __post_init__(self):
        if self.part.of > 1 and self.error_file is not None:
            raise ValueError(
                "error_file: expected none beside a part of the rows, as a part keeps its error "
                f"rows in their places, got {self.error_file}. Give it to noria merge instead."
            )

    @property
    def stored_configuration(self) -> dict[str, str]:
        """What a journal or a finished output must agree with to be this job's."""
        return {**self.configuration, "rows": str(self.part), SETUP: self.setup}

    @property
    def may_differ(self) -> frozenset[str]:
        """The keys of it that may be others than those the job was begun with."""
        return frozenset({SETUP} if self.allow_other_setup else ())

    @property
    def journal_path(self) -> Path:
        return journal_path(self.output_path)

    @property
    def lock_path(self) -> Path:
        return lock_path(self.output_path)

    @property
    def outputs(self) -> list[Path]:
        return list(job_outputs(self.output_path, self.error_file).values())

    def check_files(self) -> None:
        """Refuse outputs that cannot be written, that are read too, or that are the same file."""
        check_files(
            job_outputs(self.output_path, self.error_file),
            [("the input", self.input_path), *self.also_read],
            side_files(self.output_path),
        )
