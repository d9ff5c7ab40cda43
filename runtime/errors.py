"""Errors as a command ends with them: an exit code, and one line for people.

Knows nothing of subcommands. An exception may carry its code in an attribute `exit_code`.
"""

import os
import sys
from contextlib import suppress

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130


class OutOfMemory(RuntimeError):
    """Arrays do not fit into the memory of the devices."""

    exit_code = 4


class ForkedProcess(RuntimeError):
    """A model is used in a process that was forked from its own.

    A fork copies one of many threads: locks that jax's other threads hold stay locked in the child,
    which would wait for ever.
    """

    exit_code = EXIT_USAGE


_starter: int | None = None


def note_start() -> None:
    """Remember the process that starts jax; raise ForkedProcess in a forked child of it."""
    global _starter
    check_process()
    _starter = os.getpid()


def check_process() -> None:
    """Raise ForkedProcess if another process started jax."""
    if _starter not in (None, os.getpid()):
        raise ForkedProcess(
            f"LLM: expected the process that started jax ({_starter}), got one that was forked "
            f"from it ({os.getpid()}), in which jax hangs. Start workers as new processes, with "
            f"multiprocessing.get_context('spawn'), and make the LLM in each of them."
        )


def exit_code(error: BaseException) -> int | None:
    """The code for an error that is no bug of ours; None for one that needs its traceback."""
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return code
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    # a missing extra is an ImportError that names it
    return EXIT_USAGE if isinstance(error, ValueError | OSError | ImportError) else None


def is_stop(error: BaseException) -> bool:
    """Whether it comes from a signal, after which nothing is waited for."""
    return not isinstance(error, Exception)


def leave_at_once(code: int) -> None:
    """End the process now: Python's own end would wait for compiles and collectives under way."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # of a terminal that was closed
            stream.flush()
    os._exit(code)


def message(error: BaseException) -> str:
    """The error in one line, or as many as it brings."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
