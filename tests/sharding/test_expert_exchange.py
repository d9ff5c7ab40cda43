"""Sparse layers over a mesh equal one device, exchange tokens twice and never gather experts."""

import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from tolerances import BFLOAT16_ELEMENTWISE_RELATIVE, FLOAT32_ELEMENTWISE

from noria.compile.targets import find_target
from noria.modelzoo.moe.experts import ExpertWeights
from noria.modelzoo.moe.mix import Mixture, MoeOutput
from noria.modelzoo.moe.routing import Router
from noria.modelzoo.moe_config import LOSSLESS, Dispatch, Routing, Tiles
from noria.sharding.axis_rules import AxisRules
from noria.sharding.layout import Layout
from noria.sharding.sharded_operations import ShardedOperations

B, T, D, F, E = 8, 6, 16, 32, 16
ROUTING = Routing(num_experts=E, num_chosen=3)

LAYOUTS = {
    "experts over rows": ({"expert": 8}, {"batch": "expert", "experts": "expert"}),
    "experts over rows, hidden split": (
        {"data": 2, "expert": 2, "tensor": 2},
        {"batch": ["data", "expert"], "experts": "expert", "mlp": "tensor"},
    ),
    "experts over rows on two axes": (
        {"data": 2, "expert": 4},
        {"batch": ["data", "expert"], "experts": ["data", "expert"]},
    ),
    "experts over tokens of a row": (
        {"data": 4, "tensor": 2},
        {"batch": "data", "residual_length": "tensor", "experts": "tensor"},
    ),
    "experts over the same rows": (
        {"data": 2, "tensor": 4},
        {"batch": "data", "experts": "tensor", "mlp": "tensor"},
    ),
    "replicated experts, hidden split": (
        {"data": 2, "tensor": 4},
        {"batch": "data", "mlp": "tensor"},
    ),
    "a residual stream split along embed": (
        {"expert": 2, "tensor": 4},
        {"batch": "expert", "experts": "expert", "mlp": "tensor", "embed": "tensor"},
    ),
}
DISPATCHES = {
    "lossless": LOSSLESS,
    "ragged": Dispatch("ragged"),
    "capacity that holds all": Dispatch("capacity", float(E)),
}
EXCHANGING = [name for name in LAYOUTS if name.startswith("experts over") and "same" not in name]


def gated(gate, up):
    return jax.nn.silu(gate) * up


def layout_of(name: str) -> Layout:
    mesh, rules = LAYOUTS[name]
    return Layout.from_table({"name": name, "mesh": mesh, "rules": rules})


@cache
def arrays(dtype: str, has_bias: bool):
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    biases = (normal(E, 2, F), normal(E, D)) if has_bias else ()
    weights = ExpertWeights(normal(E, 2, D, F), normal(E, F, D), *biases)
    is_token_BT = jnp.arange(T)[None] < jnp.asarray(rng.integers(0, T + 1, B))[:, None]
    return normal(B, T, D), is_token_BT, Router(normal(D, E)), weights


@cache
def mixed_over(
    name: str, dispatch: Dispatch, dtype: str = "float32", has_bias: bool = False
) -> tuple[MoeOutput, str]:
    """Run a mixture under a layout; return its output and its program."""
    layout = layout_of(name)
    mesh = find_target("cpu:8").placement(layout).mesh
    rules: AxisRules = layout.rules
    operations = ShardedOperations(mesh, rules, rules)
    x_BTD, is_token_BT, router, weights = arrays(dtype, has_bias)
    placed = ExpertWeights._make(
        None if x is None else jax.device_put(x, NamedSharding(mesh, rules.spec(logical_axes)))
        for x, logical_axes in zip(weights, weights.axes, strict=True)
    )
    mixture = Mixture(ROUTING, dispatch, gated)

    def layer(x_BTD, is_token_BT, router, weights):
        return operations.mix_experts(mixture, x_BTD, is_token_BT, router, weights)

    compiled = jax.jit(layer).lower(x_BTD, is_token_BT, router, placed).compile()
    return compiled(x_BTD, is_token_BT, router, placed), compiled.as_text()


@cache
def mixed_on_one(dispatch: Dispatch, dtype: str = "float32", has_bias: bool = False) -> MoeOutput:
    return jax.jit(Mixture(ROUTING, dispatch, gated))(*arrays(dtype, has_bias))


def largest_error(got: jax.Array, expected: jax.Array) -> float:
    expected_32 = np.asarray(expected, np.float32)
    return float(
        np.abs(np.asarray(got, np.float32) - expected_32).max() / np.abs(expected_32).max()
    )


@pytest.mark.parametrize("kind", DISPATCHES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_mixture_over_a_mesh_equals_one_device(name, kind):
    dispatch = DISPATCHES[kind]
    got, _ = mixed_over(name, dispatch, has_bias=True)
    expected = mixed_on_one(dispatch, has_bias=True)
    assert largest_error(got.out_BTD, expected.out_BTD) <= FLOAT32_ELEMENTWISE
    assert not np.asarray(got.num_dropped_BT).any()
    np.testing.assert_array_equal(got.use.load_SE.sum(axis=0), expected.use.load_SE[0])


@pytest.mark.parametrize("name", EXCHANGING)
def test_short_dtypes_are_exchanged_too(name):
    got, _ = mixed_over(name, LOSSLESS, "bfloat16")
    expected = mixed_on_one(LOSSLESS, "bfloat16")
    assert largest_error(got.out_BTD, expected.out_BTD) <= BFLOAT16_ELEMENTWISE_RELATIVE


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_a_capacity_is_of_each_shard_of_the_tokens(factor):
    """Tokens compete only within their shard, as on a separate device."""
    dispatch = Dispatch("capacity", factor, Tiles(1, 1))
    got, _ = mixed_over("experts over rows", dispatch)
    x_BTD, is_token_BT, router, weights = arrays("float32", False)
    mixture = jax.jit(Mixture(ROUTING, dispatch, gated))
    dropped = 0
    for row in range(B):
        one = slice(row, row + 1)
        alone = mixture(x_BTD[one], is_token_BT[one], router, weights)
        np.testing.assert_array_equal(got.num_dropped_BT[one], alone.num_dropped_BT)
        np.testing.assert_array_equal(got.use.dropped_SE[row], alone.use.dropped_SE[0])
        assert largest_error(got.out_BTD[one], alone.out_BTD) <= FLOAT32_ELEMENTWISE or (
            not is_token_BT[row].any()
        )
        dropped += int(alone.num_dropped_BT.sum())
    assert dropped > 0


def collectives(program: str) -> dict[str, int]:
    kinds = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")
    counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", program)) for kind in kinds}
    return {kind: count for kind, count in counts.items() if count}


@pytest.mark.parametrize("dispatch", DISPATCHES.values(), ids=DISPATCHES.keys())
def test_a_layer_exchanges_tokens_twice_and_nothing_else(dispatch):
    _, program = mixed_over("experts over rows", dispatch)
    assert collectives(program) == {"all-to-all": 2}
    _, program = mixed_over("experts over rows, hidden split", dispatch)
    assert collectives(program) == {"all-to-all": 2, "all-reduce": 1}


def test_experts_that_see_all_tokens_exchange_none():
    _, program = mixed_over("experts over the same rows", LOSSLESS)
    assert collectives(program) == {"all-reduce": 1}


def test_rows_of_tiles_are_counted_where_they_are_computed():
    got, _ = mixed_over("experts over rows", replace(LOSSLESS, tiles=Tiles(4, 4)))
    load_E = np.asarray(got.use.load_SE).sum(axis=0)
    np.testing.assert_array_equal(got.use.rows_SE.sum(axis=0), -(-load_E // 4) * 4)
