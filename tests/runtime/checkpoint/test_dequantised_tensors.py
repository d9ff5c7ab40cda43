"""Quantised checkpoints: codes and scales in the file are read as plain tensors."""

import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import save_file
from tiny_llama import CONFIG, random_tensors, save

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.families.mapping import ParameterSource, TensorPart
from noria.modelzoo.families.quantisation import BlockFloat8, Mxfp4
from noria.runtime.checkpoint import load_params, loader, open_model
from noria.runtime.checkpoint.description import describe
from noria.runtime.checkpoint.formats.dequantised_tensors import dequantise
from noria.runtime.checkpoint.formats.safetensors import SafetensorsDirectory
from noria.runtime.checkpoint.loader import read_parameter
from noria.runtime.errors import CheckpointMismatch, InvalidQuantisation

BLOCK = 128
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
# No size is a multiple of a block, and a shard of half an axis ends inside one
LLAMA = CONFIG | {"hidden_size": 200, "intermediate_size": 300}
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def quantised(name, values):
    """Return a matrix's codes and scales in DeepSeek's form; the largest code of a block is 448."""
    rows, columns = values.shape
    scales = np.empty((-(-rows // BLOCK), -(-columns // BLOCK)), np.float32)
    codes = np.empty(values.shape, ml_dtypes.float8_e4m3fn)
    for block in np.ndindex(*scales.shape):
        box = tuple(slice(i * BLOCK, (i + 1) * BLOCK) for i in block)
        scales[block] = np.abs(values[box]).max() / 448
        codes[box] = (values[box] / scales[block]).astype(codes.dtype)
    return {name: codes, f"{name}_scale_inv": scales}


def plain(codes, scales):
    """Return the numbers, from scales that are repeated over their blocks."""
    widened = scales.repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)
    return codes.astype(np.float32) * widened[: codes.shape[0], : codes.shape[1]]


def float8_and_plain_llama():
    """Return one model in two forms: with quantised projections, and with plain numbers."""
    stored, expected = {}, {}
    for name, values in random_tensors(LLAMA).items():
        if name.endswith("_proj.weight"):
            stored |= quantised(name, values)
            expected[name] = plain(stored[name], stored[f"{name}_scale_inv"])
        else:
            stored[name] = expected[name] = values
    return stored, expected


def experts():
    """Return MXFP4 in GPT-OSS's form: three experts of 64 inputs and 10 outputs."""
    rng = np.random.default_rng(0)
    return {
        f"{EXPERTS}_blocks": rng.integers(0, 256, (3, 10, 2, 16), np.uint8),
        f"{EXPERTS}_scales": rng.integers(120, 130, (3, 10, 2), np.uint8),
        f"{EXPERTS}_bias": np.ones((3, 10), ml_dtypes.bfloat16),
    }


def opened(path, tensors, quantisation):
    save_file(tensors, path / "model.safetensors")
    return dequantise(SafetensorsDirectory(path), quantisation)


class Noted:
    """A tensor source that records the boxes read from another source."""

    def __init__(self, source):
        self.source, self.tensors, self.reads = source, source.tensors, []

    def read(self, name, index=None):
        self.reads.append((name, index))
        return self.source.read(name, index)


SPECS = {
    "qkv": PartitionSpec(None, "tensor"),
    "output": PartitionSpec("tensor"),
    "gate_up": PartitionSpec(None, None, "tensor"),
    "down": PartitionSpec("tensor", "data"),
}


def load(path, *, split):
    with open_model(path) as model:
        abstract = AbstractModel(model.spec.config).abstract_parameters(jnp.float32)
        mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
        shardings = {
            name: NamedSharding(mesh, SPECS.get(name.split(".")[-1], PartitionSpec()))
            if split
            else SingleDeviceSharding(jax.devices()[0])
            for name in abstract
        }
        return load_params(model.spec, model.tensors, abstract, shardings)


@pytest.mark.parametrize("split", [False, True], ids=["one device", "mesh"])
def test_a_float8_model_loads_as_the_same_numbers_written_out(tmp_path, split):
    stored, expected = float8_and_plain_llama()
    save(tmp_path / "float8", LLAMA | {"quantization_config": FP8}, stored)
    save(tmp_path / "plain", LLAMA, expected)
    params = load(tmp_path / "float8", split=split)
    for name, value in load(tmp_path / "plain", split=split).items():
        np.testing.assert_array_equal(params[name], value)


def test_a_model_that_says_float8_may_hold_plain_tensors_alone(tmp_path):
    _, expected = float8_and_plain_llama()
    path = save(tmp_path / "m", LLAMA | {"quantization_config": FP8}, expected)
    table = load(path, split=False)["embedding.table"]
    np.testing.assert_array_equal(table, expected["model.embed_tokens.weight"])


def test_float8_tensors_of_a_model_that_does_not_say_so_are_refused(tmp_path):
    stored, _ = float8_and_plain_llama()
    with pytest.raises(CheckpointMismatch) as caught:
        load(save(tmp_path / "m", LLAMA, stored), split=False)
    name = "model.layers.0.mlp.down_proj.weight"
    assert f"{name}: expected floating numbers, got F8_E4M3" in str(caught.value)
    assert f"no parameter uses (7):\n    {name}_scale_inv" in str(caught.value)


def test_experts_stand_under_their_plain_name_and_in_transformers_axes(tmp_path):
    source = opened(tmp_path, experts(), Mxfp4())
    assert source.tensors.keys() == {EXPERTS, f"{EXPERTS}_bias"}
    info = source.tensors[EXPERTS]
    assert (info.shape, info.dtype, info.stored_as) == ((3, 64, 10), np.float32, "MXFP4")
    assert info.num_bytes == 3 * 10 * 2 * (16 + 1)
    assert source.tensors[f"{EXPERTS}_bias"].stored_as == "BF16"
    assert source.read(EXPERTS).shape == (3, 64, 10)
    np.testing.assert_array_equal(source.read(f"{EXPERTS}_bias"), np.ones((3, 10)))


def test_a_parameter_is_filled_from_experts_by_an_axis_pattern(tmp_path):
    source = opened(tmp_path, experts(), Mxfp4())
    whole = source.read(EXPERTS).reshape(3, 64, 5, 2).transpose(0, 3, 1, 2)
    part = TensorPart(EXPERTS, "e d (f two) -> e two d f", (("two", 2),))
    parameter = ParameterSource("gate_up", (part,))
    for index in [(slice(None),) * 4, (slice(1, 3), slice(0, 1), slice(10, 50), slice(2, 4))]:
        got = read_parameter(parameter, source, index, whole.shape, np.float32)
        np.testing.assert_array_equal(got, whole[index])


GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {"rope_type": "default"},
    "tie_word_embeddings": True,
}


def gpt_oss_tensors():
    """Return all tensors of a model except its experts' weights."""
    rng = np.random.default_rng(1)
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    shapes = {"model.embed_tokens.weight": (40, 64), f"{attention}.sinks": (4,)}
    for norm in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"):
        shapes[f"model.{norm}.weight"] = (64,)
    for projection, rows, columns in (("q", 32, 64), ("k", 16, 64), ("v", 16, 64), ("o", 64, 32)):
        shapes[f"{attention}.{projection}_proj.weight"] = (rows, columns)
        shapes[f"{attention}.{projection}_proj.bias"] = (rows,)
    shapes |= {f"{mlp}.router.weight": (3, 64), f"{mlp}.router.bias": (3,)}
    shapes |= {
        f"{mlp}.experts.gate_up_proj_bias": (3, 64),
        f"{mlp}.experts.down_proj_bias": (3, 64),
    }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def test_a_model_with_mxfp4_experts_loads_as_the_same_numbers_written_out(tmp_path):
    rng = np.random.default_rng(2)
    stored = expected = gpt_oss_tensors()
    for name, blocks in (("gate_up_proj", 2), ("down_proj", 1)):
        name = f"model.layers.0.mlp.experts.{name}"
        codes = {
            f"{name}_blocks": rng.integers(0, 256, (3, 64, blocks, 16), np.uint8),
            f"{name}_scales": rng.integers(120, 130, (3, 64, blocks), np.uint8),
        }
        source = opened(tmp_path, codes, Mxfp4())
        # safetensors writes memory in its stored order
        numbers = np.ascontiguousarray(source.read(name))
        stored, expected = stored | codes, expected | {name: numbers}
    save(tmp_path / "mxfp4", GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}, stored)
    save(tmp_path / "plain", GPT_OSS, expected)
    params = load(tmp_path / "mxfp4", split=False)
    for name, value in load(tmp_path / "plain", split=False).items():
        np.testing.assert_array_equal(params[name], value)


def test_a_parameter_is_filled_from_float8_experts_of_one_tensor_each(tmp_path):
    rng = np.random.default_rng(0)
    names = [f"experts.{e}.down" for e in range(3)]
    tensors, expected = {}, []
    for name in names:
        tensors |= quantised(name, rng.standard_normal((200, 150)))
        expected.append(plain(tensors[name], tensors[f"{name}_scale_inv"]).T)
    source = opened(tmp_path, tensors, BlockFloat8(BLOCK, BLOCK))
    part = TensorPart("experts.{e}.down", "e d f -> e f d", stacked=3)
    parameter = ParameterSource("down", (part,))
    index = (slice(1, 3), slice(100, 140), slice(0, 200))
    got = read_parameter(parameter, source, index, (3, 150, 200), np.float32)
    np.testing.assert_array_equal(got, np.stack(expected)[index])


def test_a_shard_of_experts_reads_its_own_bytes_and_no_others(tmp_path):
    save_file(experts(), tmp_path / "model.safetensors")
    stored = Noted(SafetensorsDirectory(tmp_path))
    source = dequantise(stored, Mxfp4())
    source.read(EXPERTS, (slice(1, 2), slice(32, 64), slice(0, 5)))
    held = (slice(1, 2), slice(0, 5), slice(1, 2))
    assert stored.reads == [
        (f"{EXPERTS}_scales", held),
        (f"{EXPERTS}_blocks", (*held, slice(0, 16))),
    ]


@pytest.mark.parametrize("piece_bytes", [700, 5000])
def test_experts_read_in_pieces_are_read_once(tmp_path, monkeypatch, piece_bytes):
    save_file(experts(), tmp_path / "model.safetensors")
    stored = Noted(SafetensorsDirectory(tmp_path))
    source = dequantise(stored, Mxfp4())
    parameter = ParameterSource("gate_up", (TensorPart(EXPERTS, "e d f -> e d f"),))
    monkeypatch.setattr(loader, "PIECE_BYTES", piece_bytes)
    got = read_parameter(parameter, source, (slice(None),) * 3, (3, 64, 10), np.float32)
    np.testing.assert_array_equal(got, source.read(EXPERTS))
    boxes = [index for name, index in stored.reads[:-1] if name == f"{EXPERTS}_blocks"]
    sizes = [math.prod(axis.stop - axis.start for axis in box) for box in boxes]
    assert sum(sizes) == 3 * 10 * 2 * 16 and max(sizes) <= piece_bytes // 8


def test_a_shard_of_a_float8_matrix_reads_its_own_bytes_and_no_others(tmp_path):
    save_file(quantised("w", np.ones((300, 200), np.float32)), tmp_path / "model.safetensors")
    stored = Noted(SafetensorsDirectory(tmp_path))
    source = dequantise(stored, BlockFloat8(BLOCK, BLOCK))
    source.read("w", (slice(150, 300), slice(0, 100)))
    assert stored.reads == [
        ("w_scale_inv", (slice(1, 3), slice(0, 1))),
        ("w", (slice(150, 300), slice(0, 100))),
    ]


W = quantised("w", np.ones((300, 200), np.float32))
CODES, SCALES = W["w"], W["w_scale_inv"]
FLOAT8_DAMAGE = {
    "no scales": ({"w": CODES}, "w: expected scales 'w_scale_inv', got no such tensor"),
    "no codes": ({"w_scale_inv": SCALES}, "w: expected codes 'w', got no such tensor"),
    "scales of a plain tensor": (
        W | {"w": np.ones((300, 200), np.float32)},
        "w: expected codes in F8_E4M3, got F32",
    ),
    "scales as codes": (
        W | {"w_scale_inv": SCALES.astype(np.uint8)},
        "w_scale_inv: expected scales in F32 or BF16, got U8",
    ),
    "too few scales": (
        W | {"w_scale_inv": SCALES[:2].copy()},
        "w_scale_inv: expected shape (3, 2) for codes of (300, 200), got (2, 2)",
    ),
    "too many scales": (
        W | {"w_scale_inv": np.ones((3, 3), np.float32)},
        "w_scale_inv: expected shape (3, 2) for codes of (300, 200), got (3, 3)",
    ),
    "scales transposed": (
        W | {"w_scale_inv": SCALES.T.copy()},
        "w_scale_inv: expected shape (3, 2) for codes of (300, 200), got (2, 3)",
    ),
    "one scale": (
        W | {"w_scale_inv": np.array(1.0, np.float32)},
        "w_scale_inv: expected shape (3, 2) for codes of (300, 200), got ()",
    ),
    "codes of another rank": (
        W | {"w": CODES.reshape(3, 100, 200)},
        "w: expected rows and columns, got shape (3, 100, 200)",
    ),
}
E = experts()
MXFP4_DAMAGE = {
    "no scales": (f"{EXPERTS}_scales", None, f"expected scales '{EXPERTS}_scales', got no such"),
    "no codes": (f"{EXPERTS}_blocks", None, f"expected codes '{EXPERTS}_blocks', got no such"),
    "codes of another type": (
        f"{EXPERTS}_blocks",
        E[f"{EXPERTS}_blocks"].astype(np.int32),
        "_blocks: expected codes in U8, got I32",
    ),
    "scales of another type": (
        f"{EXPERTS}_scales",
        E[f"{EXPERTS}_scales"].astype(np.float32),
        "_scales: expected scales in U8, got F32",
    ),
    "blocks of another size": (
        f"{EXPERTS}_blocks",
        E[f"{EXPERTS}_blocks"].reshape(3, 10, 4, 8),
        "_blocks: expected experts, outputs, blocks and 16 bytes, got shape (3, 10, 4, 8)",
    ),
    "blocks without an axis": (
        f"{EXPERTS}_blocks",
        E[f"{EXPERTS}_blocks"].reshape(3, 20, 16),
        "_blocks: expected experts, outputs, blocks and 16 bytes, got shape (3, 20, 16)",
    ),
    "too few scales": (
        f"{EXPERTS}_scales",
        E[f"{EXPERTS}_scales"][:, :, :1].copy(),
        "_scales: expected shape (3, 10, 2) for codes of (3, 10, 2, 16), got (3, 10, 1)",
    ),
    "plain besides": (
        EXPERTS,
        np.ones((3, 64, 10), np.float32),
        f"{EXPERTS}: expected either codes and scales or a plain tensor, got both",
    ),
}


@pytest.mark.parametrize(("tensors", "message"), FLOAT8_DAMAGE.values(), ids=FLOAT8_DAMAGE.keys())
def test_float8_codes_and_scales_that_do_not_fit_are_refused_by_name(tmp_path, tensors, message):
    with pytest.raises(InvalidQuantisation, match=r"got 1 difference:\n  " + re.escape(message)):
        opened(tmp_path, tensors, BlockFloat8(BLOCK, BLOCK))


@pytest.mark.parametrize(
    ("name", "value", "message"), MXFP4_DAMAGE.values(), ids=MXFP4_DAMAGE.keys()
)
def test_mxfp4_codes_and_scales_that_do_not_fit_are_refused_by_name(tmp_path, name, value, message):
    tensors = {key: x for key, x in (E | {name: value}).items() if x is not None}
    with pytest.raises(InvalidQuantisation, match=re.escape(message)):
        opened(tmp_path, tensors, Mxfp4())


def test_every_difference_between_codes_and_scales_is_listed_at_once(tmp_path):
    tensors = {f"w{i}": CODES for i in range(25)} | {"x_scale_inv": SCALES}
    with pytest.raises(InvalidQuantisation) as caught:
        opened(tmp_path, tensors, BlockFloat8(BLOCK, BLOCK))
    assert "got 26 differences" in str(caught.value) and "and 6 more" in str(caught.value)


def test_the_report_says_how_tensors_are_quantised(tmp_path):
    stored, _ = float8_and_plain_llama()
    path = save(tmp_path / "m", LLAMA | {"quantization_config": FP8}, stored)
    with open_model(path) as model:
        text = describe(model)
    assert re.search(r"tensors +11, .*: F8_E4M3 by 128x128 .* in 7, F32 .* in 4", text)


def test_a_quantisation_that_is_not_read_is_reported_with_the_tensors_as_they_are(tmp_path):
    stored, _ = float8_and_plain_llama()
    option = {"quantization_config": {"quant_method": "bitsandbytes"}}
    path = save(tmp_path / "m", LLAMA | option, stored)
    with open_model(path) as model:
        text = describe(model)
    assert re.search(
        r"family +not supported: .*json: quantization_config.quant_method: .*'bitsandbytes'",
        text,
    )
    assert re.search(r"tensors +18, .*F8_E4M3 .* in 7", text)


def test_damage_to_a_quantised_model_is_an_error_of_its_report(tmp_path):
    stored, _ = float8_and_plain_llama()
    del stored["model.layers.0.mlp.down_proj.weight_scale_inv"]
    path = save(tmp_path / "m", LLAMA | {"quantization_config": FP8}, stored)
    with open_model(path) as model, pytest.raises(InvalidQuantisation, match="down_proj"):
        describe(model)
