"""The requests that the scheduler takes, and the actions that it gives, as plain data.

The engine runs these actions, and the simulator counts them. Knows nothing of token ids, devices or
the order of actions.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ...compile.grids.prefill_bucket import PrefillBucket
from ...compile.grids.prefix_grid import PlannedPrefix
from .page_pool import CopiedPage
from .shared_prefixes import SharedPrefix


@dataclass(frozen=True)
class ScheduledRequest:
    """The facts of one request that the scheduler needs."""

    number: int
    prompt_length: int
    max_total_length: int
    """Length, prompt included, at which each of its sequences ends; `prompt_length` if nothing is
    generated."""
    num_sequences: int
    is_scored: bool
    prefix: SharedPrefix | None = None
    """The shared prefix with which the prompt begins."""
    planned_prefix: PlannedPrefix | None = None
    """The longest prefix of the plan with which the prompt begins."""

    @property
    def generates(self) -> bool:
        """Whether the request has sequences to decode."""
        return self.max_total_length > self.prompt_length


class ScheduledSequence(NamedTuple):
    """One of the continuations that a request asks for."""

    request: ScheduledRequest
    sample: int


@dataclass(frozen=True)
class PromptPiece:
    """One row of a prefill call."""

    slot: int | None
    """The slot to write to; None for a prompt that is only scored, in one piece, outside of packed
    grids."""
    sequence: ScheduledSequence
    start: int
    count: int
    is_of_prefix: bool = False
    """Whether the piece belongs to a shared prefix; `sequence` is then one that begins with it."""
    num_known: int | None = None
    """For a sequence that gave its slot back and starts again, the tokens that it emitted before;
    else None."""

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete after this piece."""
        return self.start + self.count == self.sequence.request.prompt_length


@dataclass(frozen=True)
class PrefillAction:
    """Run one prefill batch: its rows in this order, followed by dummy rows.

    In a packed grid, several rows may be pieces of one prompt. They are in order of the prompt.
    """

    bucket: PrefillBucket
    is_scored: bool
    rows: tuple[PromptPiece, ...]
    read_entries: int = 0
    """In a packed grid, the entries in whole pages that the rows read, each up to its own end."""


@dataclass(frozen=True)
class ForkAction:
    """Copy a complete prompt to the slot of another sequence of its request, or a shared prefix to
    the slot of a prompt that begins with it."""

    source: int
    slot: int
    sequence: ScheduledSequence | None = None
    """The sequence that decodes in the slot from now on; None for a copy of a prefix."""
    num_copied: int = 0
    """Tokens of a request's prompt that are copied from a shared prefix."""
    copied_pages: tuple[CopiedPage, ...] = ()
    """The pages to copy, in a grid with pages."""


class ReadEntries(NamedTuple):
    """The entries in whole pages that rows read in a decode call, summed over its steps."""

    read: int
    """The entries, where those that a group of rows reads once are counted once."""
    seen: int
    """The entries, where those that a group of rows reads once are counted for each row."""


NOTHING_READ = ReadEntries(0, 0)


class SharedGroup(NamedTuple):
    """Rows of a decode call that begin with the same planned prefix, whose pages are read once."""

    number: int
    """The number of the group in the graph."""
    slots: tuple[int, ...]
    num_pages: int
    """The whole pages of the prefix. Unit: pages."""


@dataclass(frozen=True)
class DecodeAction:
    """Run one decode call for the live slots."""

    slots: tuple[int, ...]
    length: int
    """The number of positions that the longest row has after the call."""
    num_waiting: int = 0
    """The number of rows that wait in their slots, for pages or for a place in a group."""
    given_back: tuple[int, ...] = ()
    """Slots that rows gave back before the call; they start again later."""
    groups: tuple[SharedGroup, ...] = ()
    """The groups of rows that read a planned prefix."""


Action = PrefillAction | ForkAction | DecodeAction
