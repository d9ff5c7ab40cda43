"""The options of commands that several processes run together over one mesh.

Imports no jax, as a process that fails early tells the others with these options.
"""

import argparse
from collections.abc import Sequence


def add_options(group: "argparse._ArgumentGroup") -> None:
    """Add the options with which the processes find each other."""
    add = group.add_argument
    add("--coordinator", metavar="HOST:PORT", help="address on which process 0 listens")
    add("--num-processes", type=int, metavar="N", help="number of processes of the job")
    add("--process-id", type=int, metavar="I", help="number of this process, from 0 to N-1")
    add(
        "--distributed",
        choices=("auto",),
        help="take these three from the cluster (TPU pods, Slurm, Open MPI)",
    )
    add(
        "--peer-timeout-seconds",
        type=float,
        default=60.0,
        help="seconds of silence after which another process counts as lost; this process then "
        "names it and ends within 5 s (default: 60)",
    )
    add(
        "--start-timeout-seconds",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="seconds within which all processes must have come (default: 300)",
    )


def report_failed_start(arguments: Sequence[str], reason: str, code: int, *, is_stop: bool) -> None:
    """Tell the other processes of a command that this one fails, unless it has met them.

    Args:
        arguments: The command line, which may be wrong.
        reason: The reason.
        code: The exit code of this process.
        is_stop: Whether a signal ends this process, which then has little time.
    """
    from ..pods.meeting import LINGER_SECONDS, Address, report_failure

    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    add_options(parser.add_argument_group())
    try:
        given, _ = parser.parse_known_args(arguments)
        size = given.num_processes
        # a number that cannot be is no reason to let the others wait
        rank = given.process_id if given.process_id in range(size) else size - 1
        address = Address(given.coordinator, size, rank)
    except (argparse.ArgumentError, ValueError, TypeError, SystemExit):
        return  # this process does not know where the others are
    report_failure(address, reason, code, 0.5 if is_stop else LINGER_SECONDS)
