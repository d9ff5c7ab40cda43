"""Weights of a bundle: every shard of this process as a file of its plain bytes, row by row.

They lie as the plan's layout wants them (dequantised, fused, cast, cut), so loading them is
reading. They are read, not mapped: on the CPU products over the pages of a mapped file took twice
as long as over memory of our own, which comes in huge pages, and a copy from the page cache takes a
tenth of what the hash does.

Three checks are made: of owner and permissions, against other users; of size and SHA-256, against
copies cut short and faulty disks; of the digest of the model's weights, against weights of another
model. Weights cannot run, so no check is made against the user, who may write both a file and its
hash. Every byte is hashed at every start: with the SHA instructions of today's processors a thread
hashes 1.9 GB a second, and several threads more than disks give.

Knows nothing of model files. Guarantees: parameters are bit for bit those that were kept.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from ..batch.disk import Disk, replace_file
from ..checkpoint.shards import Box, aligned_zeros, place_shards
from ..checkpoint.tensor_source import intervals
from .own_files import BundleUnusable, KeptFile, read_kept_into

NUM_READERS = 4
"""Each holds at most two shards on the host: one that it reads, and one that its devices have."""

Shards = Mapping[str, Mapping[str, KeptFile]]
"""Files by parameter and box."""


def write_shards(
    disk: Disk, folder: Path, parameters: Mapping[str, jax.Array]
) -> dict[str, dict[str, KeptFile]]:
    """Write the shards of this process, each box once, however many of its devices hold it."""
    kept: dict[str, dict[str, KeptFile]] = {}
    for number, (name, array) in enumerate(parameters.items()):
        boxes = kept[name] = {}
        for shard in array.addressable_shards:
            box = _box_name(intervals(shard.index, array.shape))
            if box not in boxes:
                path = folder / f"{number:05}-{len(boxes):03}.bin"
                content = np.ascontiguousarray(shard.data).reshape(-1).view(np.uint8)
                digest = replace_file(disk, path, [content.data])
                boxes[box] = KeptFile(path.name, digest.sha256)
    return kept


def read_shards(
    folder: int,
    shards: Shards,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    shardings: Mapping[str, jax.sharding.Sharding],
) -> dict[str, jax.Array]:
    """All parameters, each on its shards, from a folder that is held open."""
    if missing := abstract.keys() ^ shards.keys():
        raise BundleUnusable(f"its weights are not those of the model ({min(missing)})")

    def read(name: str) -> jax.Array:
        return _read_parameter(folder, shards[name], abstract[name], shardings[name])

    with ThreadPoolExecutor(max_workers=NUM_READERS) as pool:
        return dict(zip(abstract, pool.map(read, abstract), strict=True))


def _read_parameter(
    folder: int,
    boxes: Mapping[str, KeptFile],
    abstract: jax.ShapeDtypeStruct,
    sharding: jax.sharding.Sharding,
) -> jax.Array:
    shape, dtype = tuple(abstract.shape), np.dtype(abstract.dtype)

    def read(box: Box) -> np.ndarray:
        name = _box_name(box)
        if name not in boxes:
            raise BundleUnusable(f"its weights are cut otherwise (no box {name})")
        array = aligned_zeros([len(interval) for interval in box], dtype)
        read_kept_into(array, boxes[name], folder)
        return array

    return place_shards(shape, dtype, sharding, read)


def _box_name(box: Box) -> str:
    """`0:576,192:384`."""
    return ",".join(f"{interval.start}:{interval.stop}" for interval in box)
