"""Copy standard input to standard error, without XLA's alarms about slow operations.

`compiler_messages` starts this file as a script while graphs compile, so only the standard library
is imported. An alarm is one message of several lines, such as "Very slow compile?" or "Constant
folding an instruction is taking > 1s" (`xla/service/slow_operation_alarm.cc`). Guarantees: every
other line is passed on, in order, also those that a crash writes last.
"""

import os
import re
from contextlib import suppress

_LOG_LINE = re.compile(rb"[IWEF]\d{4} ")
_ALARM = re.compile(rb"E\d{4} .*\bslow_operation_alarm\.cc:\d+\]")
_LAST_WORDS = b"attach the results."
_FRAME = re.compile(rb"\*+\s*")
"""The line that may follow the last words of an alarm."""
_PIECE_BYTES = 1 << 16


class AlarmFilter:
    """Removes alarms from a text that comes in pieces."""

    def __init__(self) -> None:
        """Begin at the beginning of a line."""
        self._rest = b""
        self._is_alarm = self._is_end = False

    def pass_on(self, piece: bytes, *, is_last: bool = False) -> bytes:
        """Return the lines without alarms that end in a piece; at the end, all that is left."""
        *lines, self._rest = re.split(rb"(?<=[\r\n])", self._rest + piece)
        if is_last:
            lines.append(self._rest)
        return b"".join(filter(self._is_kept, lines))

    def _is_kept(self, line: bytes) -> bool:
        is_end, self._is_end = self._is_end, False
        if _ALARM.match(line):
            self._is_alarm = True
        elif _LOG_LINE.match(line):
            self._is_alarm = False
        elif self._is_alarm and _LAST_WORDS in line:
            self._is_alarm, self._is_end = False, True
            return False
        return not self._is_alarm and not (is_end and _FRAME.fullmatch(line))


def _main() -> None:
    alarms = AlarmFilter()
    while piece := os.read(0, _PIECE_BYTES):
        _write(alarms.pass_on(piece))
    _write(alarms.pass_on(b"", is_last=True))


def _write(text: bytes) -> None:
    with suppress(OSError):  # nobody reads it any more
        while text:
            text = text[os.write(2, text) :]


if __name__ == "__main__":
    _main()
