"""Hardware for which graphs are compiled, present or not.

`cpu`, `gpu` and `tpu` are the first device of that kind on this machine, and `cpu:8` is eight
devices (simulated on the CPU, so any number is possible). With several processes they are the
devices of all processes. `tpu:<generation>:<topology>` (for example `tpu:v5e:2x4`) and
`gpu:<kind>:<n>` (`gpu:h100:8`) need not be present: graphs compile for them and report memory and
collectives, but cannot run. Knows nothing of models or grids.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from ..modelzoo.moe.config import Tiles
from ..sharding.layout import Layout
from ..sharding.placement import Placement
from .gpu_kinds import GPU_KINDS, GPUS_PER_HOST, host_topology
from .program_cache import without_program_cache
from .target_names import TargetName, UnknownTarget

EXPERT_TILES = {
    "cpu": Tiles(),
    "gpu": Tiles(16, 128),
    "tpu": Tiles(64, 256, mean_divisor=1, piece_bytes=None),
}
"""Tile sizes of the experts' products.

The smallest number of rows is that of a register tile, or of a tensor core. On a CPU, products
reach full speed at 32 to 64 rows; pieces of half or twice the bytes are equally fast with 2 MiB of
L2. A TPU's products read weights from main memory at full bandwidth. By its compiler's estimate,
this takes a third of the cycles of a copy onto the chip. During this time they can compute 240 rows
or more, so an expert with up to 64 tokens takes one tile and reads its weights once.
"""
TILES_BY_KIND: dict[str, Tiles] = dict.fromkeys(
    ("TPU v5", "TPU v5p"), Tiles(16, 256, mean_divisor=0.5, piece_bytes=None)
)
"""Tile sizes for kinds of devices that differ from their platform.

Rows of a tile cost bytes on v5p: each of its two cores has a memory of its own on the chip, so XLA
writes the result of every product to main memory (`benchmarks/v5p.md`). An expert with up to twice
the mean load takes one tile.
"""

_LIBTPU = threading.Lock()
"""Lock for every call that may load libtpu: two threads that load it at once fail."""


@dataclass(frozen=True)
class Target:
    """The devices for which graphs are compiled, in order."""

    name: str
    platform: str
    devices: tuple[Any, ...]
    is_present: bool

    def placement(self, layout: Layout | None = None) -> Placement:
        """Placement of a model on these devices; without a layout, replicated on each of them."""
        if layout is not None:
            return Placement(layout.mesh.build(self.devices), self.platform, layout)
        mesh = Mesh(np.array(self.devices), ("data",), axis_types=(AxisType.Auto,))
        return Placement(mesh, self.platform)


def find_target(name: str) -> Target:
    """Parse a target's name and find its devices; raises UnknownTarget if there are none."""
    parsed = TargetName.parse(name)
    if not parsed.kind:
        return _present(name, parsed.platform, parsed.num_devices)
    if parsed.platform == "tpu":
        return _tpu_topology(name, name.removeprefix("tpu:"))
    return _gpu_topology(name, parsed.kind, parsed.num_devices)


def default_platform() -> str:
    """The platform that jax runs on when no target is named."""
    with _naming(jax.config.values["jax_platforms"] or "default"):
        return jax.default_backend()


@contextmanager
def _naming(platform: str) -> Iterator[None]:
    """Turn jax's error about a platform without devices into `UnknownTarget`, with the remedy."""
    try:
        yield
    # jax raises AssertionError if JAX_PLATFORMS names only a platform without devices
    except (RuntimeError, AssertionError) as error:
        remedies = [] if platform == "cpu" else ["install the extra for it", "use --target cpu"]
        if chosen := jax.config.values["jax_platforms"]:
            remedies[:0] = [f"unset JAX_PLATFORMS, which lets jax start {chosen} alone"]
        remedy = ", or ".join(remedies)
        raise UnknownTarget(
            f"target: {platform!r} is not on this machine ({error or 'it has no devices'}). "
            f"{remedy[:1].upper()}{remedy[1:]}."
        ) from error


def _present(name: str, platform: str, count: int) -> Target:
    with _naming(platform):
        is_alone = jax.process_count() == 1
        devices = (jax.local_devices if is_alone else jax.devices)(backend=platform)
    if len(devices) < count or (not is_alone and len(devices) != count):
        remedy = "Ask for as many as there are."
        if platform == "cpu":
            remedy = (
                "Simulated devices are made before jax starts: set XLA_FLAGS="
                f"--xla_force_host_platform_device_count={count}."
            )
        raise UnknownTarget(
            f"target: {name} needs {count} devices, got {len(devices)} of kind {platform}. {remedy}"
        )
    return Target(name, platform, tuple(devices[:count]), is_present=True)


def _tpu_topology(name: str, rest: str) -> Target:
    from jax.experimental import topologies

    # without this, libtpu asks a metadata server that exists only on Google's machines
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # compiling needs no TPU, so other processes may use libtpu at the same time
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # the two cores of a v4 chip are one device, as on Google's machines, only with this option
    cores = {"chip_config_name": "megacore"} if rest.startswith("v4:") else {}
    try:
        with _LIBTPU:
            devices = topologies.get_topology_desc(rest, "tpu", **cores).devices
    except Exception as error:
        raise UnknownTarget(
            f"target: no topology {rest!r} ({error}). Expected for example tpu:v5e:2x4; "
            f"compiling for absent TPUs needs the package libtpu."
        ) from error
    return Target(name, "tpu", tuple(devices), is_present=False)


def _gpu_topology(name: str, kind: str, count: int) -> Target:
    from jax.experimental import topologies

    if kind not in GPU_KINDS or (topology := host_topology(count)) is None:
        raise UnknownTarget(
            f"target: no GPUs {name!r}. Expected for example gpu:h100:8: a kind of "
            f"{', '.join(GPU_KINDS)}, up to {GPUS_PER_HOST} of them or whole hosts of as many."
        )
    try:
        devices = topologies.get_topology_desc(
            name, "cuda", target_config=GPU_KINDS[kind].target_config(), topology=topology
        ).devices
        _probe(devices[0])
    except Exception as error:
        raise UnknownTarget(
            f"target: cannot compile for {name} here ({error}). Compiling for absent GPUs needs "
            f"jax's CUDA plugin, ptxas and libdevice: pip install 'noria[gpu-compile]'."
        ) from error
    return Target(name, "gpu", tuple(devices), is_present=False)


def _probe(device: Any) -> None:
    """Compile the smallest program that needs NVIDIA's assembler and device function library."""
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    with without_program_cache:
        jax.jit(jnp.exp).lower(number).compile()
