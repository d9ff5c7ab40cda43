"""Report or refuse the parts of a published model that nothing reads: keys and tensors.

Does not know about families and formats. Guarantees: every tensor is counted; keys and tensors are
reported in one line each, apart from tensors that only repeat others or the configuration; on
request, the keys are refused instead.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...modelzoo.families.config_reader import listing
from ..console import plural
from ..errors import InvalidConfig
from ..files.run_config import STRICT_CONFIG
from .tensor_source import TensorSource

if TYPE_CHECKING:
    from ...modelzoo.families.family import ModelSpec


_REPEATING = re.compile(r"(^|\.)(inv_freq|position_ids|(rope_freqs|attn_rot_embd)\.weight)$")
"""Finds names of tensors whose numbers follow from the configuration."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class UnreadParts:
    """Keys and tensors of a published model that nothing reads."""

    where: str
    """The file with the configuration."""
    keys: tuple[str, ...] = ()
    """Keys of the configuration, in the form `key = value`."""
    tensors: Mapping[str, int] = field(default_factory=dict)
    """The number of unread tensors, by the beginnings of their names, as `model.layers.61.*`."""
    repeating: Mapping[str, int] = field(default_factory=dict)
    """The same of tensors that repeat others or the configuration, so nobody misses them."""
    only_text: bool = False
    """Whether tensors belong to parts of the model that read no text."""

    @property
    def all_tensors(self) -> dict[str, int]:
        """The number of all unread tensors, by the beginnings of their names."""
        return {**self.tensors, **self.repeating}

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
            only = ", as only text is served" if self.only_text else ""
            say(f"{self.where}: not read: {counted(self.tensors)}{only}")


def find_unread(
    where: str, spec: "ModelSpec", tensors: TensorSource, copies: Collection[str] = ()
) -> UnreadParts:
    """The tensors that no parameter uses; `copies` are those that repeat others or are zeros."""
    used = {name for source in spec.sources for part in source.parts for name in part.tensors}
    unread = tensors.tensors.keys() - used
    repeating = {name for name in unread if name in copies or _REPEATING.search(name)}
    return UnreadParts(
        where,
        tensors=grouped(unread - repeating, used | repeating),
        repeating=grouped(repeating, used | (unread - repeating)),
        only_text=all(name.startswith(spec.ignored_prefixes) for name in unread - repeating),
    )


def counted(tensors: Mapping[str, int]) -> str:
    """A phrase that counts tensors and names their groups, as `14 tensors: model.layers.61.*`."""
    groups = [name if len(tensors) == 1 else f"{name} ({n})" for name, n in tensors.items()]
    return f"{plural(sum(tensors.values()), 'tensor')}: {listing(groups)}"


def grouped(unread: Collection[str], read: Collection[str]) -> dict[str, int]:
    """Count tensors by the shortest beginning of their names that no tensor that is read has.

    Groups that differ in one number only are joined, as in `model.layers.0-3.inv_freq`.
    """
    taken = {beginning for name in read for beginning in _beginnings(name)}
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in unread:
        groups[next((b for b in _beginnings(name) if b not in taken), name)].append(name)
    alike: defaultdict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    counts = {}
    for beginning, names in groups.items():
        shown = names[0] if len(names) == 1 else f"{beginning}*"
        if number := _NUMBER.search(shown):
            ends = shown[: number.start()], shown[number.end() :]
            alike[ends][int(number[0])] = len(names)
        else:
            counts[shown] = len(names)
    for (start, end), own in alike.items():
        counts[f"{start}{_ranges(sorted(own))}{end}"] = sum(own.values())
    return dict(sorted(counts.items()))


def _beginnings(name: str) -> Iterator[str]:
    """The beginnings of a name that end with a point, from the shortest, and the name."""
    yield from (name[: point.end()] for point in re.finditer(r"\.", name))
    yield name


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers as text, as `0-3,7`."""
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n for i, n in enumerate(numbers) if i == len(numbers) - 1 or numbers[i + 1] != n + 1]
    pairs = zip(starts, ends, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)
