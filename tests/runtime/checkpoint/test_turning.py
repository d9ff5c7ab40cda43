"""Pieces of tensors are turned alike on the host and on devices, within bounds of memory."""

import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from noria.compile.targets import find_target
from noria.modelzoo.families.mapping import ParameterSource, TensorPart
from noria.runtime.checkpoint import TensorInfo, device_boxes, load_params, loader, turning
from noria.runtime.checkpoint.axis_pattern import AxisPattern
from noria.runtime.checkpoint.device_boxes import DeviceBoxes
from noria.runtime.checkpoint.tensor_source import intervals
from noria.runtime.checkpoint.turning import HostBox, Piece

SHAPE = (24, 20)
PATTERNS = (
    TensorPart("w", "f d -> f d"),
    TensorPart("w", "f d -> d 1 f"),
    TensorPart("w", "(k g h) d -> d k g h", (("k", 3), ("g", 2))),
    TensorPart("w", "d (n h) -> n h d", (("n", 5),)),
    TensorPart("w", "(k h) d -> d (k r) 1 h", (("h", 8), ("r", 2))),
    TensorPart("w", "(k half two) d -> d k (two half)", (("k", 3), ("two", 2))),
)


def random_bits(dtype: str) -> np.ndarray:
    """Return numbers of all bits, so also NaN with payloads, infinities and subnormal numbers."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    count = SHAPE[0] * SHAPE[1] * kind.itemsize
    return np.random.default_rng(0).integers(0, 256, count, np.uint8).view(kind).reshape(SHAPE)


class OneTensor:
    def __init__(self, array):
        self.array = array
        self.tensors = {"w": TensorInfo(array.shape, array.dtype, "", array.nbytes)}

    def read(self, name, index=None):
        return self.array[index].copy()


@pytest.mark.parametrize("strip_rows", [1, 5, 128, None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("part", PATTERNS, ids=lambda part: part.axes)
def test_every_bit_arrives_at_its_place(monkeypatch, part, dtype, strip_rows):
    """On the host in strips of some rows, and on two devices where `strip_rows` is None."""
    pattern, tensor = AxisPattern.of(part), random_bits(dtype)
    shape = pattern.parameter_shape(SHAPE)
    whole = intervals((slice(None),) * len(shape), shape)
    index, turn = pattern.plan(SHAPE, whole)
    piece = Piece(OneTensor(tensor), "w", index, turn, (1, *(0,) * len(shape)))
    if strip_rows is not None:
        monkeypatch.setattr(turning, "STRIP_ROWS", strip_rows)
        host_box = HostBox((3, *shape), tensor.dtype)
        host_box.write(piece)
        found = [host_box.array]
    else:
        boxes = DeviceBoxes((3, *shape), tensor.dtype, [jax.devices()[:1], jax.devices()[1:2]])
        boxes.write([piece, replace(piece, start=(2, *piece.start[1:]))])
        found = [np.asarray(box) for box in boxes.result()]
    bits = np.dtype(f"u{tensor.itemsize}")
    for layer, array in enumerate(found, start=1):
        layers = array.view(bits)
        np.testing.assert_array_equal(layers[layer], turn(tensor.view(bits)))
        assert not np.delete(layers, layer, axis=0).any()


class Slow:
    """A source of equal layers that notes how many of its arrays are alive at once."""

    def __init__(self, layers=3, fails_at=None):
        info = TensorInfo((64, 32), np.dtype(np.float32), "F32", 8192)
        self.tensors = {f"w{i}": info for i in range(layers)}
        self.most = self.num_reads = self._alive = 0
        self._fails_at = fails_at
        self._lock = threading.RLock()

    def read(self, name, index=(slice(None), slice(None))):
        with self._lock:
            self.num_reads += 1
            if self.num_reads == self._fails_at:
                raise OSError("the disk is gone")
            self._alive += 1
            self.most = max(self.most, self._alive)
        time.sleep(0.001)
        rows, columns = (range(*part.indices(n)) for part, n in zip(index, (64, 32), strict=True))
        memory = np.add.outer(np.array(rows) * 32, np.array(columns)).astype(np.float32)
        weakref.finalize(memory, self._gone)
        return memory[:]

    def _gone(self):
        with self._lock:
            self._alive -= 1


def load(source, on_devices, sharding=None):
    """Load all layers of a source, each turned, in pieces of two rows."""
    names = [name.replace("w", "layers.") + ".mlp.up" for name in source.tensors]
    spec = SimpleNamespace(
        sources=[
            ParameterSource(path, (TensorPart(name, "f d -> d f"),))
            for path, name in zip(names, source.tensors, strict=True)
        ],
        ignored_tensors=(),
        ignored_prefixes=(),
        family="tiny",
    )
    abstract = {name: jax.ShapeDtypeStruct((32, 64), np.float32) for name in names}
    sharding = sharding or SingleDeviceSharding(jax.devices()[0])
    return load_params(spec, source, abstract, sharding, turns_on_devices=on_devices)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(turning, "usable_cores", lambda: 3)
    for name in ("PIECE_BYTES", "DEVICE_PIECE_BYTES"):
        monkeypatch.setattr(loader, name, 256)


@pytest.mark.usefixtures("small_pieces")
def test_pieces_are_read_by_several_threads_and_each_holds_one():
    source = Slow()
    params = load(source, on_devices=False)
    assert source.num_reads == 3 * 32 and 1 < source.most <= 3
    expected = np.arange(64 * 32).reshape(64, 32).T
    for array in params.values():
        np.testing.assert_array_equal(array, expected)


@pytest.mark.usefixtures("small_pieces")
def test_the_host_holds_pieces_and_no_shard_where_devices_turn_them(monkeypatch):
    def refuse(*_):
        raise AssertionError("expected no shard on the host")

    monkeypatch.setattr(turning, "aligned_zeros", refuse)
    # so that the device, whose memory is that of the host, has a copy of its own
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, d: put(jax.tree.map(np.copy, x), d))
    source = Slow()
    params = load(source, on_devices=True)
    assert source.num_reads == 3 * 32 and 1 < source.most <= 3
    expected = np.arange(64 * 32).reshape(64, 32).T
    for array in params.values():
        np.testing.assert_array_equal(array, expected)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("on_devices", [False, True], ids=["host", "devices"])
def test_an_error_of_a_thread_ends_the_load(on_devices):
    source = Slow(fails_at=5)
    with pytest.raises(OSError, match="the disk is gone"):
        load(source, on_devices)
    # the threads end the pieces that they have begun
    assert source.num_reads < 32


@pytest.mark.usefixtures("small_pieces")
def test_devices_and_layers_of_one_shape_share_a_program():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    for spec in (PartitionSpec(), PartitionSpec("data"), PartitionSpec("tensor", "data")):
        device_boxes._write.clear_cache()
        load(Slow(layers=3), on_devices=True, sharding=NamedSharding(mesh, spec))
        assert device_boxes._write._cache_size() == 1


@pytest.mark.parametrize(
    "target", ["cpu", pytest.param("tpu:v5e:2x2", marks=pytest.mark.tpu_compile)]
)
def test_a_piece_is_written_in_place(target):
    """The program holds the box once, and in addition not more than a few pieces."""
    part = TensorPart("w", "f d -> d 1 f")
    rows = intervals((slice(0, 1024), slice(0, 1), slice(0, 64)), (1024, 1, 4096))
    _, turn = AxisPattern.of(part).plan((4096, 1024), rows)
    mesh = Mesh(find_target(target).devices[:1], ("device",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("device"))
    box, piece, start = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in [
            ((1024, 2, 4096), ml_dtypes.bfloat16),
            ((64, 1024), np.uint16),
            ((3,), np.int32),
        ]
    )
    program = device_boxes._write.lower(box, piece, start, turn, sharding).compile()
    memory = program.memory_analysis()
    box_bytes, piece_bytes = 2 * 1024 * 2 * 4096, 2 * 64 * 1024
    assert memory.alias_size_in_bytes >= box_bytes
    assert memory.temp_size_in_bytes <= 4 * piece_bytes


@pytest.mark.parametrize(("platform", "own"), [("cpu", False), ("gpu", True), ("tpu", True)])
def test_devices_turn_axes_if_their_memory_is_their_own(platform, own):
    devices = [SimpleNamespace(platform=platform)] * 2
    assert loader._has_own_memory(SimpleNamespace(device_set=devices)) is own
