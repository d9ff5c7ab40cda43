"""Evidence from a compiled graph: its work, compared with the work that its call needs.

Knows nothing of plans, and runs nothing.
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ..programs.report import ProgramReport
from .work import NeededBytes


@dataclass(frozen=True)
class Evidence:
    """A program's report and the bytes that its call needs; for decode, of one step."""

    report: ProgramReport
    needed: NeededBytes

    @cached_property
    def ratio(self) -> float:
        """Ratio of bytes moved to bytes needed."""
        return self.report.step.bytes_moved / self.needed.total

    def as_json(self) -> dict[str, Any]:
        """The figures of a step, those of work once for all steps, then those by source line."""
        report = self.report.as_json()
        return {
            "bytes_moved": report.pop("bytes_moved"),
            "bytes_needed": self.needed.total,
            "moved_over_needed": self.ratio,
            "needed": asdict(self.needed),
            **report,
        }
