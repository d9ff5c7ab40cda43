"""GGUF: values and tensors are read as written, and false or mutated files give refusals only."""

import itertools
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import quants
from gguf_writer import Writer, build, f32, llama_metadata, stored_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.runtime.checkpoint.formats import gguf as module
from noria.runtime.checkpoint.formats.gguf import GGUFFile
from noria.runtime.checkpoint.formats.gguf_codes import CODES
from noria.runtime.checkpoint.formats.gguf_header import (
    MAX_ALIGNMENT,
    MAX_RANK,
    TENSOR_TYPES,
    parse_header,
    read_header,
)
from noria.runtime.errors import CheckpointChanged, CheckpointError, InvalidGGUF

RNG = np.random.default_rng(0)


def write(tmp_path, *arguments, **keywords):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(build(*arguments, **keywords).data)
    return path


def parse(*arguments, **keywords):
    return parse_header(bytes(build(*arguments, **keywords).data))


def test_metadata_of_every_value_type_comes_out_as_written():
    written = [
        ("u8", 0, 255),
        ("i8", 1, -128),
        ("u16", 2, 65535),
        ("i16", 3, -5),
        ("u32", 4, 2**32 - 1),
        ("i32", 5, -(2**31)),
        ("f32", 6, 0.5),
        ("bool", 7, 1),
        ("text", 8, "naïve ✓"),
        ("u64", 10, 2**64 - 1),
        ("i64", 11, -(2**63)),
        ("f64", 12, 0.1),
        ("numbers", 9, (5, [3, -4])),
        ("flags", 9, (7, [1, 0])),
        ("words", 9, (8, ["", "é", "abc"])),
        ("none", 9, (8, [])),
    ]
    expected = {key: value if kind != 9 else value[1] for key, kind, value in written}
    expected |= {"bool": True, "flags": [True, False]}
    assert parse(written).metadata == expected


def test_version_2_is_read_like_version_3():
    assert parse(llama_metadata(), version=2).metadata["general.name"] == "Tiny"


def test_shapes_are_in_numpy_order(tmp_path):
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    file = GGUFFile(write(tmp_path, [], [f32("w", array)]))
    assert file.tensors["w"].shape == (2, 3, 4)
    np.testing.assert_array_equal(file.read("w"), array)


@pytest.mark.parametrize("kind", [name for name, _, _ in TENSOR_TYPES.values()])
def test_each_type_dequantises_as_gguf_does_whole_and_in_slices(tmp_path, kind):
    shape = (6, 512)
    number = gguf.GGMLQuantizationType[kind]
    stored = stored_rows(kind, shape)
    expected = quants.dequantize(stored, number)
    assert np.isfinite(expected).all()
    path = write(tmp_path, [], [f32("a", [1.0]), ("w", shape, int(number), stored.tobytes())])

    file = GGUFFile(path)
    values = file.read("w")
    assert values.dtype == np.float32 and file.tensors["w"].stored_as == kind
    np.testing.assert_array_equal(values, expected)
    for rows, columns in itertools.product(
        [slice(0, 6), slice(2, 5), slice(3, 3)], [slice(0, 512), slice(30, 290), slice(511, 512)]
    ):
        np.testing.assert_array_equal(file.read("w", (rows, columns)), expected[rows, columns])


PLAIN = {"F32", "F16", "BF16"}
DEQUANTISED = [kind for kind, _, _ in TENSOR_TYPES.values() if kind not in {*CODES, *PLAIN}]


@pytest.mark.parametrize("kind", DEQUANTISED)
def test_each_type_without_codes_has_the_numbers_of_gguf(tmp_path, kind):
    shape, number = (2, 3, 512), gguf.GGMLQuantizationType[kind]
    stored = stored_rows(kind, shape)
    expected = quants.dequantize(stored, number)
    assert np.isfinite(expected).all() and len(np.unique(expected)) > 4
    path = write(tmp_path, [], [f32("a", [1.0]), ("w", shape, int(number), stored.tobytes())])
    file = GGUFFile(path)
    assert not file.kept and file.tensors["w"].stored_as == kind
    np.testing.assert_array_equal(file.read("w"), expected)
    index = (slice(1, 2), slice(1, 3), slice(250, 300))
    np.testing.assert_array_equal(file.read("w", index), expected[index])


def test_blocks_of_four_bits_have_the_published_numbers(tmp_path):
    """The numbers are those of the OCP specification of MXFP4, and of `ggml-common.h`."""
    exponents = np.array([127, 125, 130], np.uint8)
    codes = np.random.default_rng(0).integers(0, 256, (3, 16), np.uint8)
    nibbles = np.concatenate([codes & 15, codes >> 4], axis=1)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([values, -values])[nibbles] * 2.0 ** (exponents[:, None] - 127.0)
    blocks = np.concatenate([exponents[:, None], codes], axis=1)
    file = GGUFFile(write(tmp_path, [], [("w", (1, 96), 39, blocks.tobytes())]))
    np.testing.assert_array_equal(file.read("w"), values.reshape(1, 96))
    levels = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
    scale = np.array([0.5, 0.25, 3], "<f2")
    blocks = np.concatenate([scale[:, None].view(np.uint8), codes], axis=1)
    file = GGUFFile(write(tmp_path, [], [("w", (1, 96), 20, blocks.tobytes())]))
    expected = scale[:, None].astype(np.float32) * np.array(levels, np.float32)[nibbles]
    np.testing.assert_array_equal(file.read("w"), expected.reshape(1, 96))


def split(number: int, count: int, tensors: int) -> list:
    return [("split.no", 2, number), ("split.count", 2, count), ("split.tensors.count", 5, tensors)]


def write_parts(folder: Path, numbers=(0, 1, 2), tensors: int = 4) -> list[Path]:
    """A model in three parts, of which the first has all metadata."""
    arrays = [[f32("a", [1.0, 2.0])], [f32("b", [[3.0]]), f32("c", [4.0])], [f32("d", [5.0])]]
    paths = []
    for place, (number, own) in enumerate(zip(numbers, arrays, strict=True), start=1):
        metadata = [*split(number, 3, tensors), *(llama_metadata() if place == 1 else [])]
        paths.append(folder / f"m-Q4-{place:05}-of-00003.gguf")
        paths[-1].write_bytes(build(metadata, own).data)
    return paths


@pytest.mark.parametrize("given", range(3))
def test_a_split_model_is_read_from_all_parts(tmp_path, given):
    paths = write_parts(tmp_path)
    file = GGUFFile(paths[given])
    assert list(file.tensors) == ["a", "b", "c", "d"] and list(file.header_bytes) == paths
    assert [file.read(name).ravel().tolist() for name in "abcd"] == [[1, 2], [3], [4], [5]]
    assert file.metadata["general.name"] == "Tiny"
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    assert file.read("a").tolist() == [1, 2]
    with pytest.raises(CheckpointChanged, match="00003-of-00003"):
        file.read("d")


def test_a_missing_part_is_refused_by_name(tmp_path):
    first, second, _ = write_parts(tmp_path)
    second.unlink()
    with pytest.raises(CheckpointError, match=rf"got none of the name {second.name}. Fetch the"):
        GGUFFile(first)


@pytest.mark.parametrize(
    ("numbers", "tensors", "message"),
    [
        ((0, 2, 1), 4, "00002-of-00003.gguf: expected split.no 1 and split.count 3, .* got 2 and"),
        ((1, 1, 2), 4, "00001-of-00003.gguf: expected split.no 0"),
        ((0, 1, 2), 5, "expected 5 tensors in all parts, got 4"),
    ],
)
def test_parts_of_other_models_are_refused(tmp_path, numbers, tensors, message):
    paths = write_parts(tmp_path, numbers, tensors)
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(paths[0])


def test_parts_with_other_names_or_the_same_tensors_are_refused(tmp_path):
    first, second, _ = write_parts(tmp_path)
    with pytest.raises(CheckpointError, match=r"got one of 3 parts.*llama-gguf-split --merge"):
        GGUFFile(first.rename(tmp_path / "first.gguf"))
    first, second, _ = write_parts(tmp_path)
    second.write_bytes(build(split(1, 3, 4), [f32("a", [1.0, 2.0])]).data)
    with pytest.raises(CheckpointError, match=r"expected other tensors .* got a again"):
        GGUFFile(first)


@pytest.mark.parametrize("kind", CODES)
def test_codes_scales_and_offsets_of_each_type_give_the_numbers_of_gguf(tmp_path, kind):
    shape, number = (6, 512), gguf.GGMLQuantizationType[kind]
    stored = stored_rows(kind, shape)
    expected = quants.dequantize(stored, number)
    path = write(tmp_path, [], [f32("a", [1.0]), ("w", shape, int(number), stored.tobytes())])
    file = GGUFFile(path)
    assert file.kept.keys() == {"w"}
    kept, form = file.kept["w"], CODES[kind].format
    assert kept.blocks == (1, form.group)
    lowest = 0 if form.has_offsets else -(2 ** (int(kind[1]) - 1))
    for index in [(slice(0, 6), slice(0, 512)), (slice(2, 5), slice(30, 290))]:
        codes, scales, offsets = (
            file.part(part).read("w", index) for part in ("codes", "scales", "offsets")
        )
        assert codes.min() >= lowest and codes.max() < lowest + 2 ** int(kind[1])
        assert form.has_offsets or not offsets.any()
        np.testing.assert_array_equal(scales.astype(form.scales), scales)
        np.testing.assert_array_equal(codes * scales + offsets, expected[index])


def test_block_sizes_are_those_of_gguf():
    for number, (kind, *sizes) in TENSOR_TYPES.items():
        assert gguf.GGMLQuantizationType[kind] == number
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == tuple(sizes)


def test_a_row_slice_reads_only_its_rows(tmp_path, monkeypatch):
    stored = stored_rows("Q4_0", (4, 64))
    file = GGUFFile(write(tmp_path, [], [("w", (4, 64), 2, stored.tobytes())]))
    counts = []
    pread = module._pread
    monkeypatch.setattr(module, "_pread", lambda of, at, n: counts.append(n) or pread(of, at, n))
    file.read("w", (slice(1, 3), slice(0, 64)))
    assert counts == [2 * 36]


def test_a_slice_of_an_expert_tensor_reads_right(tmp_path):
    stored = stored_rows("Q8_0", (3, 4, 64))
    expected = quants.dequantize(stored, gguf.GGMLQuantizationType.Q8_0)
    file = GGUFFile(write(tmp_path, [], [("w", (3, 4, 64), 8, stored.tobytes())]))
    index = (slice(1, 3), slice(1, 2), slice(20, 40))
    np.testing.assert_array_equal(file.read("w", index), expected[index])


def test_a_vocabulary_of_262k_strings_parses_in_about_a_second():
    words = [f"word{i}" for i in range(262_144)]
    data = bytes(build([("tokenizer.ggml.tokens", 9, (8, words))]).data)
    started = time.perf_counter()
    found = parse_header(data)
    assert time.perf_counter() - started < 3  # a loaded machine; it takes about 0.15 s
    assert found.metadata["tokenizer.ggml.tokens"] == words


def patched(field_name, value, *, number=0, letter="Q"):
    """Draw a valid file with one field overwritten."""
    out = build(llama_metadata(), [f32("w", [[1.0, 2.0]]), f32("v", [3.0])])
    places = [at for what, at, _ in out.fields if what == field_name]
    struct.pack_into(f"<{letter}", out.data, places[number], value)
    return bytes(out.data)


LIES = {
    "magic": (patched("magic", 0x46554746, letter="I"), "expected the magic"),
    "version 1": (patched("version", 1, letter="I"), "expected version 2 or 3, got 1"),
    "big-endian": (patched("version", 3 << 24, letter="I"), "big-endian"),
    "2^60 keys": (patched("key count", 2**60), "metadata keys, got 1152921504606846976"),
    "2^60 tensors": (patched("tensor count", 2**60), "tensors, got 1152921504606846976"),
    "string of 2^64-1": (patched("text length", 2**64 - 1), "bytes of text"),
    "item of 2^64-1": (patched("item length", 2**64 - 1), "bytes of text"),
    "array of 2^40": (patched("array length", 2**40), "array items, got 1099511627776"),
    "number array of 2^40": (patched("array length", 2**40, number=1), "array items"),
    "nested array": (patched("element type", 9, letter="I"), "element type 9"),
    "unknown value type": (patched("value type", 13, letter="I"), "from 0 to 12, got 13"),
    "boolean 2": (patched("value", 2, number=3, letter="B"), "boolean of 0 or 1, got 2"),
    "rank 0": (patched("rank", 0, letter="I"), f"1 to {MAX_RANK} axes, got 0"),
    "rank 9": (patched("rank", 9, letter="I"), "axes, got 9"),
    "rank 2^31": (patched("rank", 2**31, letter="I"), "axes, got 2147483648"),
    "axis 0": (patched("axis", 0), "axes from 1 to"),
    "axis 2^63": (patched("axis", 2**63), "axes from 1 to"),
    "axis 2^33": (patched("axis", 2**33), "to end within the file"),
    "unknown tensor type": (patched("tensor type", 77, letter="I"), "unknown type 77"),
    "type not read": (patched("tensor type", 9, letter="I"), "got Q8_1"),
    "broken rows": (patched("tensor type", 2, letter="I"), "rows of a multiple of 32, got 2"),
    "offset outside": (patched("offset", 2**40, number=1), "to end within the file"),
    "offset 2^64-32": (patched("offset", 2**64 - 32, number=1), "to end within the file"),
    "unaligned offset": (patched("offset", 33, number=1), "at a multiple of 32"),
    "overlap": (patched("offset", 0, number=1), "to start after 'w' ends"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_with_what_was_expected_and_where(lie):
    data, message = LIES[lie]
    with pytest.raises(InvalidGGUF, match=message.replace("(", r"\(")) as caught:
        parse_header(data, "tiny.gguf")
    assert str(caught.value).startswith("tiny.gguf: at byte ")


def test_a_key_that_stands_twice_is_refused():
    with pytest.raises(InvalidGGUF, match="each metadata key once, got 'a' twice"):
        parse([("a", 4, 1), ("a", 4, 2)])


def test_a_tensor_that_stands_twice_is_refused():
    with pytest.raises(InvalidGGUF, match="each tensor once, got 'w' twice"):
        parse([], [f32("w", [1.0]), f32("w", [1.0])])


@pytest.mark.parametrize(
    "metadata",
    [[(b"\xff", 4, 1)], [("a", 8, b"\xc3")], [("a", 9, (8, ["ok", b"\x80"]))]],
    ids=["key", "text", "item"],
)
def test_text_that_is_not_utf8_is_refused(metadata):
    with pytest.raises(InvalidGGUF, match="expected UTF-8 text"):
        parse(metadata)


@pytest.mark.parametrize("alignment", [0, 3, 2**31])
def test_an_alignment_that_is_no_power_of_two_in_bounds_is_refused(alignment):
    with pytest.raises(InvalidGGUF, match=f"power of two up to {MAX_ALIGNMENT}, got {alignment}"):
        parse([("general.alignment", 4, alignment)])


def test_another_alignment_is_honoured(tmp_path):
    tensors = [f32("a", [1.0, 2.0]), f32("b", [3.0])]
    path = write(tmp_path, [("general.alignment", 4, 128)], tensors, alignment=128)
    file = GGUFFile(path)
    np.testing.assert_array_equal(file.read("b"), [3.0])


def test_a_file_cut_anywhere_is_refused(tmp_path):
    data = bytes(build(llama_metadata(), [f32("w", [[1.0, 2.0]])]).data)
    for end in range(len(data)):
        path = tmp_path / "cut.gguf"
        path.write_bytes(data[:end])
        with pytest.raises(InvalidGGUF):
            read_header(path)


def test_a_file_that_shrinks_after_opening_is_noticed(tmp_path):
    path = write(tmp_path, [], [f32("w", np.ones((8, 8)))])
    file = GGUFFile(path)
    path.write_bytes(path.read_bytes()[:-16])
    with pytest.raises(CheckpointChanged):
        file.read("w")


BASE: Writer = build(
    llama_metadata(), [f32("w", [[1.0, 2.0]]), ("q", (2, 32), 8, bytes(68)), f32("v", [3.0])]
)
EDGES = [0, 1, 7, 8, 9, 13, 2**31, 2**32 - 1, 2**33, 2**40, 2**60, 2**63, 2**64 - 32, 2**64 - 1]


@st.composite
def mutations(draw):
    """Draw a valid file with fields set to edge values, or bytes flipped, cut or inserted."""
    data = bytearray(BASE.data)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["field", "field", "byte", "cut", "insert", "copy"]))
        if kind == "field":
            _, at, width = draw(st.sampled_from(BASE.fields))
            near = [len(BASE.data) - at, (len(BASE.data) - at) // 8]
            value = draw(st.sampled_from(EDGES + near) | st.integers(0, 2**64 - 1))
            data[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
        elif kind == "byte" and data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[draw(st.integers(0, len(data))) :]
        elif kind == "insert":
            at = draw(st.integers(0, len(data)))
            data[at:at] = draw(st.binary(max_size=16))
        else:
            start, length = draw(st.integers(0, len(data))), draw(st.integers(0, 64))
            data += data[start : start + length]
    return bytes(data)


@settings(max_examples=400, deadline=2000)
@given(mutations())
def test_a_mutated_file_parses_or_is_refused_in_bounded_time_and_memory(data):
    tracemalloc.start()
    try:
        header = parse_header(data)
    except InvalidGGUF:
        return
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000
    ranges = sorted((t.offset, t.offset + t.info.num_bytes) for t in header.tensors.values())
    assert all(stop <= len(data) for _, stop in ranges)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
