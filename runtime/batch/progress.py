"""Shows the progress of a running job: rows, tokens per second, padding waste, remaining time.

On a terminal one line is redrawn; otherwise (a log file, a pod) a line is written every five
seconds. The clock and the stream are arguments, so tests need neither time nor a terminal.

Does not know where its numbers come from. Guarantees: nothing is written in quiet mode, and the job
continues if the stream can no longer be written to, for example after the terminal was closed.
"""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from ..console import plural, printable, say

LOG_SECONDS = 5.0
REDRAW_SECONDS = 0.1


class Progress:
    """The progress display of one job on a text stream."""

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_quiet: bool = False,
    ):
        self._stream = stream or sys.stderr
        self._clock = clock
        self._is_quiet = is_quiet
        self._is_terminal = self._stream.isatty()
        self._width = 0
        self._has_shown_error = False
        self._total = self._kept = self._done = self._errors = self._tokens = 0
        self._start_clock()

    def note(self, message: str) -> None:
        """Write a message on a separate line."""
        if not self._is_quiet:
            self._clear()
            self._say(f"{printable(message)}\n")

    def show_error(self, message: str) -> None:
        """Show the first error of a row only; many other rows may have the same error."""
        if not self._has_shown_error:
            self._has_shown_error = True
            self.note(f"first error: {message}")

    def start_rows(self, total: int, *, done: int, errors: int) -> None:
        """Begin the run.

        Args:
            total: Rows of the job.
            done: Rows that need no work: errors, and rows kept from an earlier run.
            errors: Rows that the scan found in error.
        """
        self._total, self._kept, self._done, self._errors = total, done, done, errors
        self._tokens = 0
        self._start_clock()

    def _start_clock(self) -> None:
        self._start = self._clock()
        self._next_line = self._start + (REDRAW_SECONDS if self._is_terminal else LOG_SECONDS)

    def count_row(self, *, tokens: int, is_error: bool) -> None:
        """Count one finished row."""
        self._done += 1
        self._errors += is_error
        self._tokens += tokens

    def show_scan(self, num_rows: int) -> None:
        """Show the number of rows that the scan has read, if a line is due."""
        self._show(lambda: self._scan_line(num_rows))

    def update(self, padding_waste: Callable[[], float | None] = lambda: None) -> None:
        """Show the progress line, if a line is due; `padding_waste` is a share of all tokens."""
        self._show(lambda: self.line(padding_waste()))

    def _show(self, line_of: Callable[[], str]) -> None:
        now = self._clock()
        if self._is_quiet or now < self._next_line:
            return
        line = line_of()
        if self._is_terminal:
            self._next_line = now + REDRAW_SECONDS
            self._say("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._next_line = now + LOG_SECONDS
            self._say(f"{line}\n")

    def _scan_line(self, num_rows: int) -> str:
        elapsed = self._clock() - self._start
        rate = f"{num_rows / elapsed:.0f}" if elapsed else "-"
        return f"scan: {plural(num_rows, 'row')}  {rate} rows/s"

    def line(self, padding_waste: float | None = None) -> str:
        """The current progress line."""
        elapsed = self._clock() - self._start
        parts = [f"{self._done}/{self._total} rows", plural(self._errors, "error")]
        parts.append(f"{self._tokens / elapsed:.1f} tokens/s" if elapsed else "- tokens/s")
        if padding_waste is not None:
            parts.append(f"padding {padding_waste:.1%}")
        ran = self._done - self._kept
        if ran and elapsed:
            parts.append(f"ETA {_duration((self._total - self._done) * elapsed / ran)}")
        return "  ".join(parts)

    def finish(self) -> None:
        """Clear the redrawn line."""
        if not self._is_quiet:
            self._clear()

    def _clear(self) -> None:
        if self._width:
            self._say("\r" + " " * self._width + "\r")
            self._width = 0

    def _say(self, text: str) -> None:
        self._is_quiet = not say(self._stream, text)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
