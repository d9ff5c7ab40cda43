"""The model of a job with stages: loaded and compiled once, for the rows of all stages.

Each stage runs as a job with this model. Does not know about files of stages.
"""

import tomllib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from ..batch.job import Build, JobModel
from ..batch.job_runs import PhaseClock
from ..progress.progress import Progress
from ..request import hashed_seed
from ..rows.job_text import JobText
from ..rows.scan import ScanSummary

if TYPE_CHECKING:
    from ...modelzoo.pooling_config import Pooling


@dataclass
class StagedModel:
    """A model that is built for the first stage that runs rows; implements `JobModel`.

    Attributes:
        model: The model of the whole job.
        seed: The seed of the job, from which each stage has its own.
        max_position: Reads the number of positions of the model.
        measure: Measures the rows of all stages; set before the first build.
        stage: The name of the stage that runs.
        plan: The plan of an earlier run or stage; None before it is known.
    """

    model: JobModel
    seed: int
    max_position: Callable[[], int]
    measure: Callable[[], ScanSummary] | None = None
    stage: str = ""
    plan: str | None = None
    _built: Build | None = None

    def weights(self) -> str:
        """The digest of the weights."""
        return self.model.weights()

    def pooling(self) -> "Pooling":
        """The pooling with which the model makes one vector of a text."""
        return self.model.pooling()

    def open_text(self, now: datetime) -> AbstractContextManager[JobText]:
        """Open the tokenizer and the chat template."""
        return self.model.open_text(now)

    def build(
        self,
        summary: ScanSummary,
        stored_plan: str | None,
        *,
        phases: PhaseClock,
        progress: Progress,
    ) -> Build:
        """Build the plan of all stages once; later stages run on the same graphs."""
        if self._built is None:
            stored_plan = stored_plan or self.plan
            # the forms of later stages must be compiled before their tables are packed
            if stored_plan is None or "structured" in tomllib.loads(stored_plan):
                phases.enter("scan")
                assert self.measure is not None, "the run of the stages sets it"
                summary = self.measure()
                phases.enter("load")
            self._built = self.model.build(summary, stored_plan, phases=phases, progress=progress)
        # samples of two stages must differ, also for equal prompts
        generator = self._built.generator.restarted(hashed_seed(self.seed, self.stage))
        # the plan serves all stages, so the rows of one of them cannot tell of a better plan
        return replace(self._built, generator=generator, better_plan=lambda outputs, seconds: None)
