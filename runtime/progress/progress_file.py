"""The progress of a job as lines of JSON, for programs that watch it.

Does not know about rows or phases. Guarantees: every line is a whole JSON object with the time of
day, and a file that cannot be written does not stop the job.
"""

import os
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import ConfigError, message
from ..files.strict_json import dump_line

_DESCRIPTOR = re.compile(r"fd:(\d+)")


def path_of(place: str) -> Path | None:
    """The path of a progress file; None for a descriptor, `fd:N`."""
    return None if _DESCRIPTOR.fullmatch(place) else Path(place)


class ProgressFile:
    """A file or an open descriptor that takes lines of progress.

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
