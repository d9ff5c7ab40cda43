"""The exit codes and the errors that users see, and the way a command ends with an error.

Every error says what was expected, what came, and the remedy. Errors of what users give are
`UserError`s; errors of devices and other programs derive from built-in errors, and may have their
exit code in an attribute `exit_code`. Every other exception is a bug. Does not know about
subcommands.
"""

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ..modelzoo.errors import UserError as UserError

EXIT_OK = 0
"""Every row has a result."""
EXIT_ROWS_FAILED = 1
"""Some rows ended as errors; for `noria layouts`: a layout that the user named failed."""
EXIT_USAGE = 2
"""An option, an input or a configuration cannot be used."""
EXIT_MODEL = 3
"""A model or a checkpoint cannot be used."""
EXIT_BUILD = 4
"""A graph does not compile, or something does not fit into memory."""
EXIT_BUG = 70
"""An error that noria does not expect, which is a mistake in it."""
EXIT_RESUMABLE = 75
"""The job was stopped; the same command resumes it."""
EXIT_INTERRUPTED = 130
"""Ctrl-C ended the command."""
REPORT = (
    "this is a bug of noria, and not of what it was given. Please report the lines above, with the "
    "command and the output of noria doctor. Rows that have finished are kept."
)
_MAX_JOINED = 20
"""The number of errors of a row that are written out."""


class ConfigError(UserError):
    """A plan, layout, option or table with an unknown key or an invalid value."""


class UnusableFile(UserError):
    """A given file that cannot be read or written."""


class InputError(UnusableFile):
    """An input file that cannot be used."""


class RowError(UserError):
    """The error of a row: a code for programs, and a message for people.

    Codes: invalid_json, invalid_utf8, invalid_line, missing_custom_id, duplicate_custom_id,
    unsupported_url, invalid_request, unknown_parameter, context_length_exceeded, empty_prompt,
    invalid_token_id, chat_template_error, template_error, nonfinite_logits, expert_overflow,
    internal_error.
    """

    def __init__(self, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    def __reduce__(self):
        """Pickle all arguments, so that a worker's error reaches its parent process."""
        return type(self), (self.code, self.message, self.param)


def invalid_request(param: str, message: str) -> RowError:
    """The error for a parameter of a request; the message says what was expected and what came."""
    return RowError("invalid_request", f"{param}: {message}", param)


def unknown_parameter(key: str, known: tuple[str, ...]) -> RowError:
    """The error for an unknown key, with the most similar known key."""
    key = key[:100]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    remedy = f"Did you mean {close[0]!r}?" if close else "Remove it."
    return RowError("unknown_parameter", f"{key!r} is not a known parameter. {remedy}", key)


def joined(errors: Sequence[RowError]) -> RowError:
    """One error for several of a row, with the code and the parameter of the first."""
    messages = [error.message for error in errors[:_MAX_JOINED]]
    if (more := len(errors) - len(messages)) > 0:
        messages.append(f"{more} more are refused.")
    return RowError(errors[0].code, " ".join(messages), errors[0].param)


class _WithExitCode(Exception):
    """An error with the exit code of its command."""

    def __init__(self, message: str, exit_code: int = EXIT_USAGE):
        super().__init__(message)
        self.exit_code = exit_code


class JobError(_WithExitCode, RuntimeError):
    """A job that cannot continue, with the exit code of its command."""


class StartFailed(_WithExitCode, UserError):
    """A pod that does not start, with the exit code of all its processes."""


class JournalError(UserError):
    """A journal on disk that this job cannot continue."""


class OtherConfiguration(JournalError):
    """A journal of a job with another configuration, which is `stored`."""

    def __init__(self, message: str, stored: Mapping[str, str]):
        super().__init__(message)
        self.stored = stored

    def __reduce__(self):
        """Pickle all arguments, so that a worker's error reaches its parent process."""
        return type(self), (str(self), dict(self.stored))


class JournalWriteError(OSError):
    """A record that the disk refused; earlier records are kept, so the job can be resumed."""

    exit_code = EXIT_RESUMABLE


class OutputIsLocked(UserError):
    """An output that another process is writing."""


class MergeError(UserError):
    """Files that cannot be merged: not all parts of one job, or a part twice or not finished."""


class NoPlanFits(UserError):
    """A search that found no plan, because no grid fits the limits."""


class CacheUnusable(UserError):
    """The reason why compiled programs are not kept."""


class BundleUnusable(UserError):
    """The reason why a file of a bundle is not used."""


class BundleRequired(UserError):
    """A bundle that the user requires, and that cannot be used."""

    exit_code = EXIT_USAGE


class OutOfStep(RuntimeError):
    """A process of a pod that has run other calls than process 0, so its rows may be wrong."""

    exit_code = EXIT_BUILD


class OutOfMemory(RuntimeError):
    """Arrays that do not fit into the memory of the devices."""

    exit_code = EXIT_BUILD


class InvalidTokenizer(UserError):
    """Tokenizer files that are corrupt, contradictory or of an unknown kind."""


class CheckpointError(UserError):
    """A model on disk that cannot be used as it is."""

    exit_code = EXIT_MODEL


class ModelNotFound(CheckpointError):
    """A path or name without a model, or with a model in an unknown format."""


class InvalidConfig(CheckpointError):
    """A config.json, generation_config.json or noria.json that is malformed or implausible."""


class InvalidSafetensors(CheckpointError):
    """A safetensors file or index that is malformed, inconsistent, or outside the limits."""


class InvalidQuantisation(CheckpointError):
    """Quantised tensors and scales that do not match; the message counts them and lists some."""


class InvalidGGUF(CheckpointError):
    """A GGUF file that is malformed or outside the limits."""


class InvalidOrbax(CheckpointError):
    """An orbax checkpoint that is incomplete, or differs from its noria.json."""


class CheckpointMismatch(CheckpointError):
    """Tensors and parameters that do not match; the message counts them and lists some."""


class CheckpointChanged(CheckpointError):
    """A weight file that changed while it was read."""


class InvalidAdapter(CheckpointError):
    """An adapter on disk that is malformed, not implemented, or does not fit the model."""


class ForkedProcess(RuntimeError):
    """A model used in a process that was forked from the model's own process.

    A fork copies only one thread: locks held by jax's other threads stay locked in the child, which
    would wait forever.
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
            f"LLM: expected the process that started jax ({_starter}), got a process that was "
            f"forked from it ({os.getpid()}), in which jax hangs. Start workers as new processes, "
            f"with multiprocessing.get_context('spawn'), and construct the LLM in each of them."
        )


def exit_code(error: BaseException) -> int:
    """The exit code of an error; `EXIT_BUG` for one that noria does not expect."""
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return code
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if is_of_machine(error):
        return EXIT_BUILD
    # an ImportError names a missing optional package
    return EXIT_USAGE if isinstance(error, UserError | OSError | ImportError) else EXIT_BUG


def is_of_machine(error: BaseException) -> bool:
    """Whether the compiler, a device or the memory failed."""
    names = {kind.__name__ for kind in type(error).__mro__}
    # without an import of jax
    return not names.isdisjoint({"JaxRuntimeError", "XlaRuntimeError", "MemoryError"})


def is_stop(error: BaseException) -> bool:
    """Whether the error comes from a signal, after which the process ends without waiting."""
    return not isinstance(error, Exception)


def leave_at_once(code: int) -> None:
    """End the process now; Python's normal end would wait for running compiles and collectives."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the terminal may be closed
            stream.flush()
    os._exit(code)


def message(error: BaseException) -> str:
    """The text of an error for the user, usually one line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.strerror is not None:
        # without the number that Python writes before it
        place = "" if error.filename is None else f"{error.filename}: "
        return f"{place}{error.strerror}"
    return str(error) or type(error).__name__
