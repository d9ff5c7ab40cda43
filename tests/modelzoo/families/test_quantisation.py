"""`quantization_config`: what is read of each method, and what is refused by name."""

import pytest
from published_formats import compressed

from noria.modelzoo.families.config_reader import ConfigReader, UnsupportedModel
from noria.modelzoo.families.quantisation import Awq, CompressedTensors, Gptq, read_quantisation

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 128, "actorder": "weight"}
PACKED = compressed("pack-quantized", **INT4)
GROUPS = PACKED["config_groups"]
DENSE = {"format": "dense", "global_sparsity": 0.12, "sparsity_structure": "2:4", "ignore": []}


def read(table):
    return read_quantisation(ConfigReader({"quantization_config": table}))


def changed(table, **weights):
    """Return the configuration with other options of its weights."""
    return compressed(table["format"], **INT4 | weights)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (GPTQ, Gptq(4, 128, True, True, 1)),
        (GPTQ | {"dynamic": {"-:.*down_proj": {}, "-:lm_head": {}}}, Gptq(4, 128, True, True, 1)),
        (GPTQ | {"dynamic": None, "zeta": None, "sym": None}, Gptq(4, 128, True, True, 1)),
        (GPTQ | {"group_size": -1, "checkpoint_format": "gptq_v2"}, Gptq(4, 0, True, True, 0)),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, Gptq(8, 32, True, False, 1)),
        (AWQ | {"modules_to_not_convert": ["lm_head"], "do_fuse": False}, Awq(128)),
        (AWQ | {"version": "GEMM"}, Awq(128)),
        (AWQ | {"zero_point": None, "zeta": None}, Awq(128)),
        (PACKED, CompressedTensors(4, False, True, True, (1, 128))),
        (PACKED | {"sparsity_config": DENSE}, CompressedTensors(4, False, True, True, (1, 128))),
        (PACKED | {"sparsity_config": {}}, CompressedTensors(4, False, True, True, (1, 128))),
        (
            changed(PACKED, zeta=None) | {"new_option": None, "transform_config": None},
            CompressedTensors(4, False, True, True, (1, 128)),
        ),
        ({"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": DENSE}, None),
        (changed(PACKED, symmetric=False), CompressedTensors(4, False, False, True, (1, 128))),
        (
            compressed("float-quantized", type="float", strategy="channel"),
            CompressedTensors(8, True, True, False, None),
        ),
        (
            PACKED | {"config_groups": {**GROUPS, "group_1": GROUPS["group_0"]}},
            CompressedTensors(4, False, True, True, (1, 128)),
        ),
    ],
)
def test_the_options_of_each_method_are_read(table, expected):
    assert read(table) == expected


OTHER_BITS = {"group_1": compressed("pack-quantized", num_bits=8)["config_groups"]["group_0"]}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method: .* got 'bitsandbytes'"),
        (GPTQ | {"bits": 3}, "bits: expected 4 or 8, .* got 3"),
        (GPTQ | {"group_size": 0}, "group_size: expected a size, or -1"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: .* got 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format: expected False"),
        (GPTQ | {"dynamic": {"lm_head": {}}}, "got quantization_config.dynamic.lm_head"),
        (
            GPTQ | {"dynamic": {"-:.*up_proj": {}, r"+:.*\.9\.": {"bits": 8}}},
            r"got quantization_config\.dynamic\.\+:.*\.9.* = \{'bits': 8\}\.",
        ),
        (GPTQ | {"zeta": 1}, "got quantization_config.zeta = 1"),
        (AWQ | {"bits": 8}, "bits: expected 4"),
        (AWQ | {"zero_point": False}, "zero_point: expected True"),
        (AWQ | {"version": "gemv"}, "version: expected gemm, .* got 'gemv'"),
        (PACKED | {"format": "nvfp4-pack-quantized"}, "format: .* got 'nvfp4-pack-quantized'"),
        (changed(PACKED, num_bits=3), "weights.num_bits: expected 8, or 4 for integers.* got 3"),
        (changed(PACKED, type="float"), "weights.num_bits: expected 8, or 4 .* got 4"),
        (changed(PACKED, num_bits=8, type="float"), "weights.type: expected int, .* got 'float'"),
        (changed(PACKED, strategy="tensor_group"), "weights.strategy: .* got 'tensor_group'"),
        (changed(PACKED, dynamic=True), "weights.dynamic: expected False"),
        (changed(PACKED, zeta=1), "weights.zeta = 1"),
        (
            PACKED | {"sparsity_config": DENSE | {"format": "sparse-24-bitmask"}},
            "sparsity_config.format: expected dense, .* got 'sparse-24-bitmask'",
        ),
        (PACKED | {"sparsity_config": {"targets": []}}, "sparsity_config.format: .* no such key"),
        (PACKED | {"format": "dense"}, "format: expected pack-quantized, .* got 'dense'"),
        (PACKED | {"config_groups": {}}, "config_groups: expected one format for all weights"),
        (
            PACKED | {"config_groups": GROUPS | OTHER_BITS},
            "config_groups: expected one format for all weights",
        ),
    ],
)
def test_an_option_that_would_change_weights_is_refused_by_name(table, message):
    with pytest.raises(UnsupportedModel, match=message):
        read(table)
