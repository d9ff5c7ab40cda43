"""Write weights in codes in the format compressed-tensors, which other programs read, too.

A quantised matrix `[out, in]` becomes `weight` in int8 (format `int-quantized`) or float8_e4m3fn
(format `float-quantized`). With codes of four bits it becomes `weight_packed` and `weight_shape`
(format `pack-quantized`): an int32 word has eight codes, the first in the lowest bits, and 8 is
added to each code. `weight_scale` is `[out, groups]`. Source: the Python package
compressed-tensors, version 0.20.

Does not choose codes. Guarantees: one tensor is in memory at a time; config.json is written last,
so an unfinished directory is no model. If writing fails, nothing of the directory is left.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....modelzoo.weights.weight_formats import CODE_BITS, WeightFormat
from ...errors import UserError
from ...files.disk import Disk, replace_file
from .safetensors import SINGLE

CODES_IN_WORD = 8
_SAFETENSORS_DTYPES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int8": "I8",
    "int32": "I32",
    "int64": "I64",
}


Layout = dict[str, tuple[str, tuple[int, ...]]]
"""The dtype and the shape of each tensor, by name, in the order of the file."""


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix: codes `[out, in]` of a byte each and scales `[out, groups]`."""

    codes: np.ndarray
    scales: np.ndarray

    def stored(self, name: str, weight_format: WeightFormat) -> dict[str, np.ndarray]:
        """The tensors that hold the matrix.

        Args:
          name: The published name of the matrix, which ends in `.weight`.
          weight_format: The format of the codes.

        Raises:
          ValueError: The codes of four bits of an output do not fill their words.
        """
        scales = {f"{name}_scale": self.scales}
        if CODE_BITS[weight_format.codes] == 8:
            return {name: self.codes, **scales}
        if self.codes.shape[1] % CODES_IN_WORD:
            raise UserError(
                f"{name}: expected a multiple of {CODES_IN_WORD} inputs for codes of four bits, as "
                f"readers take the number of inputs from words, got {self.codes.shape[1]}"
            )
        packed = pack_int4(self.codes)
        shape = np.array(self.codes.shape, np.int64)
        return {f"{name}_packed": packed, **scales, f"{name}_shape": shape}


def pack_int4(codes: np.ndarray) -> np.ndarray:
    """Codes of four bits along the last axis in words of int32, which they fill."""
    unsigned = (codes + 8).astype(np.uint8)
    pairs = unsigned[..., 0::2] | unsigned[..., 1::2] << 4
    return np.ascontiguousarray(pairs).view("<i4")


def quantisation_config(weight_format: WeightFormat, ignored: Sequence[str]) -> dict[str, Any]:
    """The table `quantization_config` of config.json.

    Args:
      weight_format: The format of all quantised matrices.
      ignored: The names of modules with a matrix in float.
    """
    bits, group = CODE_BITS[weight_format.codes], weight_format.group
    is_float = weight_format.codes.startswith("float")
    weights = {
        "num_bits": bits,
        "type": "float" if is_float else "int",
        "symmetric": True,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
        "dynamic": False,
    }
    form = "int-quantized" if bits == 8 else "pack-quantized"
    form = "float-quantized" if is_float else form
    # without a format of the group, readers expect packed codes if activations are in float
    group_0 = {"targets": ["Linear"], "weights": weights, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group_0},
        "ignore": list(ignored),
    }


def write_directory(
    folder: Path,
    config: Mapping[str, Any],
    other_files: Mapping[str, bytes],
    layout: Layout,
    tensors: Iterable[tuple[str, np.ndarray]],
) -> int:
    """Write a model directory; returns the number of bytes of its tensors.

    Args:
      folder: A new or empty folder.
      config: The table of config.json.
      other_files: Other files by their path in the folder.
      layout: The dtype and the shape of each tensor, in the order of the file.
      tensors: The tensors in this order.
    """
    header, num_bytes = _header(layout)
    text = json.dumps(config, indent=2) + "\n"
    files = {
        **{name: [content] for name, content in other_files.items()},
        SINGLE: _chunks(header, layout, tensors),
        "config.json": [text.encode()],
    }
    with _whole_or_nothing([folder / name for name in files]):
        for name, chunks in files.items():
            replace_file(Disk(), folder / name, chunks)
    return num_bytes


@contextmanager
def _whole_or_nothing(paths: Sequence[Path]) -> Iterator[None]:
    """Make the folders of new files; if the block fails, remove the files and these folders."""
    folders = dict.fromkeys(parent for path in paths for parent in path.parents)
    new = sorted((x for x in folders if not x.exists()), key=lambda folder: len(folder.parts))
    try:
        for folder in new:
            folder.mkdir()
        yield
    except BaseException:
        for path in paths:
            with suppress(OSError):
                path.unlink()
        for folder in reversed(new):
            with suppress(OSError):
                folder.rmdir()
        raise


def _header(layout: Layout) -> tuple[bytes, int]:
    """The header of a safetensors file, and the number of bytes after it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (dtype, shape) in layout.items():
        stop = start + int(np.prod(shape, dtype=np.int64)) * _item_bytes(dtype)
        stored = _SAFETENSORS_DTYPES[dtype]
        entries[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content, start


def _item_bytes(dtype: str) -> int:
    # numpy does not know these by name unless another package has registered them
    return {"bfloat16": 2, "float8_e4m3fn": 1}.get(dtype) or np.dtype(dtype).itemsize


def _chunks(
    header: bytes,
    layout: Layout,
    tensors: Iterable[tuple[str, np.ndarray]],
) -> Iterator[bytes | memoryview]:
    yield header
    for (name, array), planned in zip(tensors, layout.items(), strict=True):
        assert planned == (name, (array.dtype.name, array.shape)), (planned, name, array.shape)
        # ml_dtypes' types have no buffer of their own
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
