"""Shows the progress of a running job: rows, tokens per second, slots, padding, remaining time.

On a terminal one line is redrawn; otherwise (a log file, a pod) lines are written at growing
intervals. The clock and the stream are arguments, so tests need neither time nor a terminal.

Does not know where its numbers come from. Guarantees: quiet mode hides progress and no warning, and
the job continues if the stream can no longer be written to, for example after the terminal was
closed.
"""

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..console import plural, printable, say
from ..errors import ConfigError, message
from ..files.strict_json import dump_line

if TYPE_CHECKING:
    from ..engine.metrics import RunFigures

_DESCRIPTOR = re.compile(r"fd:(\d+)")

LOG_SECONDS = 5.0
"""Seconds between the first lines of a log."""
MAX_LOG_SECONDS = 300.0
LOG_SHARE = 0.2
"""Seconds between later lines of a log, as a share of the seconds that have passed."""
REDRAW_SECONDS = 0.1
RECORD_SECONDS = 5.0
"""Seconds between the lines of a progress file."""
RATE_SECONDS = 10.0
"""The seconds over which the present rate of tokens is measured."""


class Progress:
    """The progress display of one job on a text stream.

    Args:
        stream: The stream; by default stderr.
        clock: Monotonic seconds.
        is_quiet: Whether only warnings are shown.
        is_verbose: Whether the whole plan is shown.
        is_silent: Whether nothing is shown, as another process of the job shows it.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_quiet: bool = False,
        is_verbose: bool = False,
        is_silent: bool = False,
    ):
        self._stream = stream or sys.stderr
        self._clock = clock
        self._is_silent = is_silent
        self._is_quiet = is_quiet or is_silent
        self.is_verbose = is_verbose
        self.file: ProgressFile | None = None
        """A file that takes the progress as lines of JSON too."""
        self._phase = "scan"
        self._is_terminal = self._stream.isatty()
        self._width = 0
        self._has_shown_error = False
        self._total = self._kept = self._done = self._errors = 0
        self._max_tokens: int | None = None
        self._start_clock()

    def note(self, message: str) -> None:
        """Write a message about the progress on a separate line."""
        if not self._is_quiet:
            self.warn(message)

    def warn(self, message: str) -> None:
        """Write a message that quiet mode shows too: an error, a warning, the reason of a stop."""
        if not self._is_silent:
            self._clear()
            self._say(f"{printable(message)}\n")

    def show_error(self, message: str) -> None:
        """Show the error if it is the first one; many other rows may have the same error."""
        if not self._has_shown_error:
            self._has_shown_error = True
            self.warn(f"first error: {message}")

    def start_rows(
        self, total: int, *, done: int, errors: int, max_tokens: int | None = None
    ) -> None:
        """Begin the run.

        Args:
            total: Rows of the job.
            done: Rows that need no work: errors, and rows kept from an earlier run.
            errors: Rows that the scan found in error.
            max_tokens: The tokens that all rows together can have; None if it is not known.
        """
        self._total, self._kept, self._done, self._errors = total, done, done, errors
        self._max_tokens = max_tokens
        self._start_clock()
        self._record()

    def begin(self) -> None:
        """Record the beginning of the job."""
        self._record()

    def enter(self, phase: str) -> None:
        """Take the phase that begins, for the progress file."""
        if phase != self._phase:
            self._phase = phase
            self._record()

    def end(self, exit_code: int | None) -> None:
        """Record the end of the job; the code is None for an error of noria itself."""
        self._phase = "end"
        self._record(exit_code=exit_code)

    def _start_clock(self) -> None:
        self._start = self._clock()
        self._next_line = self._start + (REDRAW_SECONDS if self._is_terminal else LOG_SECONDS)
        self._next_record = self._start + RECORD_SECONDS
        self._counts: deque[tuple[float, int]] = deque([(self._start, 0)])
        self._before_tokens = self._start

    def count_row(self, *, is_error: bool) -> None:
        """Count one finished row."""
        self._done += 1
        self._errors += is_error

    def show_reading(self, num_bytes: int) -> None:
        """Show the size of the lines that an input was converted to, if a line is due."""
        self._show(lambda: f"reading the input: {num_bytes / 1e6:.0f} MB of lines")

    def show_scan(self, num_rows: int, num_bytes: int, total_bytes: int) -> None:
        """Show the rows and the share of the input that the scan has read, if a line is due."""
        if self._is_record_due():
            self._record(rows_scanned=num_rows, share_scanned=num_bytes / total_bytes)
        self._show(lambda: self._scan_line(num_rows, num_bytes / total_bytes))

    def show_search(self, num_grids: int, done: int, left: int) -> None:
        """Show the grids that the search for a plan has simulated, if a line is due.

        Args:
            num_grids: Simulated grids.
            done: The work that is done, in any unit.
            left: The largest amount of work that may be left.
        """

        def line() -> str:
            seconds = (self._clock() - self._start) * left / done
            return (
                f"search: {plural(num_grids, 'grid')} simulated  ETA at most {_duration(seconds)}"
            )

        self._show(line)

    def update(self, figures: "RunFigures") -> None:
        """Take the figures of the run, and show the progress line if one is due."""
        now = self._clock()
        if not figures.tokens:
            # before the first tokens, the start of the rates is moved to now, so that they begin
            # with the first decode call
            self._before_tokens = now
            self._counts = deque([(now, 0)])
        elif now - self._counts[-1][0] >= RATE_SECONDS / 10:
            self._counts.append((now, figures.tokens))
            while now - self._counts[1][0] >= RATE_SECONDS:
                self._counts.popleft()
        if self._is_record_due():
            self._record(figures)
        self._show(lambda: self.line(figures))

    def _is_record_due(self) -> bool:
        return self.file is not None and self._clock() >= self._next_record

    def _record(self, figures: "RunFigures | None" = None, **others: Any) -> None:
        """Write a line to the progress file, with nulls for what is not known."""
        if self.file is None:
            return
        now = self._clock()
        self._next_record = now + RECORD_SECONDS
        record: dict[str, Any] = {
            "phase": self._phase,
            "rows_done": self._done,
            "rows_total": self._total or None,
            "errors": self._errors,
            **dict.fromkeys(("tokens", "tokens_per_second", "seconds_left")),
        }
        if figures is not None:
            record["tokens"] = figures.tokens
            record["seconds_left"] = _rounded(self._seconds_left(figures.tokens, now))
            if figures.tokens and now > self._before_tokens:
                rate = self._present_rate(figures.tokens, now)
                record["tokens_per_second"] = _rounded(rate)
        self.file.write(record | others)

    def _present_rate(self, tokens: int, now: float) -> float:
        """The present rate of tokens."""
        since, before = self._counts[0]
        return (tokens - before) / (now - since)

    def _show(self, line_of: Callable[[], str]) -> None:
        now = self._clock()
        if self._is_quiet or now < self._next_line:
            return
        line = line_of()
        if self._is_terminal:
            self._next_line = now + REDRAW_SECONDS
            line = line[: self._columns() - 1]
            self._say("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            interval = LOG_SHARE * (now - self._start)
            self._next_line = now + min(max(LOG_SECONDS, interval), MAX_LOG_SECONDS)
            self._say(f"{line}\n")

    def _columns(self) -> int:
        """The width of the terminal; a longer line could not be redrawn."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or sys.maxsize
        except OSError:
            return sys.maxsize

    def _scan_line(self, num_rows: int, share: float) -> str:
        elapsed = self._clock() - self._start
        rate = f"{num_rows / elapsed:.0f}" if elapsed else "-"
        line = f"scan: {plural(num_rows, 'row')}  {share:.0%}  {rate} rows/s"
        return f"{line}  ETA {_duration(elapsed / share - elapsed)}" if 0 < share < 1 else line

    def line(self, figures: "RunFigures") -> str:
        """The current progress line."""
        parts, now = [f"{self._done}/{self._total} rows"], self._clock()
        if self._errors:
            parts.append(plural(self._errors, "error"))
        if (seconds := self._seconds_left(figures.tokens, now)) is not None:
            is_bound = self._done == self._kept
            parts.append(f"ETA {'at most ' if is_bound else ''}{_duration(seconds)}")
        if figures.tokens and now > self._before_tokens:
            rate = self._present_rate(figures.tokens, now)
            average = figures.tokens / (now - self._before_tokens)
            parts.append(f"{_rate(rate)} tokens/s, {_rate(average)} since the first")
        if figures.slots:
            parts.append(f"{figures.used_slots}/{figures.slots} slots")
        if figures.padding_waste is not None:
            parts.append(f"padding {figures.padding_waste:.0%}")
        return "  ".join(parts)

    def _seconds_left(self, tokens: int, now: float) -> float | None:
        """The remaining time, if it is known: the smaller one of two estimates.

        One estimate follows the rate of finished rows. It is too large at first, because all slots
        are filled before the first rows end. The other follows the rate of tokens up to the largest
        number that the rows can have, so it is an upper bound.
        """
        ran, seconds = self._done - self._kept, []
        if ran:
            seconds.append((self._total - self._done) * (now - self._start) / ran)
        if self._max_tokens is not None and tokens:
            left = max(0, self._max_tokens - tokens)
            seconds.append(left * (now - self._before_tokens) / tokens)
        return min(seconds, default=None)

    def finish(self) -> None:
        """Clear the redrawn line."""
        self._clear()

    def _clear(self) -> None:
        if self._width:
            self._say("\r" + " " * self._width + "\r")
            self._width = 0

    def _say(self, text: str) -> None:
        if not say(self._stream, text):
            self._is_silent = self._is_quiet = True


def _rate(rate: float) -> str:
    return f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def path_of(place: str) -> Path | None:
    """The path of a progress file; None for a descriptor, `fd:N`."""
    return None if _DESCRIPTOR.fullmatch(place) else Path(place)


class ProgressFile:
    """A file or an open descriptor that takes lines of progress, for programs that watch a job.

    Every line is a whole JSON object with the time of day. A file that cannot be written does not
    stop the job.

    Args:
        place: A path, to which lines are appended, or `fd:N`.
        on_failure: Called with a line if the file can no longer be written.
        now: The time of day.

    Raises:
        ConfigError: The file or the descriptor cannot be written.
    """

    def __init__(
        self,
        place: str,
        on_failure: Callable[[str], None],
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ):
        self._place, self._on_failure, self._now = place, on_failure, now
        given = _DESCRIPTOR.fullmatch(place)
        try:
            if given:
                self._descriptor: int | None = os.dup(int(given.group(1)))
            else:
                # a pipe without a reader is an error, and no wait
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
                self._descriptor = os.open(place, flags, 0o666)
                os.set_blocking(self._descriptor, True)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--progress-file {place}: expected a file or an open descriptor fd:N that can be "
                f"written, got none ({message(error)}). Name a file in a folder that you can write."
            ) from None

    def write(self, figures: Mapping[str, Any]) -> None:
        """Append a line with the time and the figures."""
        if self._descriptor is None:
            return
        line = dump_line({"time": self._now().isoformat(timespec="milliseconds"), **figures})
        try:
            os.write(self._descriptor, line + b"\n")
        except OSError as error:
            self.close()
            self._on_failure(
                f"--progress-file {self._place}: cannot be written ({message(error)}); the job "
                "continues without it"
            )

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
