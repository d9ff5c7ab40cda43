"""Random prompts that begin with parts of each other, and what the search finds in them."""

from array import array
from collections.abc import Sequence

import numpy as np

from noria.compile.grids.prefix_grid import begin_hash
from noria.compile.grids.prefix_table import PrefixTable
from noria.runtime.rows.prefix_index import UNIT, PrefixIndex


def related_prompts(seed: int) -> list[list[int]]:
    """Return prompts of few ids, most of which begin with a part of an earlier prompt."""
    rng, prompts = np.random.default_rng(seed), []
    for _ in range(rng.integers(2, 25)):
        start = []
        if prompts and rng.random() < 0.8:
            start = prompts[rng.integers(len(prompts))]
            start = start[: rng.choice([len(start), len(start) // UNIT * UNIT, rng.integers(200)])]
        prompts.append((start + rng.integers(0, 9, rng.integers(1, 70)).tolist())[:200])
    return prompts


def hash_tokens(token_ids: Sequence[int], adapter: str | None = None) -> str:
    """Return the hash by which a plan names a prefix, in 16 hexadecimal digits."""
    state = begin_hash(adapter)
    state.update(array("I", token_ids).tobytes())
    return state.hexdigest()


def num_equal(a: list[int], b: list[int]) -> int:
    """Return the number of tokens at the start that two prompts share."""
    unequal = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(unequal, min(len(a), len(b)))


def table_of(prompts: list[list[int]], max_hashes: int = 10**6) -> tuple[PrefixTable, int]:
    index = PrefixIndex(max_hashes)
    for row, prompt in enumerate(prompts):
        index.add(row, prompt)
    return index.table(), index._unit
