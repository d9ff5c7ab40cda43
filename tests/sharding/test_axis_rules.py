"""The mesh axes of a literal layout's axes, and the number of copies of key/value heads."""

from dataclasses import replace

import pytest
from jax.sharding import PartitionSpec as P
from laid_out import config_of, layout_of

from noria.compile.targets import find_target
from noria.modelzoo import axes
from noria.modelzoo.config import Arrangement, head_copies
from noria.sharding.axis_rules import AxisRules

RULES = AxisRules(
    {
        "batch": ("data",),
        "query_heads": ("sequence", "tensor"),
        "mlp": ("tensor",),
        "vocab": ("data", "tensor"),
    }
)


def test_an_axis_without_a_rule_is_whole_or_follows_another():
    assert RULES.spec((axes.EMBED, "", axes.MLP)) == P(None, None, "tensor")
    assert RULES[axes.ATTENTION_BATCH] == RULES[axes.RESIDUAL_BATCH] == ("data",)
    assert RULES.updated({"attention_batch": ("data", "tensor")})[axes.RESIDUAL_BATCH] == ("data",)


def test_rows_of_logits_leave_to_the_vocabulary_the_axes_that_it_takes():
    assert RULES.spec(axes.LOGITS) == P(None, ("data", "tensor"))
    whole = RULES.updated({"vocab": ("tensor",)})
    assert whole.spec(axes.LOGITS) == P("data", "tensor")


def test_the_hidden_size_of_experts_leaves_to_the_experts_the_axes_that_they_take():
    assert RULES[axes.EXPERT_MLP] == ("tensor",)
    shared = RULES.updated({"experts": ("tensor",), "mlp": ("sequence", "tensor")})
    assert shared.spec((axes.EXPERTS, axes.EXPERT_MLP)) == P("tensor", "sequence")


@pytest.mark.parametrize(
    ("attention_batch", "cache_heads", "head_batch"),
    [
        (("data",), ("sequence", "tensor"), ("data",)),
        (("data", "tensor"), ("sequence",), ("data",)),
        (("data", "sequence", "tensor"), (), ("data",)),
        (("data", "expert"), ("sequence", "tensor"), ("data", "expert")),
        (("data", "expert", "tensor"), ("sequence",), ("data", "expert")),
    ],
    ids=str,
)
def test_the_cache_has_the_heads_that_its_rows_leave(attention_batch, cache_heads, head_batch):
    """If rows use a mesh axis of heads, rows replace heads; on other axes queries follow rows."""
    rules = RULES.updated({"attention_batch": attention_batch})
    expected = P(None, attention_batch, cache_heads or None, None, None)
    assert rules.spec(axes.CACHE_HEADS) == expected
    assert rules.spec(axes.HEADS) == P(head_batch, None, ("sequence", "tensor"), None, None)


@pytest.mark.parametrize(
    ("num_heads", "num_shards", "copies"),
    [(8, 1, 1), (8, 8, 1), (8, 4, 1), (2, 8, 4), (1, 8, 8), (3, 6, 2), (4, 6, 3), (3, 2, 2)],
)
def test_a_head_is_kept_as_often_as_makes_the_heads_divide(num_heads, num_shards, copies):
    assert head_copies(num_heads, num_shards) == copies
    assert num_heads * copies % num_shards == 0


@pytest.mark.parametrize(
    ("layout", "num_kv_heads", "arrangement", "num_cache_heads"),
    [
        ("weight-stationary-1d", 8, Arrangement(8, 152), 8),
        ("v5e-host", 2, Arrangement(8, 152), 8),
        ("weight-stationary-1d-batch-attention", 2, Arrangement(8, 152), 2),
        ("gpu-host@data=2,tensor=3", 8, Arrangement(3, 153), 24),
        ("data-parallel", 1, Arrangement(), 1),
    ],
)
def test_weights_and_cache_are_arranged_as_a_layout_wants_them(
    layout, num_kv_heads, arrangement, num_cache_heads
):
    laid, config = layout_of(layout), config_of("llama", num_kv_heads)
    placement = find_target(f"cpu:{laid.mesh.num_devices}").placement(laid)
    wanted = replace(arrangement, packs_codes=False)
    assert placement.arrangement(config) == wanted
    copies = head_copies(num_kv_heads, placement.cache_head_shards)
    assert num_kv_heads * copies == num_cache_heads
