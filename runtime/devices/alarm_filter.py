"""Copy standard input to standard error, without messages of XLA and jax that help no user.

These are XLA's alarms about slow operations, Gloo's lines about connections, and the stack trace of
jax's client when a process of a pod is lost; its first line, which has the reason, stays.

`compiler_messages` starts this file as a script, so only the standard library is imported. An alarm
is one message of several lines, such as "Very slow compile?" or "Constant folding an instruction is
taking > 1s" (`xla/service/slow_operation_alarm.cc`). Guarantees: every other line is passed on, in
order, also those that a crash writes last.
"""

import os
import re
from contextlib import suppress

_LOG_LINE = re.compile(rb"[IWEF]\d{4} ")
_ALARM = re.compile(rb"E\d{4} .*\bslow_operation_alarm\.cc:\d+\]")
_CONNECTION = re.compile(rb"\[Gloo\] Rank \d+ is connected to ")
_LOSS = re.compile(rb"F\d{4} .*\] Terminating process because the JAX distributed service")
_TRACE = re.compile(rb"\*\*\* Check failure stack trace|    @ +0x")
_LAST_WORDS = b"attach the results."
_FRAME = re.compile(rb"\*+\s*")
"""The line that may follow the last words of an alarm."""
_PIECE_BYTES = 1 << 16


class AlarmFilter:
    """Removes alarms, connections and traces of losses from a text that comes in pieces."""

    def __init__(self) -> None:
        """Begin at the beginning of a line."""
        self._rest = b""
        self._is_alarm = self._is_end = self._is_loss = False

    def pass_on(self, piece: bytes, *, is_last: bool = False) -> bytes:
        """Return the lines to keep that end in a piece; at the end, all that is left."""
        *lines, self._rest = re.split(rb"(?<=[\r\n])", self._rest + piece)
        if is_last:
            lines.append(self._rest)
        return b"".join(filter(self._is_kept, lines))

    def _is_kept(self, line: bytes) -> bool:
        is_end, self._is_end = self._is_end, False
        self._is_loss |= _LOSS.match(line) is not None
        if _CONNECTION.match(line) or (self._is_loss and _TRACE.match(line)):
            return False
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
