"""Evidence of a compiled graph: what it does, held against what its call needs.

Knows nothing of plans; runs nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ...sharding.call import Call
from ..programs.report import ProgramReport, read_report
from .hardware import Hardware
from .work import Needed, Work


@dataclass(frozen=True)
class Evidence:
    """A program's report beside what its call needs; of decode, of one step."""

    report: ProgramReport
    needed: Needed

    @cached_property
    def ratio(self) -> float:
        """Bytes moved over bytes needed."""
        return self.report.step.bytes_moved / self.needed.total

    def as_json(self) -> dict[str, Any]:
        """The figures of a step first, then those of a call beside its steps, then the sources."""
        found = self.report.as_json()
        return {
            "bytes_moved": found.pop("bytes_moved"),
            "bytes_needed": self.needed.total,
            "moved_over_needed": self.ratio,
            "needed": asdict(self.needed),
            **found,
        }


def read_evidence(
    hlo_text: str,
    platform: str,
    call: Call,
    work: Work,
    hardware: Hardware | None = None,
    torus: Sequence[int] = (),
) -> Evidence:
    """Read the text of a call's graph; see `read_report`."""
    report = read_report(hlo_text, platform, work.layout.mesh.sizes, hardware, torus)
    return Evidence(report, work.needed(call))
