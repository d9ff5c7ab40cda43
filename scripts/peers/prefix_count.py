"""Count the prompt tokens that remain when common beginnings are computed once.

Needs only the standard library and imports nothing from noria, so that a mistake in noria's own
search shows as a difference.
"""

from collections.abc import Sequence
from typing import NamedTuple


class PrefixCount(NamedTuple):
    """The tokens of some prompts, and of their distinct pieces."""

    total: int
    distinct: int


def count_prefixes(prompts: Sequence[Sequence[int]], chunk: int) -> PrefixCount:
    """Count the tokens of prompts that are cut at multiples of `chunk`.

    Two pieces are the same if all ids up to their ends are the same. The piece with the last id of
    a prompt belongs to this prompt alone, because it makes the logits of the first generated id.
    """
    # a number stands for each prefix: the prefix before it and its last piece determine it
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    rest = 0
    for ids in prompts:
        end = max(0, len(ids) - 1) // chunk * chunk
        rest += len(ids) - end
        prefix = 0
        for start in range(0, end, chunk):
            piece = prefix, tuple(ids[start : start + chunk])
            prefix = numbers.setdefault(piece, len(numbers) + 1)
    return PrefixCount(sum(map(len, prompts)), len(numbers) * chunk + rest)
