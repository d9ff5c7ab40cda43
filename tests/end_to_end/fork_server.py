"""Start `noria` as a fork of a process that has imported it, which saves two seconds of imports.

Run as a script, this file is that process, the server. It starts neither a backend of jax nor
threads: each fork starts its own, in the environment of its command. Settings that jax reads while
it is imported are those of the server, as are the hashes of strings.
"""

import ctypes
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

IMPORTS = (
    "jinja2",
    "noria.runtime.batch.batch_model",
    "noria.runtime.batch.job_plan",
    "noria.runtime.bundles.bundle",
    "noria.runtime.session",
)
ADOPT_ORPHANS = 36
"""The option PR_SET_CHILD_SUBREAPER of Linux."""
ADOPTED = b"adopted"
MAX_BYTES = 2**18
"""The size of the largest request."""


@contextmanager
def fork_server(environment: dict[str, str]) -> Iterator[socket.socket]:
    """Yield a socket that takes requests. This process adopts the forks of its children."""
    ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1)
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            env=environment | {"OPENBLAS_NUM_THREADS": "1"},
            # no terminal, so that the commands buffer their lines as into a pipe
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    with requests:
        yield requests
    # the server ends when nobody can send requests any more
    assert server.wait(timeout=60) == 0


class ForkedCommand(subprocess.Popen[str]):
    """A command that a server starts. Its parent is this process, as without a server."""

    def __init__(self, requests: socket.socket, arguments: list[str], **options: Any):
        self._requests = requests
        super().__init__(arguments, **options)

    def _execute_child(self, *given: Any) -> None:
        """Replace the private method of `subprocess` that starts a program."""
        options = signature(super()._execute_child).bind(*given).arguments
        request = {name: options[name] for name in ("args", "env", "start_new_session")}
        request["folder"] = os.getcwd()
        files = [options["c2pwrite"], options["errwrite"]]
        socket.send_fds(self._requests, [json.dumps(request).encode()], files)
        for file in files:
            os.close(file)
        self.pid = int(self._requests.recv(MAX_BYTES))
        assert self._requests.recv(MAX_BYTES) == ADOPTED
        self._child_created = True


def serve(requests: socket.socket) -> list[str]:
    """Fork for every request. Return only in the forks, with the arguments of the command."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, MAX_BYTES, 2)
        if not message:
            sys.exit()
        parent = os.fork()
        if parent == 0:
            command = os.fork()
            if command == 0:
                requests.close()
                return become(json.loads(message), files)
            requests.send(str(command).encode())
            # the command loses its parent, so the process of the tests adopts it
            os._exit(0)
        os.waitpid(parent, 0)
        requests.send(ADOPTED)
        for file in files:
            os.close(file)


def become(request: dict[str, Any], files: list[int]) -> list[str]:
    """Give this process the environment, the folder and the files of a command."""
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    if request["start_new_session"]:
        os.setsid()
    return request["args"]


def main() -> None:
    from noria.runtime import cli
    from noria.runtime.devices import machine

    # the same dtype on every machine
    machine.instructions = list
    if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1":
        # as in the process of the tests
        sys.path.append(str(Path(__file__).parents[1]))
        from unoptimized import set_optimized

        set_optimized(False)
    for module in IMPORTS:
        importlib.import_module(module)
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, "a fork would lack the other threads"
    # so that garbage collections in forks neither visit nor copy what was imported
    gc.collect()
    gc.freeze()
    sys.argv[1:] = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(cli.main_of_process())


if __name__ == "__main__":
    main()
