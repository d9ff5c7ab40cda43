r"""The regular expressions that find answers in texts, with a bound on the time of a search.

Python's `re` tries all ways in which a pattern can match at a place before it goes to the next
place, and some short patterns have exponentially many ways. So a pattern is refused if it has more
than `MAX_WAYS` at one place, as counted from its parts, and a search reads only the last `MAX_TEXT`
characters of a text. A repeat without an upper bound counts as up to `MAX_TEXT` times; a possessive
repeat such as `\s*+` gives nothing back, so it counts as one way.

Does not know about samples or requests.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

# the parser that `re.compile` uses; the standard library has no public name for it
from re import _constants, _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

from ..errors import UserError

MAX_PATTERN = 500
"""Maximum length of a pattern in characters."""
MAX_TEXT = 1000
"""The number of characters at the end of a text that a search reads."""
MAX_WAYS = 5_000_000
"""Maximum number of ways in which a pattern can match at one place. Two unbounded repeats and a few
bounded ones stay below it."""

_TOO_MANY = 1e12
"""A bound of all counts, so that no product leaves the range of floats."""
_SINGLE = (
    _constants.LITERAL,
    _constants.NOT_LITERAL,
    _constants.ANY,
    _constants.IN,
    _constants.AT,
)
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)


@lru_cache(maxsize=256)
def compile_answer(pattern: str) -> re.Pattern[str]:
    """Compile the pattern of an answer.

    Raises:
      ValueError: The pattern cannot be compiled, or its search could take too long. The message
        says what was expected, what came, and the remedy.
    """
    if len(pattern) > MAX_PATTERN:
        raise UserError(
            f"expected a pattern of at most {MAX_PATTERN} characters, got {len(pattern)}."
        )
    try:
        compiled = re.compile(pattern)
        ways = _count_ways(_parser.parse(pattern))[1]
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(
            f"expected a regular expression of Python's re, got {pattern[:100]!r} ({error})."
        ) from None
    if compiled.groups > 1:
        raise UserError(
            f"expected a pattern with at most one group, got {compiled.groups} in "
            f"{pattern[:100]!r}. Write (?:...) for groups that are not the answer."
        )
    if ways > MAX_WAYS:
        raise UserError(
            f"expected a pattern with at most {MAX_WAYS} ways to match at one place, got more in "
            f"{pattern[:100]!r}, whose search could take too long. Bound its repeats as in "
            r"\d{1,9}, or let them give nothing back as in \s*+."
        )
    return compiled


def find_answer(pattern: re.Pattern[str], text: str) -> str | None:
    """The answer in a text: the group of the first match, or all of the match without a group.

    Only the last `MAX_TEXT` characters are read. An empty answer is none.
    """
    match = pattern.search(text[-MAX_TEXT:])
    return (match and match[pattern.groups]) or None


def _count_ways(items: Iterable[Any]) -> tuple[float, float]:
    """Count upper bounds for a sequence of parsed items at one place of a text.

    Returns:
      The number of ways in which all items match, and the number of ways that are tried in total.
    """
    ways = tried = 1.0
    for operation, argument in items:
        own_ways, own_tried = _ways_of_item(operation, argument)
        tried = min(tried + ways * own_tried, _TOO_MANY)
        ways = min(ways * own_ways, _TOO_MANY)
    return ways, tried


def _ways_of_item(operation: Any, argument: Any) -> tuple[float, float]:
    if operation in _SINGLE:
        return 1, 0
    if operation is _constants.SUBPATTERN:
        return _count_ways(argument[-1])
    if operation is _constants.ATOMIC_GROUP:
        return 1, _count_ways(argument)[1]
    if operation in (_constants.ASSERT, _constants.ASSERT_NOT):
        return 1, _count_ways(argument[1])[1]
    if operation is _constants.BRANCH:
        counts = [_count_ways(branch) for branch in argument[1]]
        return sum(ways for ways, _ in counts), sum(tried for _, tried in counts)
    if operation is _constants.POSSESSIVE_REPEAT:
        _, most, items = argument
        return 1, min(most, MAX_TEXT) * _count_ways(items)[1]
    if operation in _REPEATS:
        return _ways_of_repeat(*argument)
    raise re.error("references to groups are not supported here")


def _ways_of_repeat(least: int, most: int, items: Any) -> tuple[float, float]:
    """Count the ways of a repeat that may give back what it took."""
    least, most = min(least, MAX_TEXT), min(most, MAX_TEXT)
    once, tried = _count_ways(items)
    power, total = 1.0, 0.0
    for times in range(most + 1):
        if times >= least:
            total += power
        power = min(power * once, _TOO_MANY)
    return total, max(total, most) * tried
