"""Report or refuse the parts of a published model that nothing reads: keys and tensors.

Does not know about families and formats. Guarantees: keys and tensors are reported in one line
each; on request, the keys are refused instead.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...modelzoo.families.config_reader import listing
from ..console import plural
from ..errors import InvalidConfig
from ..files.run_config import STRICT_CONFIG


@dataclass(frozen=True)
class UnreadParts:
    """Keys and tensors of a published model that nothing reads."""

    where: str
    """The file with the configuration."""
    keys: tuple[str, ...] = ()
    """Keys of the configuration, in the form `key = value`."""
    tensors: Mapping[str, int] = field(default_factory=dict)
    """The number of unread tensors, by the prefix of their names."""

    @property
    def skipped(self) -> str:
        """A phrase that counts the tensors; empty if there are none."""
        return " and ".join(
            f"{plural(count, 'tensor')} of {beginning}*"
            for beginning, count in self.tensors.items()
        )

    def report(self, say: Callable[[str], object], *, is_strict: bool) -> None:
        """Report unread keys and tensors, before the model is used.

        Raises:
          InvalidConfig: `is_strict` is set, and there are keys that are not read.
        """
        if self.keys and is_strict:
            raise InvalidConfig(
                f"{self.where}: expected only keys that are read, got {listing(self.keys)}. Remove "
                f"them, or run without {STRICT_CONFIG}: they cannot change an answer."
            )
        if self.keys:
            say(
                f"{self.where}: keys without effect, as nothing reads them: {listing(self.keys)} "
                f"({STRICT_CONFIG} refuses them)"
            )
        if self.tensors:
            say(f"{self.where}: only text is served, and {self.skipped} are not read")
