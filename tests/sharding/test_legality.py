"""Illegal layouts are refused before anything is lowered, each with a helpful message.

The tests compare whole texts: each message names axis, rule, number and remedy.
"""

import gc
import time
from dataclasses import replace
from typing import Any

import jax
import pytest
from alike import changed

from noria.compile.abstract_model import model_sizes
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.monitor import compile_monitor
from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.moe_config import MoeConfig, Routing
from noria.sharding.layout import Layout
from noria.sharding.legality import IllegalLayout, ModelSizes, check, require

CONFIG = DecoderConfig.alike(
    vocab_size=1001,
    embed=64,
    mlp=96,
    num_query_heads=16,
    num_kv_heads=4,
    head_dim=8,
    windows=(None, None),
    max_position=512,
)
GRID = BucketGrid(64, ((16, 16), (32, 8)), 16, page=16)
CHUNKED = BucketGrid(64, ((64, 16, 16),), 16, page=16)
MESH = {"data": 2, "tensor": 4}
RULES = {"batch": "data", "query_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
CUBE = {"data": 2, "tensor": 2, "sequence": 2}
IN_STRIPES = {
    "prefill": {"length": "sequence"},
    "decode": {"cache_length": "sequence"},
    "max_replicated": 1,
}
COPIES = (
    'Set kv_heads = "" to keep a copy of a head on every device whose queries read it, or shard '
    "attention over batch (attention_batch)."
)
RENAME = (
    "Rename it or leave it out; logical axes are batch, attention_batch, residual_batch, "
    "length, residual_length, cache_length, embed, embed_in, query_heads, kv_heads, mlp, vocab, "
    "experts."
)
RESIZE = "Change the size of a mesh axis, or the rule."


def layout(
    mesh: dict[str, Any] | None = None,
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    max_replicated: float = 0.05,
    **rules: Any,
) -> Layout:
    """Return a legal layout of two replicas of four devices, with these changes."""
    table: dict[str, Any] = {"name": "mine", "mesh": MESH if mesh is None else mesh}
    table |= {"rules": RULES | rules, "max_replicated": max_replicated}
    table |= {"prefill": {"rules": prefill or {}}, "decode": {"rules": decode or {}}}
    return Layout.from_table(table)


MOE = MoeConfig(Routing(6, 2), mlp=30, shared_mlp=34)


def sizes_of(grid: BucketGrid | None = GRID, **sizes: Any) -> ModelSizes:
    """Return the sizes of a model, with slots in as many groups as a layout needs."""
    return replace(model_sizes(changed(CONFIG, **sizes), 8, grid), slot_groups=None)


def findings(of: Layout, grid: BucketGrid | None = GRID, **sizes: int) -> list[str]:
    return check(of, sizes_of(grid, **sizes))


def test_the_layout_that_the_illegal_ones_change_is_legal():
    assert findings(layout()) == []


@pytest.mark.parametrize(
    ("illegal", "expected"),
    [
        (
            layout({"data": 2, "x": 4}, query_heads="x", mlp="x", vocab="x"),
            "[mesh] x: expected an axis of data, sequence, tensor, expert. Rename it.",
        ),
        (layout({"data": 0, "tensor": 4}), "[mesh] data: expected a positive integer, got 0."),
        (layout({"data": -2, "tensor": 4}), "[mesh] data: expected a positive integer, got -2."),
        (
            layout({"data": True, "tensor": 8}),
            "[mesh] data: expected a positive integer, got True.",
        ),
        (layout({"data": "2", "tensor": 4}), "[mesh] data: expected a positive integer, got '2'."),
        (
            layout({"data": 2, "tensor": 3}),
            "[mesh] data=2, tensor=3: the product of the sizes is 6, the number of the target's "
            "devices 8. Change a size, or the target.",
        ),
        (layout(quary_heads="tensor"), f"[rules] quary_heads: matches nothing. {RENAME}"),
        (
            layout(decode={"logit_batch": "data"}),
            f"[decode.rules] logit_batch: matches nothing. {RENAME}",
        ),
        (
            layout(prefill={"residual_length": "sequence"}),
            "[prefill.rules] residual_length = \"sequence\": the mesh has no axis 'sequence', only "
            "data, tensor. Add it to [mesh] or change the rule.",
        ),
        (
            layout(mlp=["tensor", "tensor"]),
            '[rules] mlp = ["tensor", "tensor"]: names a mesh axis twice. Name it once.',
        ),
    ],
)
def test_a_mesh_or_a_name_that_cannot_be_is_refused(illegal, expected):
    assert findings(illegal) == [expected]


@pytest.mark.parametrize(
    ("illegal", "expected"),
    [
        (
            layout(experts="tensor"),
            [
                'experts = "tensor": the number of experts is 6, which does not divide over 4 '
                f"devices. {RESIZE}",
                'mlp = "tensor": mlp of the shared expert is 34, which does not divide over 4 '
                f"devices. {RESIZE}",
            ],
        ),
        (
            layout(experts="data"),
            [
                'expert_mlp = "tensor": mlp of an expert is 30, which does not divide over 4 '
                f"devices. {RESIZE}",
                'mlp = "tensor": mlp of the shared expert is 34, which does not divide over 4 '
                f"devices. {RESIZE}",
            ],
        ),
        (
            layout(CUBE, mlp="", experts=["data", "tensor"], max_replicated=1),
            [
                'experts = ["data", "tensor"]: some of these mesh axes split tokens, but not '
                '"tensor". Name this axis in batch, too, or remove it.',
                'experts = ["data", "tensor"]: the number of experts is 6, which does not divide '
                f"over 4 devices. {RESIZE}",
            ],
        ),
        (
            layout(
                CUBE,
                batch="",
                residual_batch=["tensor", "data"],
                experts="data",
                max_replicated=1,
            ),
            [
                'experts = "data": tokens are gathered along "data" before experts see them, so '
                "the exchange would send copies. In the rules of residual_batch and "
                "residual_length, name it before the mesh axes of mlp.",
            ],
        ),
        (
            layout(CUBE, experts="data", decode={"experts": ""}, max_replicated=1),
            [
                'decode: experts = "": expected "data" as in [rules]: experts stay where they are '
                "stored. Leave this one out.",
            ],
        ),
    ],
    ids=["experts", "hidden size", "partly exchanged", "gathered", "moved"],
)
def test_experts_that_cannot_be_shared_out_are_refused(illegal, expected):
    assert check(illegal, sizes_of(moe=MOE)) == expected


@pytest.mark.parametrize(
    ("illegal", "expected"),
    [
        (
            layout(embed="data"),
            "mesh axis 'data' splits the residual stream twice, as residual_batch and as embed. "
            "Change one of the rules.",
        ),
        (
            layout(prefill={"residual_length": "data"}),
            "prefill: mesh axis 'data' splits the residual stream twice, as residual_batch and as "
            "residual_length. Change one of the rules.",
        ),
        (
            layout(prefill={"batch": ["data", "tensor"], "query_heads": ""}, max_replicated=1),
            "prefill: mesh axis 'tensor' splits the MLP's activations twice, as batch and as mlp. "
            "Change one of the rules.",
        ),
        (
            layout(embed_in="tensor", mlp=""),
            "mesh axis 'tensor' splits a weight (embed_in, query_heads) twice, as embed_in and as "
            "query_heads. Change one of the rules.",
        ),
        (
            layout(decode={"attention_batch": "tensor"}),
            'decode: attention_batch = "tensor": expected to begin with the mesh axes of batch, '
            '"data": rows are split further, not differently. Name these axes first.',
        ),
        (
            layout(decode={"residual_batch": ["tensor", "data"]}),
            'decode: residual_batch = ["tensor", "data"]: expected to begin with the mesh axes of '
            'batch, "data": rows are split further, not differently. Name these axes first.',
        ),
        (
            layout(
                CUBE,
                prefill={"length": "sequence", "residual_length": "tensor"},
                max_replicated=1,
            ),
            'prefill: residual_length = "tensor": expected to begin with the mesh axes of length, '
            '"sequence": tokens are split further, not differently. Name these axes first.',
        ),
        (
            layout(
                prefill={"batch": "", "query_heads": "", "mlp": "", "length": ["tensor", "data"]},
                max_replicated=1,
            ),
            'prefill: length = ["tensor", "data"]: expected the order of [mesh], ["data", '
            '"tensor"]: keys and values go around the ring in that order. Name them so.',
        ),
        (
            layout(decode={"cache_length": "tensor"}),
            "decode: mesh axis 'tensor' splits the cache twice, as kv_heads and as cache_length. "
            "Change one of the rules.",
        ),
        (
            layout(prefill={"length": "tensor", "mlp": "", "vocab": ""}),
            "prefill: mesh axis 'tensor' splits queries twice, as length and as query_heads. "
            "Change one of the rules.",
        ),
        (
            layout(CUBE, prefill={"cache_length": "sequence"}, max_replicated=1),
            "[prefill.rules] cache_length: matches nothing, as prefill has no cache. Put it under "
            "[decode.rules].",
        ),
        (
            layout(
                CUBE,
                query_heads=["tensor", "sequence"],
                mlp=["tensor", "sequence"],
                vocab=["tensor", "sequence"],
                decode={"attention_batch": ["data", "tensor"]},
            ),
            'decode: attention_batch = ["data", "tensor"]: from the first mesh axis of query_heads '
            'on, here "tensor", it must name the last ones of query_heads (["tensor", '
            '"sequence"]), in that order.',
        ),
        (
            layout(CUBE, mlp="tensor", decode={"mlp": "sequence"}, max_replicated=1),
            'decode: mlp = "sequence": expected the mesh axes of [rules], "tensor", or the first '
            "of them: a phase may gather weights, not split them differently. Change the rule of "
            "[rules], or leave this one out.",
        ),
        (
            layout(kv_heads="data"),
            'kv_heads = "data": expected "tensor", the mesh axes of query_heads that '
            'attention_batch leaves, or "" for copies. Leave the rule out.',
        ),
        (
            layout(mlp=""),
            "mesh axis 'tensor': 18% of the weights lie whole on each of its 4 devices, the "
            "largest of them layers.0.mlp.gate_up; max_replicated is 0.05. Add a rule that "
            "splits them, or raise max_replicated.",
        ),
    ],
)
def test_rules_that_contradict_each_other_or_the_weights_are_refused(illegal, expected):
    assert findings(illegal) == [expected]


@pytest.mark.parametrize(
    ("illegal", "sizes", "expected"),
    [
        (
            layout(kv_heads=""),
            {"num_query_heads": 6, "num_kv_heads": 2},
            'query_heads = "tensor": the number of query heads is 6, which does not divide over 4 '
            f"devices. {RESIZE}",
        ),
        (
            layout(prefill={"query_heads": ""}, decode={"query_heads": ""}),
            {"num_query_heads": 6, "num_kv_heads": 2},
            'query_heads = "tensor": the number of query heads is 6, which does not divide over 4 '
            f"devices. {RESIZE}",
        ),
        (
            layout(),
            {"mlp": 90},
            f'mlp = "tensor": mlp is 90, which does not divide over 4 devices. {RESIZE}',
        ),
        (
            layout(embed="tensor"),
            {"embed": 62},
            f'embed = "tensor": embed is 62, which does not divide over 4 devices. {RESIZE}',
        ),
        (
            layout(embed_in="data"),
            {"embed": 63},
            f'embed_in = "data": embed is 63, which does not divide over 2 devices. {RESIZE}',
        ),
        (
            layout(),
            {"num_kv_heads": 2},
            f'kv_heads: 2 heads do not divide over 4 devices ("tensor"). {COPIES}',
        ),
        (
            layout(),
            {"num_kv_heads": 1},
            f'kv_heads: 1 head does not divide over 4 devices ("tensor"). {COPIES}',
        ),
        (
            layout(prefill={"query_heads": ""}),
            {"num_kv_heads": 2},
            f'decode: kv_heads: 2 heads do not divide over 4 devices ("tensor"). {COPIES}',
        ),
        (
            layout(decode={"attention_batch": ["data", "tensor"]}, prefill={"kv_heads": ""}),
            {"num_kv_heads": 1, "head_dim": 6},
            "decode: attention_batch: head_dim 6 does not divide over the 4 devices that hold one "
            'KV head. Use fewer devices along "tensor".',
        ),
    ],
)
def test_sizes_of_the_model_that_do_not_divide_are_refused(illegal, sizes, expected):
    assert findings(illegal, **sizes) == [expected]


@pytest.mark.parametrize(
    ("illegal", "grid", "expected"),
    [
        (
            layout(),
            BucketGrid(64, ((16, 8), (32, 3)), 16),
            'prefill: batch = "data": a graph\'s batch is 3, which does not divide over 2 devices. '
            "Plan batches that do, or change the rule.",
        ),
        (
            layout(decode={"attention_batch": ["data", "tensor"]}),
            BucketGrid(64, ((16, 8),), 12),
            'decode: attention_batch = ["data", "tensor"]: a graph\'s batch is 12, which does not '
            "divide over 8 devices. Plan batches that do, or change the rule.",
        ),
        (
            layout(prefill={"residual_length": "tensor"}),
            BucketGrid(64, ((18, 8),), 16),
            'prefill: residual_length = "tensor": a row\'s length is 18, which does not divide '
            "over 4 devices. Plan lengths that do, or change the rule.",
        ),
        (
            layout(decode={"residual_length": "tensor"}),
            None,
            'decode: residual_length = "tensor": a row\'s length is 1, which does not divide over '
            "4 devices. Put the rule under [prefill.rules]: decode has one token a row.",
        ),
        (
            layout(CUBE, length="sequence", max_replicated=1),
            None,
            'decode: length = "sequence": a row\'s length is 1, which does not divide over 2 '
            "devices. Put the rule under [prefill.rules]: decode has one token a row.",
        ),
        (
            layout(CUBE, prefill={"length": "sequence"}, max_replicated=1),
            BucketGrid(64, ((17, 8),), 16),
            'prefill: length = "sequence": a row\'s length is 17, which does not divide over 2 '
            "devices. Plan lengths that do, or change the rule.",
        ),
        (
            layout(CUBE, **IN_STRIPES),
            BucketGrid(60, ((60, 8, 15),), 16),
            'prefill: length = "sequence": buckets.chunk is 15, which does not divide over 2 '
            "devices. Plan one that does, or change the rule.\n"
            'cache_length = "sequence": buckets.chunk is 15, which does not divide over 2 devices. '
            "Plan a chunk that does, or change the rule.",
        ),
    ],
)
def test_shapes_of_the_graphs_that_do_not_divide_are_refused(illegal, grid, expected):
    assert "\n".join(findings(illegal, grid)) == expected


def test_chunks_are_legal_where_tokens_and_entries_are_split_alike():
    assert findings(layout(CUBE, **IN_STRIPES), CHUNKED) == []


def test_all_that_is_wrong_with_a_layout_is_said_at_once():
    illegal = layout(
        embed="data",
        kv_heads="data",
        decode={"attention_batch": "tensor"},
        vocab="",
        embed_in="data",
    )
    with pytest.raises(IllegalLayout) as refused:
        require(illegal, sizes_of(mlp=90))
    assert [finding.partition(":")[0] for finding in refused.value.findings] == [
        "mesh axis 'data' splits the residual stream twice, as residual_batch and as embed. Change "
        "one of the rules.",
        'prefill',
        'decode',
        'decode',
        'mlp = "tensor"',
        "mesh axis 'tensor'",
    ]  # fmt: skip
    lines = str(refused.value).splitlines()
    assert lines[0] == "layout 'mine' (data=2, tensor=4) is illegal:"
    assert [line.removeprefix("  ") for line in lines[1:]] == list(refused.value.findings)


@pytest.fixture
def no_garbage_collector():
    """A collection of the garbage of all earlier tests would take seconds."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collector")
def test_a_layout_is_refused_quickly_and_without_a_compile(monkeypatch):
    """As many layers as the embedded model has."""
    started = compile_monitor().num_compiles
    monkeypatch.setattr(jax.stages.Traced, "lower", None)
    before = time.monotonic()
    sizes = sizes_of(windows=(None,) * 30)
    with pytest.raises(IllegalLayout):
        require(layout(embed="data"), sizes)
    assert time.monotonic() - before < 2.0
    assert compile_monitor().num_compiles == started


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"meshes": 1},
            "mine.toml: expected the keys ['decode', 'max_replicated', 'mesh', 'name', 'prefill', "
            "'rules'], got ['meshes'] too.",
        ),
        ({"mesh": None}, "mine.toml: expected a table [mesh] of axis sizes, got None."),
        ({"mesh": {}}, "mine.toml: expected a table [mesh] of axis sizes, got {}."),
        ({"rules": ["mlp"]}, "mine.toml [rules]: expected a table of rules, got ['mlp']."),
        (
            {"rules": {"mlp": 4}},
            'mine.toml [rules] mlp: expected a mesh axis, a list of them, or "" for replicated, '
            "got 4.",
        ),
        (
            {"decode": {"rules": {"mlp": ["tensor", ""]}}},
            'mine.toml [decode.rules] mlp: expected a mesh axis, a list of them, or "" for '
            "replicated, got ['tensor', ''].",
        ),
        (
            {"prefill": {"batch": "data"}},
            "mine.toml: expected [prefill.rules] and nothing else, got {'batch': 'data'}.",
        ),
        (
            {"max_replicated": 1.5},
            "mine.toml max_replicated: expected a share of 0 to 1, got 1.5.",
        ),
        (
            {"max_replicated": True},
            "mine.toml max_replicated: expected a share of 0 to 1, got True.",
        ),
    ],
)
def test_a_table_of_another_form_is_refused(changes, expected):
    with pytest.raises(ValueError) as refused:
        Layout.from_table({"mesh": MESH, "rules": RULES, **changes}, "mine.toml")
    assert str(refused.value) == expected


PAGED = replace(GRID, pages=40)
LINE = {"data": 1, "tensor": 1, "sequence": 8}
ENTRIES = {"batch": "", "decode": {"cache_length": "sequence"}, "max_replicated": 1}


@pytest.mark.parametrize(
    ("illegal", "changes", "expected"),
    [
        (
            layout(),
            {},
            'decode: attention_batch = "data": expected buckets.slot_groups to be the pieces that '
            "it splits slots into, 2, got 1. Change slot_groups, or the rule.",
        ),
        (
            layout(LINE, **ENTRIES),
            {"page": 4},
            'decode: cache_length = "sequence": buckets.page is 4, which does not divide over 8 '
            "devices. Plan a page that does, or change the rule.",
        ),
        (
            layout(LINE, **ENTRIES),
            {"prefill": ((64, 16, 4),)},
            'cache_length = "sequence": buckets.chunk is 4, which does not divide over 8 '
            "devices. Plan a chunk that does, or change the rule.",
        ),
    ],
)
def test_pages_and_pieces_of_prompts_divide_over_devices(illegal, changes, expected):
    found = check(illegal, model_sizes(CONFIG, 8, replace(PAGED, **changes)))
    assert expected in found, found


@pytest.mark.parametrize(
    ("legal", "changes"),
    [
        (layout({"data": 1, "tensor": 8}, kv_heads=""), {}),
        (layout(), {"slot_groups": 2}),
        (layout(CUBE, **ENTRIES), {"prefill": ((64, 16, 8),)}),
    ],
)
def test_heads_rows_and_entries_may_be_split_with_pages(legal, changes):
    assert check(legal, model_sizes(CONFIG, 8, replace(PAGED, **changes))) == []
