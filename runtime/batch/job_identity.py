"""The identity of a job: what a journal or a finished output must have in common with it.

Everything else in the settings of a job may change from one run to the next. Does not know about
files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from ..pods.peers import ALONE
from ..rows.answer_tables import AddedColumns
from ..rows.part import WHOLE, Part
from .journal_records import OF_DEVICES, SETUP


@dataclass(frozen=True)
class JobIdentity:
    """The answers that a job gives, and the runs that may continue it."""

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
