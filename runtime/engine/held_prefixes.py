"""The shared prefixes that are held in slots, and the prompts that wait for them.

A prefix is computed for the first request that begins with it. Other prompts wait until it is
complete, then copy it. Requests come in depth-first order (see `shared_prefixes`), so a prefix is
no longer needed after a request that does not begin with it, when all prompts before that have
copied it.

A tree of prefixes starts only when as many slots are left as it needs at most. Within a tree, one
prefix after the other copies its parent and holds a slot of its own; the last one continues in the
parent's slot. So trees never wait for each other's slots.

Pure state; does not know how prompts are queued.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakSet

from .decode_slots import DecodeSlots, Prompt, ScheduledRequest
from .shared_prefixes import SharedPrefix


@dataclass(eq=False)
class _Held:
    """A prefix that is computed or held."""

    prefix: SharedPrefix
    top: SharedPrefix
    """The first prefix of its tree."""
    copied_from: "_Held | None"
    """The prefix that waits until this one, or the one that continues in its slot, is released."""
    slot: int | None = None
    """Its slot, once it is complete."""
    blocked: list[Prompt] = field(default_factory=list)
    """Prompts of requests that wait until it is complete."""
    next_prefixes: deque[Prompt] = field(default_factory=deque)
    """Prefixes that continue from it and have not begun."""
    num_users: int = 0
    """The number of prompts that have not copied it yet."""
    may_get_users: bool = True
    has_copy: bool = False
    """Whether a prefix that copied it is held."""


class HeldPrefixes:
    """The prefixes in slots.

    Args:
      slots: The decode slots.
      queue: Called with each prompt that may run.
    """

    def __init__(self, slots: DecodeSlots, queue: Callable[[Prompt], None]):
        self.max_slots = 0
        """The maximum number of slots that hold prefixes; requests must leave as many."""
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
                    break
                self._add_prefix(Prompt(request, 1, prefix=prefix, base=prefix.parent))
            self._held[prefix].may_get_users = True
            path.append(prefix)
        self._leave(path)
        return path[-1] if path else None

    def leave(self) -> bool:
        """Release the prefixes of the last request when they are not needed; return whether there
        were any."""
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

    def copy(self, prompt: Prompt) -> int:
        """Record that a prompt copies the prefix with which it begins; return the prefix's slot."""
        assert prompt.base is not None
        held = self._held[prompt.base]
        assert held.slot is not None
        slot = held.slot
        held.num_users -= 1
        self._settle(prompt.base)
        return slot

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
        prefix, base = prompt.prefix, prompt.base
        assert prefix is not None
        self._seen.add(prefix)
        if base is None:
            self._held[prefix] = _Held(prefix, prefix, None)
            self._tops.append(prompt)
            self._start_trees()
            return
        parent = self._held[base]
        prompt.length = base.length
        parent.num_users += 1
        parent.next_prefixes.append(prompt)
        copied_from = parent.copied_from if prefix.is_last else parent
        self._held[prefix] = _Held(prefix, parent.top, copied_from)
        self._settle(base)

    def _start_trees(self) -> None:
        while self._tops:
            top = self._tops[0].prefix
            assert top is not None
            if self._num_reserved + top.num_slots > self.max_slots:
                return
            self._num_reserved += top.num_slots
            self._queue(self._tops.popleft())

    def _settle(self, prefix: SharedPrefix) -> None:
        """Let prompts run for which a prefix is ready; release its slot if nothing needs it."""
        held = self._held[prefix]
        if held.slot is None:
            return
        blocked, held.blocked = held.blocked, []
        self.num_blocked -= len(blocked)
        for prompt in blocked:
            self._queue(prompt)
        if held.has_copy:
            return
        if held.next_prefixes:
            self._continue(prefix, held)
        elif not held.num_users and not held.may_get_users:
            del self._held[prefix]
            self._slots.release(held.slot)
            if held.copied_from is not None:
                held.copied_from.has_copy = False
                self._settle(held.copied_from.prefix)
            else:
                self._num_reserved -= held.top.num_slots
                self._start_trees()

    def _continue(self, prefix: SharedPrefix, held: _Held) -> None:
        """Let the next prefix begin: with a copy, or in the same slot if it is the last user."""
        prompt = min(held.next_prefixes, key=_is_last)
        assert held.slot is not None
        if not _is_last(prompt):
            held.has_copy = True
            held.next_prefixes.remove(prompt)
            self._queue(prompt)
        elif held.num_users == 1:
            del self._held[prefix]
            self._slots.resume(held.slot)
            prompt.slots = [held.slot]
            self._queue(prompt)


def _is_last(prompt: Prompt) -> bool:
    return prompt.prefix is not None and prompt.prefix.is_last
