"""Loading: parameters have their sharding and dtype; missing and unused tensors are refused."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counted_arrays import CountedArrays
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from noria.modelzoo.families.mapping import ParameterSource, TensorPart
from noria.runtime.checkpoint import TensorInfo, load_params, turning
from noria.runtime.checkpoint import loader as module
from noria.runtime.checkpoint.loader import read_parameter
from noria.runtime.errors import CheckpointMismatch

D, K, G, H, F, V = 8, 2, 2, 4, 16, 32


@dataclass
class Spec:
    """A stand-in for ModelSpec with the attributes that the loader reads."""

    sources: tuple[ParameterSource, ...]
    ignored_tensors: tuple[str, ...] = ()
    ignored_prefixes: tuple[str, ...] = ()
    family: str = "tiny"
    config: object = None


class Arrays:
    """A tensor source over arrays in memory that records the bytes of each read."""

    def __init__(self, **arrays):
        self.arrays = arrays
        self.tensors = {
            name: TensorInfo(a.shape, a.dtype, a.dtype.name, a.nbytes) for name, a in arrays.items()
        }
        self.reads = []

    def read(self, name, index=None):
        value = self.arrays[name][index] if index else self.arrays[name]
        self.reads.append((name, value.size))
        return value.copy()


def tiny():
    rng = np.random.default_rng(0)
    arrays = {
        "embed_tokens": rng.standard_normal((V, D), np.float32),
        "q": rng.standard_normal((K * G * H, D), np.float32),
        "k": rng.standard_normal((K * H, D), np.float32),
        "gate": rng.standard_normal((F, D), np.float32),
        "up": rng.standard_normal((F, D), np.float32),
        "norm": rng.standard_normal(D, np.float32),
    }
    sources = (
        ParameterSource("embedding", (TensorPart("embed_tokens", "v d -> v d"),)),
        ParameterSource(
            "layers.0.attention.qk",
            (
                TensorPart("q", "(k g h) d -> d k g h", (("k", K), ("g", G))),
                TensorPart("k", "(k h) d -> d k 1 h", (("k", K),)),
            ),
            concat_axis=2,
        ),
        ParameterSource(
            "layers.0.mlp.gate_up",
            (TensorPart("gate", "f d -> d 1 f"), TensorPart("up", "f d -> d 1 f")),
            concat_axis=1,
        ),
        ParameterSource("layers.0.norm", (TensorPart("norm", "d -> d"),)),
    )
    expected = {
        "embedding": arrays["embed_tokens"],
        "layers.0.attention.qk": np.concatenate(
            [
                arrays["q"].reshape(K, G, H, D).transpose(3, 0, 1, 2),
                arrays["k"].reshape(K, 1, H, D).transpose(3, 0, 1, 2),
            ],
            axis=2,
        ),
        "layers.0.mlp.gate_up": np.stack([arrays["gate"].T, arrays["up"].T], axis=1),
        "layers.0.norm": arrays["norm"],
    }
    return Arrays(**arrays), Spec(sources), expected


def abstract_of(expected, dtype=jnp.float32):
    return {name: jax.ShapeDtypeStruct(value.shape, dtype) for name, value in expected.items()}


SPECS = {
    "embedding": PartitionSpec("tensor", None),
    "layers.0.attention.qk": PartitionSpec("data", "tensor", None, None),
    "layers.0.mlp.gate_up": PartitionSpec(None, None, ("tensor", "data")),
    "layers.0.norm": PartitionSpec(),
}


def shardings():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    return {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}


def one_device():
    return SingleDeviceSharding(jax.devices()[0])


turned_anywhere = pytest.mark.parametrize("on_devices", [False, True], ids=["host", "devices"])


@turned_anywhere
def test_parameters_on_one_device_equal_the_tensors_rearranged(on_devices):
    tensors, spec, expected = tiny()
    params = load_params(
        spec, tensors, abstract_of(expected), one_device(), turns_on_devices=on_devices
    )
    assert params.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(params[name], value)


@turned_anywhere
def test_parameters_on_a_mesh_equal_the_same_and_lie_as_asked(on_devices):
    tensors, spec, expected = tiny()
    placed = shardings()
    params = load_params(spec, tensors, abstract_of(expected), placed, turns_on_devices=on_devices)
    for name, value in expected.items():
        np.testing.assert_array_equal(params[name], value)
        assert params[name].sharding == placed[name]


LAYERS = {
    "in.0": np.arange(F * D, dtype=np.float32).reshape(F, D),
    "in.2": -np.arange(F * D, dtype=np.float32).reshape(F, D),
}
OF_LAYERS = tuple(
    ParameterSource(f"layers.{i}.mlp.up", (TensorPart(f"in.{i}", "f d -> d f"),)) for i in (0, 2)
)
IN_TURNS = "layers.0:4:2.mlp.up"


@turned_anywhere
def test_layers_that_run_in_turns_fill_one_parameter(on_devices):
    """On a mesh, each device reads only its own part of every layer's tensor."""
    tensors, expected = Arrays(**LAYERS), np.stack([LAYERS["in.0"].T, LAYERS["in.2"].T])
    abstract = {IN_TURNS: jax.ShapeDtypeStruct(expected.shape, jnp.float32)}
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    placed = NamedSharding(mesh, PartitionSpec(None, "data", "tensor"))
    for sharding in (one_device(), placed):
        params = load_params(
            Spec(OF_LAYERS),
            tensors,
            abstract,
            {IN_TURNS: sharding},
            turns_on_devices=on_devices,
        )
        np.testing.assert_array_equal(params[IN_TURNS], expected)
        assert params[IN_TURNS].sharding == sharding
    assert {size for _, size in tensors.reads[2:]} == {F * D // 8}


def test_a_layer_without_its_tensor_is_named_where_layers_run_in_turns():
    abstract = {IN_TURNS: jax.ShapeDtypeStruct((2, D, F), jnp.float32)}
    with pytest.raises(CheckpointMismatch, match=r"no tensor fills \(1\):\n    layers.2.mlp.up"):
        load_params(Spec(OF_LAYERS[:1]), Arrays(**{"in.0": LAYERS["in.0"]}), abstract, one_device())


@turned_anywhere
def test_a_sharded_parameter_is_never_read_whole(on_devices):
    tensors, spec, expected = tiny()
    load_params(spec, tensors, abstract_of(expected), shardings(), turns_on_devices=on_devices)
    sizes = {
        name: [size for read, size in tensors.reads if read == name] for name in tensors.tensors
    }
    # Two shards of the vocabulary over eight devices: each box is read once, not once a device
    assert sizes["embed_tokens"] == [V * D // 2] * 2
    assert sizes["gate"] == [F * D // 8] * 8
    assert sizes["q"] == [K * G * H * D // 8] * 8


def test_the_host_holds_at_most_two_shards_at_once(monkeypatch):
    tensors, spec, expected = tiny()
    counted = CountedArrays()
    monkeypatch.setattr(turning, "aligned_zeros", counted.zeros)
    params = load_params(spec, tensors, abstract_of(expected), shardings())
    # the tables' two halves, eight parts each of both projections, and one norm for all
    assert counted.num_made == 2 + 8 + 8 + 1
    assert counted.most <= 2
    for name, value in expected.items():
        np.testing.assert_array_equal(params[name], value)


@turned_anywhere
@pytest.mark.parametrize("piece_bytes", [4, 100, 1000])
def test_parameters_are_read_in_pieces_of_bounded_size(monkeypatch, piece_bytes, on_devices):
    monkeypatch.setattr(module, "DEVICE_PIECE_BYTES" if on_devices else "PIECE_BYTES", piece_bytes)
    tensors, spec, expected = padded()
    params = load_params(
        spec, tensors, abstract_of(expected), one_device(), turns_on_devices=on_devices
    )
    for name, value in expected.items():
        np.testing.assert_array_equal(params[name], value)
    assert max(size for _, size in tensors.reads) <= piece_bytes // 4
    assert sum(size for _, size in tensors.reads) == sum(a.size for a in tensors.arrays.values())


def test_a_device_that_is_the_cpu_adopts_the_array_that_was_read(monkeypatch):
    tensors, spec, expected = tiny()
    read, make = [], turning.aligned_zeros

    def noted(*arguments):
        read.append(make(*arguments))
        return read[-1]

    monkeypatch.setattr(turning, "aligned_zeros", noted)
    params = load_params(spec, tensors, abstract_of(expected), one_device())
    for array, host in zip(params.values(), read, strict=True):
        assert array.unsafe_buffer_pointer() == host.ctypes.data


@turned_anywhere
def test_the_cast_happens_on_the_way(on_devices):
    tensors, spec, expected = tiny()
    abstract = abstract_of(expected, jnp.bfloat16)
    params = load_params(spec, tensors, abstract, one_device(), turns_on_devices=on_devices)
    for name, value in expected.items():
        assert params[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(params[name], value.astype(jnp.bfloat16))


def padded():
    """Return the tiny model with five rows of zeros after its token table."""
    tensors, spec, expected = tiny()
    table = replace(spec.sources[0], padding_rows=5)
    expected["embedding"] = np.pad(expected["embedding"], ((0, 5), (0, 0)))
    return tensors, Spec((table, *spec.sources[1:])), expected


@pytest.mark.parametrize("rows", [(0, 37), (30, 34), (3, 9), (31, 32), (32, 37), (36, 36)])
def test_padding_rows_are_zeros_in_any_slice_and_are_never_read(rows):
    tensors, spec, expected = padded()
    index = (slice(*rows), slice(2, 7))
    box = read_parameter(spec.sources[0], tensors, index, (V + 5, D), np.dtype("f4"))
    np.testing.assert_array_equal(box, expected["embedding"][index])
    published = max(min(rows[1], V) - rows[0], 0)
    assert sum(size for _, size in tensors.reads) == 5 * published


@turned_anywhere
def test_a_padded_table_arrives_on_a_mesh_whose_last_shards_are_all_padding(on_devices):
    tensors, spec, expected = padded()
    spec.sources = (replace(spec.sources[0], padding_rows=16), *spec.sources[1:])
    expected["embedding"] = np.pad(expected["embedding"][:V], ((0, 16), (0, 0)))
    placed = shardings()
    placed["embedding"] = NamedSharding(placed["embedding"].mesh, PartitionSpec(("data", "tensor")))
    params = load_params(spec, tensors, abstract_of(expected), placed, turns_on_devices=on_devices)
    np.testing.assert_array_equal(params["embedding"], expected["embedding"])


@pytest.mark.parametrize("rows", [V - 1, V + 5])
def test_padding_does_not_hide_a_table_of_another_size(rows):
    tensors, spec, expected = padded()
    tensors.tensors["embed_tokens"] = TensorInfo((rows, D), np.dtype("f4"), "F32", 0)
    message = rf"expected \(37, 8\), got \({rows + 5}, 8\) from .* and 5 rows of zeros"
    with pytest.raises(CheckpointMismatch, match=message):
        load_params(spec, tensors, abstract_of(expected), one_device())


def test_every_difference_is_listed_at_once_and_nothing_is_read():
    tensors, spec, expected = tiny()
    abstract = abstract_of(expected)
    abstract["layers.0.norm"] = jax.ShapeDtypeStruct((D + 1,), jnp.float32)
    abstract["head"] = jax.ShapeDtypeStruct((V, D), jnp.float32)
    del tensors.tensors["up"]
    tensors.tensors["lm_head"] = tensors.tensors["embed_tokens"]
    with pytest.raises(CheckpointMismatch) as caught:
        load_params(spec, tensors, abstract, one_device())
    message = str(caught.value)
    for line in [
        "tensors missing from the checkpoint (1):\n    up",
        "tensors that no parameter uses (1):\n    lm_head",
        "parameters that no tensor fills (1):\n    head",
        "layers.0.norm: expected (9,), got (8,) from norm (8,)",
    ]:
        assert line in message
    assert tensors.reads == []


def test_a_tensor_used_twice_is_refused():
    tensors, spec, expected = tiny()
    twice = ParameterSource("head", (TensorPart("embed_tokens", "v d -> v d"),))
    abstract = abstract_of(expected | {"head": expected["embedding"]})
    with pytest.raises(
        CheckpointMismatch, match=r"are used more than once \(1\):\n    embed_tokens"
    ):
        load_params(Spec((*spec.sources, twice)), tensors, abstract, one_device())


def fused(rows_of_up=(F, 2 * F)):
    """Return gate and up as rows of one tensor, and the parameters expected from them."""
    tensors, spec, expected = tiny()
    arrays = dict(tensors.arrays)
    arrays["both"] = np.concatenate([arrays.pop("gate"), arrays.pop("up")])
    parts = (
        TensorPart("both", "f d -> d 1 f", rows=(0, F)),
        TensorPart("both", "f d -> d 1 f", (), rows_of_up),
    )
    one = ParameterSource("layers.0.mlp.gate_up", parts, concat_axis=1)
    return arrays, (*spec.sources[:2], one, *spec.sources[3:]), expected


@pytest.mark.parametrize("box", [(), (slice(2, 5), slice(0, 2), slice(3, 11))], ids=["all", "box"])
def test_parts_that_are_rows_of_one_tensor_fill_what_tensors_of_their_own_would(box):
    arrays, sources, expected = fused()
    index = box or (slice(None),) * 3
    got = read_parameter(sources[2], Arrays(**arrays), index, (D, 2, F), np.dtype("f4"))
    np.testing.assert_array_equal(got, expected["layers.0.mlp.gate_up"][index])


@pytest.mark.parametrize(
    ("rows_of_up", "message"),
    [
        ((F - 1, 2 * F), r"are used more than once \(1\):\n    both"),
        ((F, 2 * F - 1), r"rows that no parameter uses \(1\):\n    both: expected 31 rows, got 32"),
        ((F, 2 * F + 1), "both -> layers.0.mlp.gate_up: .* expected at least 33 rows"),
    ],
    ids=["twice", "left over", "too few"],
)
def test_rows_must_be_used_once_each(rows_of_up, message):
    arrays, sources, expected = fused(rows_of_up)
    with pytest.raises(CheckpointMismatch, match=message):
        load_params(Spec(sources), Arrays(**arrays), abstract_of(expected), one_device())


N, HEAD, OF_KEY = 3, 5, 2
"""Number of heads, rows of a head, and its rows that are a key; the other rows are a value."""


def blocks(of_key=(0, OF_KEY), of_value=(OF_KEY, HEAD), block=HEAD):
    arrays = np.random.default_rng(0).normal(size=(N * HEAD, D)).astype(np.float32)
    axes, sizes = "(n h) d -> n h d", (("n", N),)
    sources = {
        "key": ParameterSource("key", (TensorPart("both", axes, sizes, of_key, block),)),
        "value": ParameterSource("value", (TensorPart("both", axes, sizes, of_value, block),)),
    }
    split = arrays.reshape(N, HEAD, D)
    return arrays, sources, {"key": split[:, :OF_KEY], "value": split[:, OF_KEY:]}


def test_any_box_of_rows_of_blocks_is_that_of_the_tensor_taken_apart():
    arrays, sources, expected = blocks()
    rng = np.random.default_rng(1)
    for _ in range(100):
        for name, whole in expected.items():
            ends = [sorted(rng.integers(0, size + 1, 2)) for size in whole.shape]
            index = tuple(slice(int(a), int(b)) for a, b in ends)
            tensors = Arrays(both=arrays)
            got = read_parameter(sources[name], tensors, index, whole.shape, np.dtype("f4"))
            np.testing.assert_array_equal(got, whole[index])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"of_value": (OF_KEY, 4)},
            r"that no parameter uses \(1\):\n    both: expected 4 rows, got 5",
        ),
        ({"of_key": (0, 3)}, r"are used more than once \(1\):\n    both"),
        ({"block": 4, "of_value": (OF_KEY, 4)}, "both -> key: .* expected a multiple of 4 rows"),
    ],
    ids=str,
)
def test_rows_of_blocks_must_be_used_once_each(changes, message):
    arrays, sources, expected = blocks(**changes)
    spec = Spec(tuple(sources.values()))
    with pytest.raises(CheckpointMismatch, match=message):
        load_params(spec, Arrays(both=arrays), abstract_of(expected), one_device())


def test_an_ignored_tensor_may_be_there_or_not():
    tensors, spec, expected = tiny()
    spec.ignored_tensors = ("rope_freqs.weight", "layers.7.inv_freq")
    tensors.tensors["layers.7.inv_freq"] = tensors.tensors["norm"]
    load_params(spec, tensors, abstract_of(expected), one_device())


def test_tensors_of_parts_that_are_not_read_may_be_there():
    tensors, spec, expected = tiny()
    tensors.tensors["vision.norm"] = tensors.tensors["norm"]
    with pytest.raises(CheckpointMismatch, match=r"that no parameter uses.*\n.*vision\.norm"):
        load_params(spec, tensors, abstract_of(expected), one_device())
    spec.ignored_prefixes = ("audio.", "vision.")
    load_params(spec, tensors, abstract_of(expected), one_device())


def test_a_transposed_tensor_is_refused():
    tensors, spec, expected = tiny()
    tensors.tensors["embed_tokens"] = TensorInfo((D, V), np.dtype("f4"), "F32", 4 * D * V)
    with pytest.raises(CheckpointMismatch, match=r"embedding: expected \(32, 8\), got \(8, 32\)"):
        load_params(spec, tensors, abstract_of(expected), one_device())


def test_a_tensor_whose_axes_do_not_divide_is_refused():
    tensors, spec, expected = tiny()
    tensors.tensors["q"] = TensorInfo((K * G * H + 1, D), np.dtype("f4"), "F32", 0)
    with pytest.raises(CheckpointMismatch, match=r"q -> layers.0.attention.qk: .* multiple of 4"):
        load_params(spec, tensors, abstract_of(expected), one_device())


def test_an_integer_tensor_fills_no_parameter():
    tensors, spec, expected = tiny()
    tensors.tensors["norm"] = TensorInfo((D,), np.dtype("i4"), "I32", 4 * D)
    with pytest.raises(CheckpointMismatch, match="norm: expected floating numbers, got I32"):
        load_params(spec, tensors, abstract_of(expected), one_device())


def test_a_parameter_without_a_sharding_is_refused():
    tensors, spec, expected = tiny()
    with pytest.raises(ValueError, match="got none for 'embedding'"):
        load_params(spec, tensors, abstract_of(expected), {})
