"""The exit codes and the errors that users see, and how a command ends with an error.

Every error derives from a built-in one and says what was expected, what came, and the remedy. An
exception may carry its exit code in an attribute `exit_code`. Knows nothing of subcommands.
"""

import os
import sys
from contextlib import suppress

EXIT_OK = 0
"""Every row has a result."""
EXIT_ROWS_FAILED = 1
"""Some rows ended as errors; of `noria layouts`: some layout is illegal or wrong."""
EXIT_USAGE = 2
"""An option, an input or a configuration cannot be used."""
EXIT_MODEL = 3
"""A model or a checkpoint cannot be used."""
EXIT_BUILD = 4
"""A graph does not compile, or something does not fit into memory."""
EXIT_RESUMABLE = 75
"""The job was stopped; the same command goes on with it."""
EXIT_INTERRUPTED = 130
"""Ctrl-C."""


class ConfigError(ValueError):
    """A plan, a layout, an option or a table that says something unknown or impossible."""


class UnusableFile(ValueError):
    """A file that a command was given and that cannot be read or written."""


class InputError(UnusableFile):
    """An input file that cannot be used."""


class RowError(ValueError):
    """The error that a row ends with: a code for programs, a message for people.

    Codes: invalid_json, invalid_utf8, invalid_line, missing_custom_id, duplicate_custom_id,
    unsupported_url, invalid_request, unknown_parameter, context_length_exceeded, empty_prompt,
    invalid_token_id, chat_template_error, nonfinite_logits, expert_overflow, internal_error.
    """

    def __init__(self, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class JobError(RuntimeError):
    """A job that cannot go on, with the exit code of its command."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class JournalError(ValueError):
    """A journal on disk that this job cannot continue."""


class JournalWriteError(OSError):
    """A record that the disk refused; earlier records are kept, so the job can go on."""

    exit_code = EXIT_RESUMABLE


class OutputIsLocked(ValueError):
    """An output that another process is writing."""


class MergeError(ValueError):
    """Files that are not all parts of one job, each once and finished."""


class NoPlanFits(ValueError):
    """A search without result: no grid fits the limits of the plan."""


class CacheUnusable(ValueError):
    """The reason why compiled programs are not kept."""


class BundleUnusable(ValueError):
    """The reason why a file of a bundle is not used."""


class OutOfStep(RuntimeError):
    """A process of a pod has run other calls than process 0, so its rows cannot be trusted."""

    exit_code = EXIT_BUILD


class OutOfMemory(RuntimeError):
    """Arrays that do not fit into the memory of the devices."""

    exit_code = EXIT_BUILD


class InvalidTokenizer(ValueError):
    """Tokenizer files that are corrupt, contradictory or of an unknown kind."""


class CheckpointError(ValueError):
    """A model on disk that cannot be used as it is."""

    exit_code = EXIT_MODEL


class ModelNotFound(CheckpointError):
    """A path or name at which there is no model, or none in a format that is read."""


class InvalidConfig(CheckpointError):
    """A config.json, generation_config.json or noria.json that is malformed or not plausible."""


class InvalidSafetensors(CheckpointError):
    """A safetensors file or index that is malformed, inconsistent, or outside the limits."""


class InvalidQuantisation(CheckpointError):
    """Quantised tensors and scales that do not belong together; the message lists all of them."""


class InvalidGGUF(CheckpointError):
    """A GGUF file that is malformed or outside the limits."""


class InvalidOrbax(CheckpointError):
    """An orbax checkpoint that was not finished, or does not hold what its noria.json says."""


class CheckpointMismatch(CheckpointError):
    """Tensors and parameters that do not cover each other; the message lists every difference."""


class CheckpointChanged(CheckpointError):
    """A weight file that was altered while it was being read."""


class ForkedProcess(RuntimeError):
    """A model that is used in a process that was forked from its own.

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
    """The exit code of a user's error; None for an error that needs its traceback."""
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
