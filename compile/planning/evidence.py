"""Evidence from a compiled graph: its work, compared with the work that its call needs.

Knows nothing of plans, and runs nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ...sharding.call import Call
from ..hardware.hardware import Hardware
from ..programs.report import ProgramReport, read_report
from .work import NeededBytes, Work


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


def read_evidence(
    hlo_text: str,
    platform: str,
    call: Call,
    work: Work,
    hardware: Hardware | None = None,
    torus: Sequence[int] = (),
) -> Evidence:
    """Read the text of a call's graph.

    Args:
      hlo_text: The text from `program_text`.
      platform: `cpu`, `gpu` or `tpu`.
      call: The call that the graph serves.
      work: The work of the model under the layout.
      hardware: Rates of one device. If it has a clock, the evidence has cycles.
      torus: Dimensions of the interconnect; empty for a switch.
    """
    report = read_report(hlo_text, platform, work.layout.mesh.sizes, hardware, torus)
    return Evidence(report, work.needed(call))
