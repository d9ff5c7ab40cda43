"""The simulated devices of a target that each process has; counted before jax is imported."""

from ...compile.target_names import TargetName
from ..errors import UserError


def simulated_devices(target: str, num_processes: int) -> int | None:
    """The number of devices that each of several processes simulates; None unless it is a CPU.

    Raises:
      ValueError: The target is unknown, or the processes cannot share its devices evenly.
    """
    named = TargetName.parse(target)
    if named.platform != "cpu":
        return None
    count, left_over = divmod(named.num_devices, num_processes)
    if left_over:
        raise UserError(
            f"target {target}: expected a number of devices that {num_processes} processes share "
            f"evenly, got {named.num_devices}. Ask for --target cpu:{(count + 1) * num_processes}."
        )
    return count
