"""Limits on files of weights: a value at a limit is accepted, and one more is refused."""

import json
import struct

import pytest
from gguf_writer import build

from noria.runtime.checkpoint.formats import gguf_header, safetensors
from noria.runtime.errors import InvalidGGUF, InvalidSafetensors


def _safetensors(path, *, tensors: int = 1, rank: int = 1, spaces: int = 0) -> None:
    """Write a model of tensors of one element each, with spaces after its header."""
    entry = {"dtype": "U8", "shape": [1] * rank}
    header = {f"t{i}": {**entry, "data_offsets": [i, i + 1]} for i in range(tensors)}
    text = json.dumps(header).encode() + b" " * spaces
    content = struct.pack("<Q", len(text)) + text + bytes(tensors)
    (path / "model.safetensors").write_bytes(content)


def _header_length(path) -> int:
    return struct.unpack("<Q", (path / "model.safetensors").read_bytes()[:8])[0]


@pytest.mark.parametrize(
    ("what", "limit", "message"),
    [("tensors", 5, "at most 5 tensors, got 6"), ("rank", safetensors.MAX_RANK, "at most 8 axes")],
)
def test_a_safetensors_file_has_no_more_than_the_limit(tmp_path, monkeypatch, what, limit, message):
    monkeypatch.setattr(safetensors, "MAX_TENSORS", 5)
    _safetensors(tmp_path, **{what: limit})
    safetensors.SafetensorsDirectory(tmp_path)
    _safetensors(tmp_path, **{what: limit + 1})
    with pytest.raises(InvalidSafetensors, match=message):
        safetensors.SafetensorsDirectory(tmp_path)


def test_the_header_of_a_safetensors_file_is_no_longer_than_the_limit(tmp_path, monkeypatch):
    _safetensors(tmp_path)
    limit = _header_length(tmp_path)
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", limit)
    safetensors.SafetensorsDirectory(tmp_path)
    _safetensors(tmp_path, spaces=1)
    with pytest.raises(InvalidSafetensors, match=f"at most {limit} bytes, got {limit + 1}"):
        safetensors.SafetensorsDirectory(tmp_path)


def _gguf(
    *, tensors: int = 1, keys: int = 0, rank: int = 1, name: int = 1, items: int = 1
) -> bytes:
    metadata = [(f"k{i}", 4, i) for i in range(keys)] + [("items", 9, (4, list(range(items))))]
    values = [(("w" * name) + str(i), (1,) * rank, 0, bytes(4)) for i in range(tensors)]
    return bytes(build(metadata, values).data)


@pytest.mark.parametrize(
    ("what", "limit", "constant"),
    [
        ("tensors", 5, "MAX_TENSORS"),
        ("keys", 5, "MAX_METADATA_KEYS"),
        ("rank", gguf_header.MAX_RANK, "MAX_RANK"),
        ("name", 10, "MAX_NAME_BYTES"),
        ("items", 20, "MAX_ARRAY_ITEMS"),
    ],
)
def test_a_gguf_file_has_no_more_than_the_limit(monkeypatch, what, limit, constant):
    # the list of items is a key too, and a tensor's name ends in its number
    extra = {"keys": 1, "name": 1}.get(what, 0)
    monkeypatch.setattr(gguf_header, constant, limit + extra)
    gguf_header.parse_header(_gguf(**{what: limit}))
    with pytest.raises(InvalidGGUF, match=f"{limit + extra}.* got|{limit + extra} "):
        gguf_header.parse_header(_gguf(**{what: limit + 1}))
