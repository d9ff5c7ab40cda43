"""noria's own checkpoints move between layouts, from any sharding to any arrangement."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from noria.modelzoo.config import AS_PUBLISHED, Arrangement, DecoderConfig
from noria.runtime.checkpoint import load_params, open_model, save_orbax
from noria.runtime.checkpoint.orbax_store import arrange, changes_shape
from noria.runtime.errors import CheckpointMismatch

K, G, H, D, V, F = 2, 4, 4, 8, 13, 16
CONFIG = DecoderConfig.alike(
    vocab_size=V,
    embed=D,
    mlp=F,
    num_query_heads=K * G,
    num_kv_heads=K,
    head_dim=H,
    windows=(None, None),
    max_position=64,
    qkv_bias=True,
)
SHAPES = {
    "embedding.table": (V, D),
    "head.table": (V, D),
    "final_norm.scale": (D,),
    **{
        f"layers.{i}.{name}": shape
        for i in range(2)
        for name, shape in {
            "attention.qkv": (D, K, G + 2, H),
            "attention.qkv_bias": (K, G + 2, H),
            "attention.output": (K, G, H, D),
            "mlp.gate_up": (2, D, F),
        }.items()
    },
}
RNG = np.random.default_rng(0)
VALUES = {name: RNG.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}

# Mesh, arrangement, and the mesh axes of heads and of table rows
LAYOUTS = {
    "one device": ((1, 1), AS_PUBLISHED, None, None),
    "heads over 2": ((4, 2), AS_PUBLISHED, "tensor", None),
    "heads over 4": ((2, 4), Arrangement(4, 16), "tensor", "tensor"),
    "heads over 8": ((1, 8), Arrangement(8, 16), "tensor", "tensor"),
    "heads over both": ((2, 4), Arrangement(8, 16), ("data", "tensor"), ("data", "tensor")),
    "padded only": ((4, 2), Arrangement(1, 14), None, "tensor"),
}
SOURCES = ("one device", "heads over 2")


def shardings(layout):
    shape, _, heads, rows = LAYOUTS[layout]
    devices = jax.devices()[: math.prod(shape)]
    mesh = jax.make_mesh(shape, ("data", "tensor"), (AxisType.Auto,) * 2, devices=devices)
    specs = {
        "table": PartitionSpec(rows),
        "qkv": PartitionSpec(None, heads),
        "qkv_bias": PartitionSpec(heads),
        "output": PartitionSpec(heads),
        "gate_up": PartitionSpec(None, None, "tensor"),
        "scale": PartitionSpec(),
    }
    return {name: NamedSharding(mesh, specs[name.rsplit(".")[-1]]) for name in VALUES}


def arranged_values(layout):
    arrangement = LAYOUTS[layout][1]
    return {name: arrange(value, name, arrangement) for name, value in VALUES.items()}


def save(path, layout):
    placed = shardings(layout)
    params = {k: jax.device_put(v, placed[k]) for k, v in VALUES.items()}
    save_orbax(path, params, family="llama", config=CONFIG)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One checkpoint for each source layout, saved on first use."""
    paths = {}

    def get(layout):
        if layout not in paths:
            paths[layout] = save(tmp_path_factory.mktemp("orbax") / "model", layout)
        return paths[layout]

    return get


@pytest.mark.parametrize("layout", SOURCES)
def test_what_is_stored_is_canonical_whatever_the_layout(saved, layout):
    path = saved(layout)
    listed = json.loads((path / "noria.json").read_text())["parameters"]
    assert {name: tuple(entry["shape"]) for name, entry in listed.items()} == SHAPES
    with open_model(path) as model:
        for name in ("embedding.table", "layers.1.attention.qkv", "layers.0.attention.output"):
            np.testing.assert_array_equal(model.tensors.read(name), VALUES[name])


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_checkpoint_of_one_layout_is_restored_into_another_bit_for_bit(saved, source, target):
    placed, expected = shardings(target), arranged_values(target)
    abstract = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in expected.items()}
    with open_model(saved(source)) as model:
        spec = model.spec.arranged(LAYOUTS[target][1])
        params = load_params(spec, model.tensors, abstract, placed)
    assert list(params) == list(abstract)
    for name, value in expected.items():
        np.testing.assert_array_equal(params[name], value)
        assert params[name].sharding == placed[name]


def test_the_cast_happens_with_the_arranging(saved):
    expected = arranged_values("heads over 8")
    abstract = {k: jax.ShapeDtypeStruct(v.shape, jnp.bfloat16) for k, v in expected.items()}
    with open_model(saved("one device")) as model:
        spec = model.spec.arranged(LAYOUTS["heads over 8"][1])
        device = SingleDeviceSharding(jax.devices()[2])
        params = load_params(spec, model.tensors, abstract, device)
    for name, value in expected.items():
        assert params[name].dtype == jnp.bfloat16 and params[name].sharding == device
        np.testing.assert_array_equal(params[name], value.astype(jnp.bfloat16))


def test_one_arranged_parameter_is_read_by_slice(saved):
    arrangement = LAYOUTS["heads over 4"][1]
    expected = arranged_values("heads over 4")
    index = (slice(2, 5), slice(1, 3), slice(1, 4), slice(0, 4))
    with open_model(saved("one device")) as model:
        box = model.tensors.arranged(arrangement).read("layers.1.attention.qkv", index)
    np.testing.assert_array_equal(box, expected["layers.1.attention.qkv"][index])


def test_canonical_shapes_are_a_mismatch_for_a_spec_with_an_arrangement(saved):
    abstract = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in VALUES.items()}
    device = SingleDeviceSharding(jax.devices()[0])
    with (
        open_model(saved("one device")) as model,
        pytest.raises(CheckpointMismatch, match=r"head.table: expected \(13, 8\), got \(16, 8\)"),
    ):
        spec = model.spec.arranged(Arrangement(4, 16))
        load_params(spec, model.tensors, abstract, device)


@pytest.mark.parametrize("arrangement", [AS_PUBLISHED, Arrangement(4), Arrangement(1, 16)], ids=str)
def test_parameters_that_are_not_concerned_stay_the_same_object(arrangement):
    others = [name for name in VALUES if not changes_shape(arrangement, name)]
    assert "layers.0.mlp.gate_up" in others
    for name in others:
        assert arrange(VALUES[name], name, arrangement) is VALUES[name]


def test_copies_stand_side_by_side_and_queries_keep_their_order():
    x_DKJH = VALUES["layers.0.attention.qkv"]
    got = arrange(x_DKJH, "layers.0.attention.qkv", Arrangement(4))
    assert got.shape == (D, 2 * K, G // 2 + 2, H)
    np.testing.assert_array_equal(got[:, 2, :2], x_DKJH[:, 1, :2])
    np.testing.assert_array_equal(got[:, 3, :2], x_DKJH[:, 1, 2:4])
    for copy in (2, 3):
        np.testing.assert_array_equal(got[:, copy, 2:], x_DKJH[:, 1, 4:])
