"""Layers in groups of turns: every layer once, in order, as few definitions as there can be."""

import pytest

from noria.modelzoo.config import AS_PUBLISHED, Arrangement, DecoderConfig
from noria.modelzoo.layer_groups import block_layers, layer_groups, layers_name, single_layer_names
from noria.modelzoo.moe_config import MoeConfig, Routing

SCANNED = Arrangement(scan_layers=True)
KINDS = {
    "g": (None, False),
    "w": (5, False),
    "s": (None, True),
    "x": (5, True),
}
"""Kinds of layers: without and with a window, dense and sparse."""


def config_of(kinds: str) -> DecoderConfig:
    windows, is_sparse = zip(*map(KINDS.__getitem__, kinds), strict=True)
    return DecoderConfig.alike(
        vocab_size=11,
        embed=8,
        mlp=8,
        num_query_heads=2,
        num_kv_heads=2,
        head_dim=4,
        windows=windows,
        max_position=16,
        moe=MoeConfig(Routing(4, 2), 8),
        sparse=is_sparse,
    )


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        ("g", "0"),
        ("gggg", "0:4"),
        ("wgwgwgw", "0:6:2 1:6:2 6"),
        ("wwwwwg" * 4 + "ww", "0:24:6 1:24:6 2:24:6 3:24:6 4:24:6 5:24:6 24 25"),
        ("gggsssss", "0 1 2 3:8"),
        ("sgsgsg", "0:6:2 1:6:2"),
        ("gxsxsxs", "0 1:7:2 2:7:2"),
        ("gwsx", "0 1 2 3"),
    ],
)
def test_a_pattern_is_found_with_what_stands_before_and_after_it(kinds, names):
    found = block_layers(config_of(kinds), SCANNED)
    assert " ".join(map(layers_name, found)) == names


@pytest.mark.parametrize("kinds", ["gggg", "wgwgwgw", "gggsssss", "gwsx", "gxsxsxs"])
@pytest.mark.parametrize("arrangement", [AS_PUBLISHED, SCANNED], ids=str)
def test_turns_run_every_layer_once_and_in_order(kinds, arrangement):
    config = config_of(kinds)
    order = [
        layers[turn]
        for group in layer_groups(config, arrangement)
        for turn in range(len(group[0]))
        for layers in group
    ]
    assert order == list(range(len(kinds)))


@pytest.mark.parametrize("kinds", ["gggg", "wgwgwgw", "gggsssss"])
def test_a_place_has_layers_of_one_kind(kinds):
    config = config_of(kinds)
    for layers in block_layers(config, SCANNED):
        assert len({config.layers[layer] for layer in layers}) == 1


def test_unrolled_layers_are_places_of_their_own():
    assert list(map(layers_name, block_layers(config_of("ggg"), AS_PUBLISHED))) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("parameter", "layers"),
    [
        ("layers.3:61.mlp.down", range(3, 61)),
        ("layers.0:6:2.mlp.down", range(0, 6, 2)),
        ("layers.7.mlp.down", [7]),
    ],
)
def test_a_parameter_says_whose_layers_it_holds(parameter, layers):
    assert single_layer_names(parameter) == [f"layers.{layer}.mlp.down" for layer in layers]


def test_a_parameter_of_no_layer_holds_itself():
    assert single_layer_names("embedding.table") == ["embedding.table"]
