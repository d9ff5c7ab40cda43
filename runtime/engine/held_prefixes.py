"""The shared prefixes that are held in slots, and the prompts that wait for them.

A prefix is computed for the first request that begins with it. Other prompts wait until it is
complete, then copy it. Requests come in depth-first order (see `shared_prefixes`), so a prefix is
no longer needed once a request without it has come and all earlier prompts have copied it.

A tree starts only when as many slots as it needs are free of reservations. Within a tree, one
prefix after the other copies its parent and holds a slot of its own, or several do so at the same
time if more slots are left. The last one continues in the parent's slot. So trees never wait for
each other's slots.

Pure state; does not know how prompts are queued.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakSet

from .actions import ScheduledRequest
from .decode_slots import DecodeSlots
from .shared_prefixes import SharedPrefix
from .waiting_prompts import Prompt


@dataclass(eq=False)
class _Branch:
    """A slot that holds a prefix, and then the prefixes that continue in it."""

    copied_from: "_Held | None"
    """The prefix of which the first one is a copy; None for the first prefix of a tree."""
    num_reserved: int
    """The slots that are given back when the slot is released."""


@dataclass(eq=False)
class _Held:
    """A prefix that is computed or held."""

    prefix: SharedPrefix
    branch: _Branch
    slot: int | None = None
    """Its slot, once it is complete."""
    blocked: list[Prompt] = field(default_factory=list)
    """Prompts of requests that wait until it is complete."""
    next_prefixes: list[Prompt] = field(default_factory=list)
    """Prefixes that continue from it and have not begun."""
    num_users: int = 0
    """The number of prompts that have not copied it yet."""
    may_get_users: bool = True
    num_copies: int = 0
    """The number of slots for copies of it that are not released yet."""


class HeldPrefixes:
    """The prefixes in slots.

    Args:
      slots: The decode slots.
      queue: Called with each prompt that may run.
    """

    def __init__(self, slots: DecodeSlots, queue: Callable[[Prompt], None]):
        self.max_slots = 0
        """The largest number of slots that hold prefixes; requests leave this many free."""
        self.num_blocked = 0
        """The number of requests' prompts that wait for a prefix."""
        self._slots, self._queue = slots, queue
        self._num_reserved = 0
        self._held: dict[SharedPrefix, _Held] = {}
        self._path: list[SharedPrefix] = []
        """The prefixes of the last request."""
        self._seen = WeakSet[SharedPrefix]()
        """All prefixes that were ever added."""
        self._tops: deque[Prompt] = deque()
        """The first prefixes of trees that wait for slots."""

    def enter(self, request: ScheduledRequest) -> SharedPrefix | None:
        """Prepare the prefixes of a request before its prompts are added.

        Returns:
          The prefix with which its prompts can begin. It is shorter than the request's own if that
          was released, because requests did not come in depth-first order.
        """
        path: list[SharedPrefix] = []
        for prefix in [] if request.prefix is None else request.prefix.path:
            if prefix not in self._held:
                if prefix in self._seen:
                    continue  # a longer prefix continued in its slot, or it was released
                if prefix.parent is not None and prefix.parent not in self._held:
                    break
                self._add_prefix(Prompt(request, 1, prefix=prefix, base=prefix.parent))
            self._held[prefix].may_get_users = True
            path.append(prefix)
        self._leave(path)
        return path[-1] if path else None

    def leave(self) -> bool:
        """Record that no more requests with the last path come; return whether there was a path."""
        had_any = bool(self._path)
        self._leave([])
        return had_any

    def add(self, prompt: Prompt) -> None:
        """Add a request's prompt that begins with a prefix."""
        assert prompt.base is not None
        held = self._held[prompt.base]
        prompt.length = prompt.base.length
        held.num_users += 1
        held.blocked.append(prompt)
        self.num_blocked += 1
        self._settle(prompt.base)

    def slot_of(self, prefix: SharedPrefix) -> int:
        """The slot of a complete prefix."""
        slot = self._held[prefix].slot
        assert slot is not None
        return slot

    def count_copy(self, prompt: Prompt) -> None:
        """Record that a prompt copies the prefix with which it begins, whose slot may be released.

        In a grid with pages, the prompt must already share those of the prefix.
        """
        assert prompt.base is not None
        self._held[prompt.base].num_users -= 1
        self._settle(prompt.base)

    def complete(self, prompt: Prompt) -> None:
        """Record that a prefix is complete."""
        assert prompt.prefix is not None
        self._held[prompt.prefix].slot = prompt.slots[0]
        self._slots.hold(prompt.slots[0])
        self._settle(prompt.prefix)

    def clear(self) -> list[Prompt]:
        """Drop all prefixes and release those that are complete; return the blocked prompts."""
        blocked = [prompt for held in self._held.values() for prompt in held.blocked]
        for held in self._held.values():
            if held.slot is not None:
                self._slots.release(held.slot)
        self._held.clear()
        self._tops.clear()
        self._path = []
        self._num_reserved = self.num_blocked = 0
        return blocked

    def _leave(self, path: list[SharedPrefix]) -> None:
        """Replace the path of the last request."""
        left = [prefix for prefix in self._path if prefix not in path]
        self._path = path
        for prefix in reversed(left):
            if (held := self._held.get(prefix)) is not None:
                held.may_get_users = False
                self._settle(prefix)

    def _add_prefix(self, prompt: Prompt) -> None:
        prefix, base = _prefix_of(prompt), prompt.base
        self._seen.add(prefix)
        if base is None:
            self._held[prefix] = _Held(prefix, _Branch(None, prefix.num_slots))
            self._tops.append(prompt)
            self._start_trees()
            return
        parent = self._held[base]
        prompt.length = base.length
        parent.num_users += 1
        parent.next_prefixes.append(prompt)
        branch = parent.branch if prefix.is_last else _Branch(parent, 0)
        self._held[prefix] = _Held(prefix, branch)
        self._settle(base)

    def _start_trees(self) -> None:
        while self._tops and self._reserve(_prefix_of(self._tops[0])):
            self._queue(self._tops.popleft())

    def _reserve(self, prefix: SharedPrefix) -> bool:
        """Reserve the slots of a prefix and those after it, if they are left."""
        has_room = self._num_reserved + prefix.num_slots <= self.max_slots
        self._num_reserved += prefix.num_slots * has_room
        return has_room

    def _settle(self, prefix: SharedPrefix) -> None:
        """Let prompts run that wait for a complete prefix; release its slot if nothing needs it."""
        held = self._held[prefix]
        if held.slot is None:
            return
        blocked, held.blocked = held.blocked, []
        self.num_blocked -= len(blocked)
        for prompt in blocked:
            self._queue(prompt)
        for prompt in [p for p in held.next_prefixes if not _prefix_of(p).is_last]:
            self._copy_for(prompt, held)
        if held.num_copies:
            return
        if held.next_prefixes:
            self._continue(held)
        elif not held.num_users and not held.may_get_users:
            self._release(held)

    def _copy_for(self, prompt: Prompt, held: _Held) -> None:
        """Let a prefix copy a held one, if its slots are reserved or can be.

        One copy at a time uses slots that were reserved before; any other reserves its own.
        """
        prefix = _prefix_of(prompt)
        if held.num_copies:
            if not self._reserve(prefix):
                return
            self._held[prefix].branch.num_reserved = prefix.num_slots
        held.num_copies += 1
        held.next_prefixes.remove(prompt)
        self._queue(prompt)

    def _continue(self, held: _Held) -> None:
        """Let the last user of a prefix continue in its slot, when all others have copied it."""
        (prompt,) = held.next_prefixes
        if held.num_users == 1:
            assert held.slot is not None
            del self._held[held.prefix]
            self._slots.unhold(held.slot)
            prompt.slots = [held.slot]
            self._queue(prompt)

    def _release(self, held: _Held) -> None:
        """Release the slot of a prefix, and let others use what it had reserved."""
        assert held.slot is not None
        del self._held[held.prefix]
        self._slots.release(held.slot)
        self._num_reserved -= held.branch.num_reserved
        if (source := held.branch.copied_from) is not None:
            source.num_copies -= 1
        for other in [other for other in self._held.values() if other.slot is not None]:
            if other.prefix in self._held:
                self._settle(other.prefix)
        self._start_trees()


def _prefix_of(prompt: Prompt) -> SharedPrefix:
    assert prompt.prefix is not None
    return prompt.prefix
