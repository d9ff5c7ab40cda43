"""Measure the drops and the padding of expert capacities on random routing.

The table is by experts, tokens and skew. Each token takes k distinct experts with probabilities in
proportion to rank ** -s (Zipf; s = 0 is uniform), drawn again for every batch. Loads and tiles come
from the functions that the graphs use.

    python scripts/expert_capacity.py > table.md
"""

import sys

import jax.numpy as jnp
import numpy as np

from noria.modelzoo.moe.call import rows_of_tiles
from noria.modelzoo.moe.dispatch import load
from noria.modelzoo.moe_config import LOSSLESS, Dispatch
from noria.runtime.devices.machine import describe_machine

EXPERTS = ((8, 2), (64, 6), (128, 8), (256, 8))
TOKENS = (32, 512, 4096)
SKEWS = (0.0, 0.5, 1.0)
DISPATCHES = (*(Dispatch("capacity", factor) for factor in (1.0, 1.25, 2.0)), LOSSLESS)
NUM_DRAWS = 10


def main() -> None:
    machine = describe_machine()
    print(
        f"{machine['processor']}, jax {machine['versions']['jax']}. Made by `python {sys.argv[0]}`."
    )
    print(f"\nMeans of {NUM_DRAWS} batches: share of choices dropped / share of rows padded.")
    print("With a capacity, all of its rows count; for lossless, the rows of the tiles that run.\n")
    names = [f"{d.kind} {d.capacity_factor or ''}".strip() for d in DISPATCHES]
    print(f"| experts | tokens | skew | {' | '.join(names)} |")
    print(f"|---|--:|--:|{'--:|' * len(names)}")
    rng = np.random.default_rng(0)
    for num_experts, num_chosen in EXPERTS:
        for num_tokens in TOKENS:
            for skew in SKEWS:
                batches = [
                    random_choices(rng, num_tokens, num_experts, num_chosen, skew)
                    for _ in range(NUM_DRAWS)
                ]
                cells = [_cell(batches, num_experts, dispatch) for dispatch in DISPATCHES]
                name = f"{num_experts}, {num_chosen} chosen"
                print(f"| {name} | {num_tokens} | {skew:g} | {' | '.join(cells)} |", flush=True)


def random_choices(
    rng: np.random.Generator, num_tokens: int, num_experts: int, num_chosen: int, skew: float
) -> np.ndarray:
    """Draw distinct experts of each token: the largest of Gumbel-perturbed log-probabilities.

    Source: Kool et al. 2019, "Stochastic Beams and Where to Find Them", 1903.06059, section 3.
    """
    logits_E = -skew * np.log(np.arange(1, num_experts + 1))
    noisy_ME = logits_E + rng.gumbel(size=(num_tokens, num_experts))
    return np.argsort(-noisy_ME, axis=1)[:, :num_chosen].astype(np.int32)


def shares(expert_MZ: np.ndarray, num_experts: int, dispatch: Dispatch) -> tuple[float, float]:
    """Return the share of dropped choices, and the share of computed rows without a choice."""
    load_E = load(jnp.asarray(expert_MZ), num_experts)
    if dispatch.kind == "capacity":
        capacity = dispatch.capacity(*expert_MZ.shape, num_experts)
        load_E, num_rows = jnp.minimum(load_E, capacity), num_experts * capacity
    else:
        tile = dispatch.tile(expert_MZ.size, num_experts)
        num_rows = int(rows_of_tiles(load_E, tile).sum())
    num_placed = int(load_E.sum())
    return 1 - num_placed / expert_MZ.size, 1 - num_placed / num_rows


def _cell(batches: list[np.ndarray], num_experts: int, dispatch: Dispatch) -> str:
    means = np.mean([shares(batch, num_experts, dispatch) for batch in batches], axis=0)
    return " / ".join(f"{mean:.1%}" for mean in means)


if __name__ == "__main__":
    main()
