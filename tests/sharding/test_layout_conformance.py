"""Every family under every named layout gives the answer of one device.

The tests run prefill and decode in float32, with prompts shorter and longer than the windows. The
graphs' results have the layout's shardings.
"""

from functools import cache

import jax
import pytest
from laid_out import (
    FAMILIES,
    FAMILY_OF,
    LAYOUTS,
    MAPPED,
    Answers,
    config_of,
    expected,
    greedy_rows,
    grid_of,
    laid_out,
    layout_of,
)

from noria.compile.abstract_model import model_sizes
from noria.modelzoo import axes
from noria.modelzoo.families import registry
from noria.sharding.legality import check

KV_HEADS = (8, 2, 1)
OFTEN = {("v5e-host", 2), ("weight-stationary-1d-batch-attention", 2), ("v5p-slice", 1)}
"""Pairs of every run: copies of heads, copies sent in pieces, and both on two mesh axes."""
MET_BY_OTHERS = {
    "data-tensor-batch-attention",
    "expert-tensor",
    "ring-tensor",
    "v5e-host",
    "v5p-slice",
    "weight-gathered",
    "weight-stationary-1d",
    "weight-stationary-1d-batch-attention",
    "weight-stationary-2d",
}
"""Layouts that every run has with copies of heads alone, or in other tests that compare with one
device: of sampled tokens, of weights in codes, of scanned layers and of prefixes."""
_OF_MAPPED = "gpu-host"
"""The layout of families whose blocks have options of others: it splits heads over devices."""
OTHER_MESHES = (
    "gpu-host@data=2,tensor=3",
    "v5p-slice@tensor=2,data=4",
    "data-tensor-batch-attention@data=4,tensor=2",
    "weight-gathered@data=3,tensor=2",
    "data-parallel@data=6",
    "embed-parallel@tensor=4",
    "gpu-host@data=1,tensor=8",
    "sequence-parallel@tensor=2",
    "weight-gathered-all@data=4,tensor=2",
    "weight-stationary-2d@data=8,tensor=1",
)


def is_legal(layout: str, num_kv_heads: int) -> bool:
    parsed = layout_of(layout)
    config = config_of("llama", num_kv_heads)
    return not check(parsed, model_sizes(config, parsed.mesh.num_devices, grid_of(parsed)))


def pairs() -> list:
    """Return family, layout and KV heads; all are slow except one family a layout and a few more.

    Cases with fewer KV heads use the family whose norm spans all heads, copies included.
    """
    found = []
    for layout in LAYOUTS:
        often = None if layout in MET_BY_OTHERS else FAMILY_OF[layout]
        found += [(family, layout, 8, family == often) for family in FAMILIES]
        for num_kv_heads in KV_HEADS[1:]:
            if is_legal(layout, num_kv_heads):
                found.append(("olmo2", layout, num_kv_heads, (layout, num_kv_heads) in OFTEN))
    found += [(family, _OF_MAPPED, 8, False) for family in MAPPED]
    found += [("llama", layout, 8, layout == OTHER_MESHES[0]) for layout in OTHER_MESHES]
    return [
        pytest.param(
            tuple(pair),
            marks=[] if is_often else [pytest.mark.slow],
            id="-".join(map(str, pair)),
        )
        for *pair, is_often in found
    ]


@pytest.fixture(scope="module", params=pairs())
def pair(request: pytest.FixtureRequest) -> tuple[str, str, int]:
    """All tests of a pair run consecutively, as executables of all pairs are not kept."""
    return request.param


@cache
def answers(family: str, layout: str, num_kv_heads: int) -> Answers:
    return laid_out(family, layout, num_kv_heads).answer(greedy_rows())


def test_the_number_of_legal_pairs_is_known():
    """This test shows if a legality rule refuses more or less than before."""
    legal = {
        num_kv_heads: [layout for layout in LAYOUTS if is_legal(layout, num_kv_heads)]
        for num_kv_heads in KV_HEADS
    }
    assert {num_kv_heads: len(found) for num_kv_heads, found in legal.items()} == {
        8: 20,
        2: 12,
        1: 10,
    }
    assert all(is_legal(layout, 8) for layout in OTHER_MESHES)


def test_every_family_has_a_case():
    assert {*FAMILIES, *MAPPED} == {family.name for family in registry.FAMILIES}


def test_the_answer_is_that_of_one_device(pair):
    """Log-probabilities agree after the prompt and after twelve tokens; ids are equal."""
    family, _, num_kv_heads = pair
    expected(config_of(family, num_kv_heads)).assert_equals(answers(*pair), greedy_rows())


def test_what_the_graphs_give_back_lies_as_the_rules_say(pair):
    got, placement = answers(*pair), laid_out(*pair)

    def assert_lies(array: jax.Array, logical_axes: tuple[str, ...]) -> None:
        declared = placement.placement.sharding("decode", logical_axes)
        assert array.sharding.is_equivalent_to(declared, array.ndim), (array.sharding, declared)

    assert_lies(got.state.logits_BV, axes.LOGITS)
    for layer in got.state.cache:
        for name, array in layer.spec.arrays.items():
            assert_lies(layer.arrays[name], array.axes)
    for array in jax.tree.leaves(got.state.sampling):
        assert_lies(array, axes.LOGITS[:1])
