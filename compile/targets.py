"""Hardware that graphs are compiled for, present or not.

Knows nothing of models or grids. `cpu`, `gpu` and `tpu` are this machine's first device of that
kind, `cpu:8` eight of them (on the CPU simulated, so any number); with several processes they are
the devices of all. `tpu:<generation>:<topology>` (for example `tpu:v5e:2x4`) and `gpu:<kind>:<n>`
(`gpu:h100:8`) need not be present: graphs compile for them and report memory and collectives, and
cannot run.
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
from .program_cache import anew
from .target_names import TargetName, UnknownTarget

EXPERT_TILES = {
    "cpu": Tiles(),
    "gpu": Tiles(16, 128),
    "tpu": Tiles(64, 256, of_mean=1, piece_bytes=None),
}
"""Sizes of the products of experts. The fewest rows are a register tile's, or a tensor core's. A
CPU's products are at full speed from 32 to 64 rows; half and twice as many bytes of a piece are
equally fast with 2 MiB of L2. A TPU's products read weights from main memory as fast as it goes, at
a third of the cycles that a copy onto the chip takes by its compiler's estimate. Meanwhile they
compute 240 rows or more, so an expert with up to 64 tokens takes one tile and one reading."""
TILES_BY_KIND = dict.fromkeys(("TPU v5", "TPU v5p"), Tiles(16, 256, of_mean=0.5, piece_bytes=None))
"""Those of kinds of devices that differ from their platform's. On v5p rows of a tile cost bytes:
its two cores have memories of their own on the chip, so XLA writes the result of every product to
main memory (`benchmarks/v5p.md`). Twice the mean load is one tile still, as most loads are."""

_LIBTPU = threading.Lock()
"""Held while jax may load libtpu: two threads that do so at once end with an error."""


@dataclass(frozen=True)
class Target:
    """The devices that graphs are compiled for, in order."""

    name: str
    platform: str
    devices: tuple[Any, ...]
    is_present: bool

    def placement(self, layout: Layout | None = None) -> Placement:
        """Where a model lies on these devices; without a layout whole on each of them."""
        if layout is not None:
            return Placement(layout.mesh.build(self.devices), self.platform, layout)
        mesh = Mesh(np.array(self.devices), ("data",), axis_types=(AxisType.Auto,))
        return Placement(mesh, self.platform)


def find_target(name: str) -> Target:
    """Parse a target's name and find its devices."""
    found = TargetName.of(name)
    if not found.kind:
        return _present(name, found.platform, found.num_devices)
    if found.platform == "tpu":
        return _tpu_topology(name, name.removeprefix("tpu:"))
    return _gpu_topology(name, found.kind, found.num_devices)


def default_platform() -> str:
    """The platform that jax runs on when no target is named."""
    with _naming(jax.config.values["jax_platforms"] or "default"):
        return jax.default_backend()


@contextmanager
def _naming(platform: str) -> Iterator[None]:
    """Turn jax's error about a platform without devices into `UnknownTarget`, with the remedy."""
    try:
        yield
    # jax raises the latter if JAX_PLATFORMS names only a platform without devices
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

    # without this libtpu asks a metadata server that only exists on Google's machines
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # compiling takes no TPU, so it need not be the machine's only process with libtpu
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # the two cores of a v4 chip are one device, as on Google's machines, only if that is asked for
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
    """Compile the least that NVIDIA's assembler and library of device functions are needed for."""
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    with anew:
        jax.jit(jnp.exp).lower(number).compile()
