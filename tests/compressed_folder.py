"""A plain reader of compressed-tensors directories in numpy: the reference of tests."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import deserialize
from safetensors.numpy import save_file

DTYPES = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
}


def stored_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a directory as they are stored, small floats included."""
    return {
        name: np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
        for name, tensor in deserialize((folder / "model.safetensors").read_bytes())
    }


def dequantised_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a directory in float32, by the names of a model without codes."""
    stored = stored_tensors(folder)
    tensors = {}
    for name, array in stored.items():
        if name.endswith((".weight_scale", ".weight_shape")):
            continue
        plain = name.removesuffix("_packed")
        if f"{plain}_scale" not in stored:
            tensors[name] = array.astype(np.float32)
            continue
        codes = _unpacked(array, stored[f"{plain}_shape"]) if plain != name else array
        scales = stored[f"{plain}_scale"].astype(np.float32)
        by_feature = np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)
        tensors[plain] = codes.astype(np.float32) * by_feature
    return tensors


def write_dequantised(folder: Path, target: Path) -> None:
    """Write the directory of the same model with its weights in float32."""
    target.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".json":
            (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    save_file(dequantised_tensors(folder), target / "model.safetensors")


def _unpacked(words: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """Return codes of four bits, eight in a word of 32 bits, the first in the lowest bits."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    nibbles = words.view(np.uint32)[..., None] >> shifts & np.uint32(15)
    return nibbles.reshape(len(words), -1)[:, : shape[1]].astype(np.int8) - np.int8(8)
