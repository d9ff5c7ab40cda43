"""Axis patterns against plain numpy, whole and in random slices."""

import math
from dataclasses import replace

import numpy as np
import pytest

from noria.modelzoo.families.mapping import TensorPart
from noria.runtime.checkpoint.axis_pattern import AxisPattern
from noria.runtime.checkpoint.tensor_source import TensorInfo, intervals
from noria.runtime.errors import CheckpointChanged
from noria.runtime.files.file_facts import FileStamp

K, G, H, D, V, R = 3, 2, 8, 5, 7, 2

CASES = {
    "(k g h) d -> d k g h": (
        (K * G * H, D),
        (("k", K), ("g", G)),
        lambda x: x.reshape(K, G, H, D).transpose(3, 0, 1, 2),
    ),
    "(k h) d -> d k 1 h": (
        (K * H, D),
        (("h", H),),
        lambda x: x.reshape(K, H, D).transpose(2, 0, 1)[:, :, None],
    ),
    "f d -> d 1 f": ((V, D), (), lambda x: x.T[:, None]),
    "v d -> v d": ((V, D), (), lambda x: x),
    "d -> d": ((D,), (), lambda x: x),
    "(k g half two) d -> d k g (two half)": (
        (K * G * H, D),
        (("k", K), ("g", G), ("two", 2)),
        lambda x: x.reshape(K, G, H // 2, 2, D).transpose(4, 0, 1, 3, 2).reshape(D, K, G, H),
    ),
    "(k half two) -> k 1 (two half)": (
        (K * H,),
        (("k", K), ("two", 2)),
        lambda x: x.reshape(K, H // 2, 2).transpose(0, 2, 1).reshape(K, 1, H),
    ),
    "d (k g h) -> k g h d": (
        (D, K * G * H),
        (("k", K), ("h", H)),
        lambda x: x.reshape(D, K, G, H).transpose(1, 2, 3, 0),
    ),
    "(k g h) d -> (h k) (d g)": (
        (K * G * H, D),
        (("k", K), ("g", G), ("h", H)),
        lambda x: x.reshape(K, G, H, D).transpose(2, 0, 3, 1).reshape(H * K, D * G),
    ),
    "e f d -> e d 1 f": ((K, V, D), (), lambda x: x.transpose(0, 2, 1)[:, :, None]),
    "(k h) d -> d (k r) 1 h": (
        (K * H, D),
        (("h", H), ("r", R)),
        lambda x: x.reshape(K, H, D).repeat(R, axis=0).transpose(2, 0, 1)[:, :, None],
    ),
    "(k half two) -> (k r) 1 (two half)": (
        (K * H,),
        (("k", K), ("two", 2), ("r", 3)),
        lambda x: x.reshape(K, H // 2, 2).swapaxes(1, 2).reshape(K, 1, H).repeat(3, axis=0),
    ),
    "k d -> (r d) r2 k": (
        (K, D),
        (("r", R), ("r2", 4)),
        lambda x: np.tile(x, (1, R)).T[:, None].repeat(4, axis=1),
    ),
}


class Recorded:
    """A tensor source over one array that records the boxes of its reads."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.tensors = {"w": TensorInfo(array.shape, array.dtype, "F32", array.nbytes)}
        self.boxes = []

    def read(self, name, index=None):
        self.boxes.append(index)
        return self.array[index] if index else self.array


def case(axes):
    shape, sizes, reference = CASES[axes]
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    return Recorded(array), AxisPattern.of(TensorPart("w", axes, sizes)), reference(array)


@pytest.mark.parametrize("axes", CASES)
def test_a_whole_parameter_equals_reshape_and_transpose(axes):
    source, pattern, expected = case(axes)
    assert pattern.parameter_shape(source.array.shape) == expected.shape
    np.testing.assert_array_equal(pattern.read(source, "w"), expected)


@pytest.mark.parametrize("axes", CASES)
def test_any_slice_equals_the_slice_of_the_whole(axes):
    source, pattern, expected = case(axes)
    rng = np.random.default_rng(0)
    for _ in range(200):
        ends = [sorted(rng.integers(0, size + 1, 2)) for size in expected.shape]
        index = tuple(slice(int(a), int(b)) for a, b in ends)
        np.testing.assert_array_equal(pattern.read(source, "w", index), expected[index])


def test_a_slice_of_heads_reads_only_their_rows():
    source, pattern, _ = case("(k g h) d -> d k g h")
    every = slice(None)
    pattern.read(source, "w", (every, slice(1, 2), every, every))
    assert source.boxes == [(slice(G * H, 2 * G * H), slice(0, D))]


def test_a_slice_inside_one_head_of_permuted_rows_reads_only_that_head():
    source, pattern, _ = case("(k g half two) d -> d k g (two half)")
    pattern.read(source, "w", (slice(0, 2), slice(2, 3), slice(1, 2), slice(1, 3)))
    (box,) = source.boxes
    first = (2 * G + 1) * H
    assert box[0].start >= first and box[0].stop <= first + H
    assert box[1] == slice(0, 2)


@pytest.mark.parametrize(
    ("copies", "heads"), [((5, 6), (2, 3)), ((1, 2), (0, 1)), ((1, 3), (0, 2)), ((2, 4), (1, 2))]
)
def test_a_slice_of_copies_reads_only_the_heads_that_they_are_of(copies, heads):
    source, pattern, expected = case("(k h) d -> d (k r) 1 h")
    every = slice(None)
    index = (every, slice(*copies), every, every)
    np.testing.assert_array_equal(pattern.read(source, "w", index), expected[index])
    assert source.boxes == [(slice(heads[0] * H, heads[1] * H), slice(0, D))]


def test_a_repetition_without_a_size_is_refused():
    with pytest.raises(ValueError, match=r"'\(k h\) -> \(k r\) h': expected a size for \['r'\]"):
        AxisPattern.of(TensorPart("w", "(k h) -> (k r) h", (("h", 4),)))


@pytest.mark.parametrize("max_elements", [1, 7, 24, 10_000])
@pytest.mark.parametrize("axes", CASES)
def test_pieces_cover_a_box_once_and_none_is_too_large(axes, max_elements):
    source, pattern, expected = case(axes)
    rng = np.random.default_rng(max_elements)
    for _ in range(20):
        ends = [sorted(rng.integers(0, size + 1, 2)) for size in expected.shape]
        index = tuple(slice(int(a), int(b)) for a, b in ends)
        counted = np.zeros(expected.shape, int)
        box = intervals(index, expected.shape)
        for piece in pattern.pieces(source.tensors["w"], box, max_elements):
            source.boxes.clear()
            part = tuple(interval.as_slice() for interval in piece)
            counted[part] += 1
            np.testing.assert_array_equal(pattern.read(source, "w", part), expected[part])
            read = [math.prod(axis.stop - axis.start for axis in b) for b in source.boxes]
            assert sum(read) <= max_elements
        assert counted[index].all() and counted.sum() == counted[index].size


def test_pieces_are_cut_along_what_is_major_in_the_tensor():
    source, pattern, expected = case("(k g h) d -> d k g h")
    box = intervals((slice(None),) * 4, expected.shape)
    for piece in pattern.pieces(source.tensors["w"], box, G * H * D):
        pattern.read(source, "w", tuple(interval.as_slice() for interval in piece))
    rows = G * H
    assert source.boxes == [(slice(k * rows, (k + 1) * rows), slice(0, D)) for k in range(K)]


def test_pieces_are_cut_along_what_is_major_in_the_file():
    source, pattern, expected = case("e f d -> e d 1 f")
    info = replace(source.tensors["w"], axis_order=(0, 2, 1))
    box = intervals((slice(None),) * 4, expected.shape)
    for piece in pattern.pieces(info, box, 2 * V):
        pattern.read(source, "w", tuple(interval.as_slice() for interval in piece))
    # d is major to f where the tensor is presented transposed, so f stays whole
    pairs = [(slice(start, min(start + 2, D))) for start in range(0, D, 2)]
    assert source.boxes == [
        (slice(e, e + 1), slice(0, V), pair) for e in range(K) for pair in pairs
    ]


def test_an_empty_slice_reads_nothing():
    source, pattern, _ = case("v d -> v d")
    assert pattern.read(source, "w", (slice(2, 2), slice(0, D))).shape == (0, D)
    assert source.boxes == []


def test_an_axis_that_does_not_divide_is_refused_with_the_numbers():
    _, pattern, _ = case("(k g h) d -> d k g h")
    with pytest.raises(ValueError, match=r"\(k g h\) of a multiple of 6, got 47"):
        pattern.parameter_shape((47, D))


def test_a_tensor_of_another_rank_is_refused():
    _, pattern, _ = case("v d -> v d")
    with pytest.raises(ValueError, match=r"expected 2 axes, got shape \(4,\)"):
        pattern.parameter_shape((4,))


@pytest.mark.parametrize(
    "axes",
    [
        "v d",
        "v d -> v",
        "v v -> v v",
        "v -> v v",
        "v 1 -> v",
        "((v) d) -> v d",
        "(v d -> v d",
        "() v -> v",
    ],
)
def test_a_pattern_that_says_nothing_sensible_is_refused(axes):
    with pytest.raises(ValueError, match="axis pattern"):
        AxisPattern.of(TensorPart("w", axes))


def test_a_file_that_changes_after_it_was_opened_is_noticed(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    stamp = FileStamp(path)
    stamp.check()
    path.write_bytes(b"other")
    with pytest.raises(CheckpointChanged, match="changed while it was read"):
        stamp.check()


def test_a_file_that_becomes_shorter_between_the_check_and_the_read_is_noticed(
    tmp_path, monkeypatch
):
    path = tmp_path / "weights"
    path.write_bytes(b"12345678")
    stamp = FileStamp(path)
    buffer = bytearray(4)
    stamp.read(2, memoryview(buffer))
    assert buffer == b"3456"
    path.write_bytes(b"1234")
    monkeypatch.setattr(FileStamp, "check", lambda self: None)
    with pytest.raises(CheckpointChanged, match="expected 4 bytes at 2, got 2"):
        stamp.read(2, memoryview(buffer))
