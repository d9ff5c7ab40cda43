"""Safetensors directories: tensors are read by slice as written; false headers are refused."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from noria.runtime.checkpoint.formats import safetensors as module
from noria.runtime.checkpoint.formats.safetensors import SafetensorsDirectory, safetensors_files
from noria.runtime.errors import CheckpointChanged, InvalidSafetensors, ModelNotFound

WEIGHTS = {
    "a": np.arange(24, dtype=np.float32).reshape(4, 6),
    "b": np.arange(24, dtype=np.float32).reshape(4, 6).astype(ml_dtypes.bfloat16),
    "c": np.arange(5, dtype=np.float16),
    "codes": np.arange(24, dtype=np.uint8).reshape(4, 6).view(ml_dtypes.float8_e4m3fn),
    "flags": np.array([True, False, True]),
    "one": np.array(7.0, np.float32),
    "ids": np.arange(3),
}


def single(path, tensors=WEIGHTS):
    save_file(tensors, path / "model.safetensors")
    return path


def sharded(path, weight_map=None, shards=None):
    shards = shards or {
        "model-00001-of-00002.safetensors": {"a": WEIGHTS["a"]},
        "model-00002-of-00002.safetensors": {"b": WEIGHTS["b"], "c": WEIGHTS["c"]},
    }
    for name, tensors in shards.items():
        save_file(tensors, path / name)
    if weight_map is None:
        weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("write", [single, sharded])
def test_tensors_come_out_as_written_whole_and_in_slices(tmp_path, write):
    source = SafetensorsDirectory(write(tmp_path))
    assert source.tensors["b"].dtype == ml_dtypes.bfloat16
    assert source.tensors["b"].stored_as == "BF16" and source.tensors["b"].num_bytes == 48
    for name in source.tensors:
        assert source.tensors[name].shape == WEIGHTS[name].shape
        np.testing.assert_array_equal(source.read(name), WEIGHTS[name])
    for name in {"a", "b", "codes"} & source.tensors.keys():
        for index in [(slice(1, 3), slice(2, 6)), (slice(2, 2), slice(0, 6))]:
            np.testing.assert_array_equal(source.read(name, index), WEIGHTS[name][index])


def test_any_box_equals_that_of_the_whole_tensor(tmp_path):
    cube = np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6).astype(ml_dtypes.bfloat16)
    source = SafetensorsDirectory(single(tmp_path, {"before": np.ones(3, np.int8), "cube": cube}))
    rng = np.random.default_rng(0)
    for _ in range(300):
        ends = [sorted(map(int, rng.integers(0, size + 1, 2))) for size in cube.shape]
        index = tuple(slice(*pair) for pair in ends)
        np.testing.assert_array_equal(source.read("cube", index), cube[index])


def test_contiguous_boxes_are_read_without_the_memory_map(tmp_path):
    file = module.SafetensorsFile(single(tmp_path) / "model.safetensors")
    file._bytes = None
    for index in [None, (slice(1, 3), slice(0, 6)), (slice(2, 3), slice(1, 4))]:
        np.testing.assert_array_equal(file.read("a", index), WEIGHTS["a"][index or ...])


def test_a_single_file_beside_the_shards_of_an_index_is_refused(tmp_path):
    sharded(single(tmp_path, {"a": WEIGHTS["a"]}))
    message = r"expected one checkpoint, got two: model\.safetensors, and 2 shards that model\.saf"
    for open_files in (SafetensorsDirectory, safetensors_files):
        with pytest.raises(InvalidSafetensors, match=message):
            open_files(tmp_path)


def test_a_single_file_may_have_an_index(tmp_path):
    source = SafetensorsDirectory(sharded(tmp_path, shards={"model.safetensors": WEIGHTS}))
    assert source.tensors.keys() == WEIGHTS.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d": "model-00001-of-00002.safetensors"}, "'d' is in the index but in no shard"),
        ({"d": "model-00003-of-00002.safetensors"}, "model-00003-of-00002.safetensors.*got none"),
        ({"b": "model-00001-of-00002.safetensors"}, "'b' is in .*, the index says model-00001"),
        ({"c": None}, "'c' is in model-00002-of-00002.safetensors but not in the index"),
    ],
    ids=["missing tensor", "missing shard", "wrong shard", "left over"],
)
def test_an_index_that_disagrees_with_the_shards_is_refused(tmp_path, change, message):
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    weight_map = {"a": first, "b": second, "c": second} | change
    weight_map = {name: shard for name, shard in weight_map.items() if shard}
    shards = {first: {"a": WEIGHTS["a"]}, second: {"b": WEIGHTS["b"], "c": WEIGHTS["c"]}}
    with pytest.raises(InvalidSafetensors, match=message):
        SafetensorsDirectory(sharded(tmp_path, weight_map, shards))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    shards = {
        "x.safetensors": {"a": WEIGHTS["a"]},
        "y.safetensors": {"a": WEIGHTS["a"], "c": WEIGHTS["c"]},
    }
    weight_map = {"a": "x.safetensors", "c": "y.safetensors"}
    with pytest.raises(InvalidSafetensors, match=r"'a' is in two shards, x.* and y"):
        SafetensorsDirectory(sharded(tmp_path, weight_map, shards))


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/x.safetensors", "a\0b.safetensors", "sub/m.safetensors",
     "https://x/m.safetensors", "..\\m.safetensors", "m.bin", ".safetensors", 3, None, [], {}],
)  # fmt: skip
def test_a_shard_name_that_is_no_bare_file_name_is_refused(tmp_path, name):
    inside = tmp_path / "model"
    (inside / "sub").mkdir(parents=True)
    for place in (tmp_path, inside / "sub"):
        single(place)
    with pytest.raises(InvalidSafetensors, match=r"weight_map: expected a|not JSON|unhashable"):
        SafetensorsDirectory(sharded(inside, {"a": name}))


def test_a_link_out_of_the_directory_is_refused(tmp_path):
    inside = tmp_path / "model"
    inside.mkdir()
    single(tmp_path)
    (inside / "x.safetensors").symlink_to(tmp_path / "model.safetensors")
    with pytest.raises(InvalidSafetensors, match="got a link to"):
        SafetensorsDirectory(sharded(inside, {"a": "x.safetensors"}))


def test_the_links_of_a_hub_cache_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    single(blobs).joinpath("model.safetensors").rename(blobs / "abc")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    source = SafetensorsDirectory(snapshot)
    np.testing.assert_array_equal(source.read("a"), WEIGHTS["a"])


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
MALFORMED = {
    "empty": (b"", b""),
    "not json": (b"{{", b""),
    "bad utf-8": (b'{"\xff":{}}', b""),
    "deep": (b"[" * 100_000, b""),
    "trailing bytes": ({"a": F32}, bytes(9)),
    "cut": ({"a": F32}, bytes(7)),
    "shape and bytes differ": ({"a": {**F32, "shape": [3]}}, bytes(8)),
    "overlap": ({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
    "hole": ({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, bytes(20)),
    "product overflow": ({"a": {**F32, "shape": [2**33, 2**33]}}, bytes(8)),
    "negative": ({"a": {**F32, "shape": [-2]}}, bytes(8)),
    "unknown dtype": ({"a": {**F32, "dtype": "F31"}}, bytes(8)),
    "dtype not read": ({"a": {"dtype": "F8_E5M2", "shape": [8], "data_offsets": [0, 8]}}, bytes(8)),
    "duplicate key": (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    ),
    "empty axis": ({"a": {"dtype": "F32", "shape": [0, 3], "data_offsets": [0, 0]}}, b""),
    "rank 9": ({"a": {**F32, "shape": [1] * 8 + [2]}}, bytes(8)),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_refused_by_name(tmp_path, case):
    with pytest.raises(InvalidSafetensors, match=r"model\.safetensors"):
        SafetensorsDirectory(raw(tmp_path, *MALFORMED[case]))


@pytest.mark.parametrize("length", [2**62, 2**63, 100, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused(tmp_path, length):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(InvalidSafetensors, match=f"at most 2 bytes, got {length}"):
        SafetensorsDirectory(tmp_path)


def test_a_file_of_seven_bytes_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(7))
    with pytest.raises(InvalidSafetensors, match="got 7 bytes"):
        SafetensorsDirectory(tmp_path)


def test_more_tensors_than_the_limit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_TENSORS", 6)
    with pytest.raises(InvalidSafetensors, match="at most 6 tensors, got 7"):
        SafetensorsDirectory(single(tmp_path))
    monkeypatch.setattr(module, "MAX_TENSORS", 7)
    SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".pkl", ".ckpt"])
def test_pickles_are_refused_and_never_opened(tmp_path, suffix):
    pickle = tmp_path / f"model{suffix}"
    pickle.write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    pickle.chmod(0)
    with pytest.raises(ModelNotFound, match=r"never opens one.*writes safetensors"):
        safetensors_files(tmp_path)


def test_a_directory_without_weights_says_so(tmp_path):
    with pytest.raises(ModelNotFound, match=r"expected model\.safetensors .* got no weights"):
        safetensors_files(tmp_path)


def test_a_file_replaced_while_open_is_noticed(tmp_path):
    source = SafetensorsDirectory(single(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "old")
    single(tmp_path)
    with pytest.raises(CheckpointChanged):
        source.read("a")
