"""An error of XLA is reported as an option's error only if it is about the option."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import pytest
from tiny import TWO_LAYERS

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import plan_graphs
from noria.compile.compiler_options import (
    GPU_OPTIONS_FOR_CODED_CACHES,
    GPU_OPTIONS_FOR_GROUPS,
    PLATFORM_OPTIONS,
    read_options,
    with_defaults,
)
from noria.compile.graph_failures import CompilerOptionRefused, naming_option
from noria.compile.graphs.graph_kinds import GraphKey
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.targets import find_target
from noria.compile.weight_rules import WeightRules
from noria.modelzoo.pooling_config import Pooling


def test_the_option_with_the_longest_name_is_named():
    with (
        pytest.raises(CompilerOptionRefused, match=r"plan compiler\.decode\.xla_a_b: .* got 2"),
        naming_option(GraphKey("decode"), {"xla_a": 1, "xla_a_b": 2}),
    ):
        raise RuntimeError("INVALID_ARGUMENT: No such compile option: 'xla_a_b'")


@pytest.mark.parametrize("problem", ["other", "RESOURCE_EXHAUSTED: raise xla_a"])
def test_other_errors_stay_as_they_are(problem):
    with (
        pytest.raises(RuntimeError, match=problem) as caught,
        naming_option(GraphKey("decode"), {"xla_a": 1}),
    ):
        raise RuntimeError(problem)
    assert not isinstance(caught.value, CompilerOptionRefused)


def test_any_integer_is_a_value():
    table = {"decode": {"xla_a": 10**400}}
    assert read_options(table) == table


def test_a_platform_has_defaults_that_a_plan_overrides_one_by_one():
    ((name, default),) = PLATFORM_OPTIONS["tpu"]["decode"].items()
    complete = partial(with_defaults, is_float32=False)
    assert complete({}, "tpu") == PLATFORM_OPTIONS["tpu"]
    given = {"prefill": {"xla_a": 1}, "decode": {"xla_a": 2}}
    assert complete(given, "tpu") == {**given, "decode": {"xla_a": 2, name: default}}
    own = {"decode": {name: 0.5}}
    assert complete(own, "tpu") == own
    assert complete(given, "gpu") == given


def test_gpus_have_defaults_for_formats():
    complete = partial(with_defaults, {"decode": {"xla_a": 1}}, "gpu", is_float32=False)
    found = complete(has_groups=True, has_coded_cache=True)
    both = {**GPU_OPTIONS_FOR_GROUPS, **GPU_OPTIONS_FOR_CODED_CACHES}
    assert set(found) == {"prefill", "score", "embed", "decode"}
    assert found["prefill"] == both
    assert found["decode"] == {**both, "xla_a": 1}
    assert complete(has_groups=True)["score"] == GPU_OPTIONS_FOR_GROUPS
    assert complete(has_coded_cache=True)["score"] == GPU_OPTIONS_FOR_CODED_CACHES


@pytest.mark.parametrize(
    ("dtype", "rules", "has_option"),
    [
        ("float32", WeightRules(), True),
        ("bfloat16", WeightRules(), False),
        ("float32", WeightRules(rounds_activations=True), False),
    ],
)
def test_products_of_embeddings_in_float32_have_their_own_library_on_a_cpu(
    dtype, rules, has_option
):
    config = replace(TWO_LAYERS, has_head=False, pooling=Pooling("last", normalises=True))
    model, grid = (
        AbstractModel(config, weight_rules=rules),
        BucketGrid(24, ((24, 2),), 0, embed=True),
    )
    graphs = plan_graphs(model, grid, find_target("cpu").placement(), jnp.dtype(dtype))
    expected = PLATFORM_OPTIONS["cpu"]["embed"] if has_option else {}
    assert [graph.options for graph in graphs if graph.key.kind == "embed"] == [expected]
