"""Every layout that passes the checks gives the answer of one device.

The test draws random rules on random meshes of eight devices, and compiles and runs layouts without
findings. A failure means a missing finding or a wrong operation.
"""

import random
from collections.abc import Iterator, Mapping
from itertools import islice

import pytest
from laid_out import LaidOut, config_of, expected, greedy_rows, grid_of

from noria.compile.abstract_model import model_sizes
from noria.modelzoo.axes import WEIGHT_AXES
from noria.sharding.layout import PHASES, Layout
from noria.sharding.legality import check

MESHES = (
    {"data": 2, "sequence": 2, "tensor": 2},
    {"data": 2, "tensor": 4},
    {"tensor": 2, "data": 4},
)
NUM_LAYOUTS = 12


def random_axes(rng: random.Random, mesh: Mapping[str, int], chance: float = 0.4) -> list[str]:
    """Draw some mesh axes in any order."""
    return rng.sample(chosen := [axis for axis in mesh if rng.random() < chance], len(chosen))


def random_beginning(rng: random.Random, mesh_axes: list[str]) -> list[str]:
    return mesh_axes[: rng.randrange(len(mesh_axes) + 1)]


def random_layouts(seed: int) -> Iterator[Layout]:
    """Yield layouts with random rules, many of which pass the checks."""
    rng = random.Random(seed)
    while True:
        mesh = rng.choice(MESHES)
        rules = {axis: random_axes(rng, mesh) for axis in WEIGHT_AXES}
        rules |= {"kv_heads": []} if rng.random() < 0.7 else {}
        rules |= {"batch": random_axes(rng, mesh)} if rng.random() < 0.4 else {}
        table = {"mesh": mesh, "rules": written(rules), "max_replicated": 1}
        for phase in PHASES:
            table[phase] = {"rules": written(phase_rules(rng, mesh, rules, phase))}
        yield Layout.from_table(table, f"seed {seed}")


def phase_rules(
    rng: random.Random, mesh: Mapping[str, int], rules: dict[str, list[str]], phase: str
) -> dict[str, list[str]]:
    own = {axis: random_beginning(rng, rules[axis]) for axis in WEIGHT_AXES if rng.random() < 0.25}
    if rng.random() < 0.4:
        own["batch"] = random_axes(rng, mesh)
    batch = own.get("batch", rules.get("batch", []))
    others = [axis for axis in mesh if axis not in batch]
    for axis in ("attention_batch", "residual_batch"):
        if rng.random() < 0.4:
            own[axis] = [*batch, *random_beginning(rng, rng.sample(others, len(others)))]
    if rng.random() < 0.4 and phase == "prefill":
        own["length"] = random_axes(rng, mesh)
    if rng.random() < 0.3 and phase == "prefill":
        own["residual_length"] = [*own.get("length", []), *random_axes(rng, mesh)]
    if rng.random() < 0.4 and phase == "decode":
        own["cache_length"] = random_axes(rng, mesh)
    if rng.random() < 0.4:
        own["embed"] = random_axes(rng, mesh)
    return own


def written(rules: dict[str, list[str]]) -> dict[str, list[str] | str]:
    return {axis: mesh_axes or "" for axis, mesh_axes in rules.items()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("family", "num_kv_heads"), [("llama", 8), ("qwen3", 2), ("mistral", 1)], ids=str
)
def test_every_legal_layout_gives_the_answer_of_one_device(family, num_kv_heads, seed):
    config, rows = config_of(family, num_kv_heads), greedy_rows()
    legal = (
        layout
        for layout in random_layouts(seed)
        if not check(layout, model_sizes(config, 8, grid_of(layout)))
    )
    for layout in islice(legal, NUM_LAYOUTS):
        print(layout.to_table())
        expected(config).assert_equals(LaidOut(config, layout).answer(rows), rows)
