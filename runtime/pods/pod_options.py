"""Options of commands that several processes run together over one mesh.

Imports no jax: its distributed part begins when the processes meet.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigError
from .peers import ALONE, Peers


def add_options(group: "argparse._ArgumentGroup") -> None:
    """How the processes find each other."""
    add = group.add_argument
    add("--coordinator", metavar="HOST:PORT", help="where process 0 listens, for all others")
    add("--num-processes", type=int, metavar="N", help="how many times this command is started")
    add("--process-id", type=int, metavar="I", help="which of them this is, from 0 to N-1")
    add(
        "--distributed",
        choices=("auto",),
        help="instead of these three: as the cluster tells (TPU pods, Slurm, Open MPI)",
    )
    add(
        "--peer-timeout-seconds",
        type=float,
        default=60.0,
        help="when another process has been silent for so long, name it, and end within 5 s more "
        "(default: 60)",
    )


@contextmanager
def peers(options: argparse.Namespace, target: str) -> Iterator[Peers]:
    """This process among those that run the command, however many they are."""
    address = (options.coordinator, options.num_processes, options.process_id)
    if address.count(None) not in (0, 3) or (options.distributed and address.count(None) != 3):
        raise ConfigError(
            "--coordinator, --num-processes, --process-id: expected all three, or none of them, or "
            "--distributed auto alone. Give every process the same coordinator and number, and an "
            "id of its own."
        )
    if address.count(None) == 3 and not options.distributed:
        yield ALONE
        return
    from .pod import Address, join

    found = Address(*address) if not options.distributed else None
    with join(found, options.peer_timeout_seconds, target) as pod:
        yield pod
