"""Checks that a job has the configuration of the job that a journal began.

Does not know about files. Guarantees: a refusal names every difference, and an option only where
it works.
"""

from collections.abc import Mapping
from pathlib import Path

from ..errors import OtherConfiguration
from ..files.differences import differences
from .journal_records import OF_DEVICES, SETUP


def check_same_configuration(
    path: Path, stored: Mapping[str, str], wanted: Mapping[str, str], *, keeps_plan: bool
) -> None:
    """Check that a journal has the configuration of this job.

    `keeps_plan` says that the job cannot continue on other devices.

    Raises:
        OtherConfiguration: They differ; the error has one line for each difference.
    """
    lines = differences(stored, wanted, ("there", "now"))
    if lines:
        raise OtherConfiguration(
            f"{path}: expected the configuration of this job, got another one:\n"
            + "\n".join(lines)
            + "\nRun with the settings it was begun with, choose another output, or discard it "
            f"with --restart.{_devices_remedy(stored, wanted, keeps_plan)}",
            stored,
        )


def _devices_remedy(stored: Mapping[str, str], wanted: Mapping[str, str], keeps_plan: bool) -> str:
    """The remedy if nothing but the processes and the devices differ."""
    differing = {key for key in {*stored, *wanted} if stored.get(key) != wanted.get(key)}
    if not differing & {SETUP, "target"} or differing - {SETUP, *OF_DEVICES}:
        return ""
    if differing == {SETUP}:
        return (
            " Other processes add numbers in another order; with --allow-different-numerics the "
            "job continues anyway, and the manifest names both set-ups."
        )
    if keeps_plan or "pipeline" in wanted:
        return ""
    given = " The --plan must be for these devices." if wanted.get("plan") != "derived" else ""
    return (
        " With --allow-different-numerics the job continues on these devices by another plan: "
        f"finished rows are kept, and the manifest names both set-ups.{given}"
    )
