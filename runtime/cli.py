"""The command `noria`: handles signals from its first line on, and turns errors into exit codes.

It imports little before the signals are handled. Does not know about subcommands.
"""

import atexit
import sys
import traceback
from collections.abc import Sequence

from . import errors
from .console import tell
from .process.standard_streams import prepare_streams
from .process.stop_signals import StopNow, StopSignals, at_forced_end, ignore_signals


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; an error becomes one line on stderr, below the traceback of a bug.

    Args:
        arguments: The command line without the program's name; by default that of this process.

    Returns:
        The exit code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        with (
            StopSignals() as signals,
            at_forced_end(lambda code: _tell_pod_of_stop(arguments, signals)),
        ):
            from .commands.command_line import run_command

            return run_command(arguments)
    except SystemExit as error:  # of the parser
        if error.code:
            _tell_pod(arguments, "its options are wrong; see its own message", errors.EXIT_USAGE)
        raise
    except BaseException as error:
        code = errors.exit_code(error)
        if "--debug" in arguments or code == errors.EXIT_BUG:
            tell(sys.stderr, traceback.format_exc().rstrip())
        if code == errors.EXIT_BUG:
            tell(sys.stderr, f"noria: {errors.REPORT}")
        elif "--debug" not in arguments:
            tell(sys.stderr, f"noria: {errors.message(error)}")
        _tell_pod(arguments, errors.message(error), code, is_stop=errors.is_stop(error))
        if errors.is_stop(error):
            errors.leave_at_once(code)
        return code


def _tell_pod(arguments: Sequence[str], reason: str, code: int, is_stop: bool = False) -> None:
    """Tell the other processes of a pod, if there is one, that this one fails before they meet."""
    # the parser takes the beginnings of options, too
    if any(argument.startswith("--coo") for argument in arguments):
        from .commands.pod_arguments import report_failed_start

        report_failed_start(arguments, reason, code, is_stop=is_stop)


def _tell_pod_of_stop(arguments: Sequence[str], signals: StopSignals) -> None:
    if signals.requested is not None:
        stop = StopNow(signals.requested)
        _tell_pod(arguments, str(stop), stop.exit_code, is_stop=True)


def main_of_process() -> int:
    """Run the command line of this process, whose signals are handled until it has ended."""
    prepare_streams()
    signals = StopSignals()
    signals.__enter__()
    # the first to be registered is the last to run
    atexit.register(ignore_signals)
    return main()


if __name__ == "__main__":
    sys.exit(main_of_process())
