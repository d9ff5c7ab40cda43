"""The numbers that `multipleOf` of JSON Schema allows, as languages.

Does not know about schemas or tokens. Guarantees: every number is a multiple of the step in decimal
arithmetic, and also for a validator that divides it by the step in doubles.
"""

import math
from collections.abc import Collection
from decimal import Decimal

from ..byte_automaton import both, compile_language, multiples_of
from ..language import Alternatives, Compiled, Language, Literal
from .json_text import INTEGER, bounded_integer

MAX_MULTIPLES = 1_000
"""Maximum number of multiples that are listed, and maximum step of integers."""


def integer_multiples(step: int, least: int | None, most: int | None) -> Language:
    """The multiples of an integer between two bounds, both included; None for no bound.

    Raises:
      TooLarge: It would need too many states.
    """
    no_bounds = least is None and most is None
    integers = INTEGER if no_bounds else bounded_integer(least, most)
    return Compiled(both(compile_language(integers), multiples_of(step)))


def listed_multiples(
    step: Decimal,
    low: Decimal,
    high: Decimal,
    excluded: Collection[Decimal],
    *,
    only_integers: bool,
) -> Language | None:
    """The multiples from `low` to `high`, without those excluded; None if there are too many."""
    first, last = math.ceil(low / step), math.floor(high / step)
    if last - first >= MAX_MULTIPLES:
        return None
    values = [number * step for number in range(first, last + 1)]
    fitting = [
        value
        for value in values
        if (value % 1 == 0 or not only_integers)
        and value not in excluded
        and (float(value) / float(step)).is_integer()
    ]
    # without trailing zeros, which do not change a number
    texts = [f"{value.normalize():f}" for value in fitting]
    return Alternatives(tuple(map(Literal, texts)))
