"""A pod: several processes that run one batch job over one mesh of all their devices.

Process 0 decides every step: it puts a directive into the key-value store of jax's coordination
service, and the other processes wait for it. The directive comes with a checksum of everything that
process 0 has submitted and received. So a process that is out of step fails before the next
collective, in which it would hang.

If a process ends, for whatever reason, all others end too: see `watchdog.py`.

Does not know about rows. `peers.py` defines the interface.
"""

import atexit
import json
import platform
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from .. import errors
from ..console import plural
from ..devices.device_shares import simulated_devices
from ..devices.machine import versions
from ..errors import OutOfStep, UserError
from ..files.differences import differences
from ..process.stop_signals import at_forced_end, ignore_signals
from . import coordination
from .meeting import START_SECONDS, Address
from .peers import Peers, StepDirective, Value
from .watchdog import MARGIN_SECONDS, Watchdog

DIRECTIVES_PER_FOLDER = 4096
"""Directives per folder of the store; the folder before the current one is kept."""
LONGEST_TIMEOUT = 24 * 60 * 60
_COLLECTIVES = {"cpu": "gloo", "gpu": "nccl", "tpu": "tpu"}


class Disagreement(UserError):
    """Facts that differ between the processes of a pod."""


@contextmanager
def join(
    address: Address | None, limit: float, target: str, *, start_seconds: float = START_SECONDS
) -> "Iterator[Pod]":
    """Connect to the other processes, before jax starts; at the end all processes end together.

    Args:
      address: The coordinator's address; None on a cluster that jax detects (TPU pods, Slurm, Open
        MPI).
      limit: Seconds after which a silent process counts as lost.
      target: The target with the devices of all processes.
      start_seconds: Time within which all processes must have come.

    Raises:
      ValueError: An option is invalid.
      StartFailed: Not all processes have come in time, or one of them failed.
      Disagreement: The processes have different targets or versions.
    """
    for option, seconds in (
        ("--peer-timeout-seconds", limit),
        ("--start-timeout-seconds", start_seconds),
    ):
        if not 0 < seconds <= LONGEST_TIMEOUT:
            raise UserError(
                f"{option}: expected more than 0 and at most {LONGEST_TIMEOUT}, a day, got "
                f"{seconds:g}."
            )
    if address is not None:  # refuses an impossible number of devices before the meeting
        simulated_devices(target, address.num_processes)
    with ExitStack() as meeting:
        connected = coordination.connect(
            address,
            start_seconds=start_seconds,
            farewell_seconds=limit + MARGIN_SECONDS,
            # longer than the watchdog's limit, so that the watchdog names the lost process first
            patience=max(100.0, 4 * limit),
        )
        store = meeting.enter_context(connected)
        watchdog = Watchdog(store, store.rank, store.size, limit)
        try:
            watchdog.start()
            reason = "it was stopped by a signal"
            with at_forced_end(lambda code: watchdog.fail(reason, code, linger=0.2)):
                # only now, so that a process can tell of its end at any moment
                meeting.close()
                yield _pod_of_equals(store, watchdog, target)
                watchdog.finish()
        except BaseException as error:
            code = errors.exit_code(error)
            watchdog.fail(errors.message(error), code)
            # jax's own shutdown would wait for lost processes and collectives
            atexit.register(errors.leave_at_once, code)
            raise
    # all processes have done their work, and a signal would leave the others waiting
    ignore_signals()
    watchdog.leave()
    store.leave()


def _pod_of_equals(store: coordination.Coordination, watchdog: Watchdog, target: str) -> "Pod":
    """The pod of processes that have the same target and versions, with jax ready for the target.

    Raises:
      Disagreement: The processes have different targets or versions.
    """
    import jax

    from ..devices import backends

    pod, size = Pod(store, watchdog), store.size
    facts = {
        "number of processes": str(size),
        "target": target,
        "version of python": platform.python_version(),
        **{f"version of {name}": version for name, version in versions().items()},
    }
    pod.agree(lambda: facts)
    backends.prepare_jax(target, size)
    kind = target.partition(":")[0]
    devices = plural(jax.local_device_count(kind), "device")
    pod.setup = f"{size} processes of {devices}, {_COLLECTIVES.get(kind, kind)}"
    return pod


class Pod(Peers):
    """This process and the other processes of its pod. Make a pod with `join`."""

    def __init__(self, store: coordination.Coordination, watchdog: Watchdog):
        self.rank, self.size = store.rank, store.size
        self._store = store
        self._watchdog = watchdog
        self._num_shared = self._num_steps = self._trace = 0

    @property
    def remote_signal(self) -> str | None:
        return self._watchdog.remote_signal

    def broadcast(self, value: Value) -> Value:
        key = f"shared/{self._num_shared}"
        self._num_shared += 1
        if self.is_leader:
            self._put(key, value)
            return value
        return self._get(key)

    def gather(self, value: Value) -> list[Value]:
        folder = f"gathered/{self._num_shared}"
        self._num_shared += 1
        self._put(f"{folder}/{self.rank}", value)
        return [self._get(f"{folder}/{rank}") for rank in range(self.size)]

    def _put(self, key: str, value: object) -> None:
        self._store.put(key, zlib.compress(json.dumps(value).encode(), level=1))

    def _get(self, key: str) -> Any:
        return json.loads(zlib.decompress(self._store.get(key)))

    def agree(self, facts: Callable[[], Mapping[str, str]]) -> None:
        own = dict(facts())
        leaders = self.broadcast(own)
        names = ("process 0 has", f"process {self.rank} has")
        if found := differences(leaders, own, names):
            listed = "\n".join(found)
            raise Disagreement(
                f"expected the same facts on all processes, got different ones:\n{listed}"
            )
        self._store.barrier(f"agreed/{self._num_shared}")

    def exchange_directive(self, directive: StepDirective, own_signal: str | None) -> StepDirective:
        self._watchdog.report_signal(own_signal)
        folder, step = divmod(self._num_steps, DIRECTIVES_PER_FOLDER)
        key = f"directives/{folder}/{step}"
        if self.is_leader:
            self._store.put(key, json.dumps([self._trace, *directive]).encode())
            if step == 0 and folder > 1:
                self._store.remove_folder(f"directives/{folder - 2}")
        else:
            trace, *rest = json.loads(self._store.get(key))
            directive = StepDirective(*rest)
            if trace != self._trace:
                raise OutOfStep(
                    f"process {self.rank} is out of step with process 0 before step "
                    f"{self._num_steps}: expected the same rows and tokens, got different ones. "
                    "Use hosts of one kind. Finished rows of earlier steps are kept."
                )
        self._num_steps += 1
        return directive

    def record(self, *facts: object) -> None:
        self._trace = zlib.crc32(repr(facts).encode(), self._trace)

    def on_abort(self, action: Callable[[], object]) -> None:
        self._watchdog.on_abort = action

    def await_verdict(self) -> None:
        self._watchdog.await_verdict()
