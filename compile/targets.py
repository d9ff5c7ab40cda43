"""Hardware for which graphs are compiled, present or not.

`cpu`, `gpu` and `tpu` are the first device of that kind on this machine, and `cpu:8` is eight
devices (simulated on the CPU, so any number is possible). With several processes they are the
devices of all processes. `tpu:<generation>:<topology>` (for example `tpu:v5e:2x4`) and
`gpu:<kind>:<n>` (`gpu:h100:8`) need not be present: `find_target` compiles graphs for them, which
report memory and collectives. On a machine with devices of the kind, `present_target` runs them.
Knows nothing of models or grids.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from ..modelzoo.moe_config import Tiles
from ..sharding.layout import Layout
from ..sharding.placement import Placement
from .device_kinds import kind_of
from .gpu_kinds import GPU_KINDS, host_topology
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
TILES_BY_KIND = {"v5p": Tiles(16, 256, mean_divisor=0.5, piece_bytes=None)}
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
    """Parse a target's name and find its devices, to compile for them.

    Devices of a kind are taken as absent. If jax has not started, it then starts the CPU alone, as
    the backend of an absent device cannot start.

    Raises:
      UnknownTarget: The name is none, or there are no such devices.
    """
    parsed = TargetName.parse(name)
    if not parsed.kind:
        return _present(name, parsed)
    if not jax.config.values["jax_platforms"]:
        jax.config.update("jax_platforms", "cpu")
    if parsed.platform == "tpu":
        return _tpu_topology(name, parsed)
    return _gpu_topology(name, parsed)


def present_target(name: str) -> Target:
    """Parse a target's name and find its devices on this machine, to run on them.

    Raises:
      UnknownTarget: The name is none, or the devices here are fewer, or of another kind or
        topology.
    """
    parsed = TargetName.parse(name)
    target = _present(name, parsed)
    found, shape = kind_of(target.devices), _shape(target.devices)
    is_shape = not parsed.torus or not shape or shape == _without_ones(parsed.torus)
    if parsed.kind and (found != parsed.kind or not is_shape):
        raise UnknownTarget(
            f"target: expected the devices of {name}, got {_description(target.devices)}. Use a "
            f"machine with its devices, plan again for those of this one, or use "
            f"--target {parsed.platform}:{parsed.num_devices} to run here as planned."
        )
    return target


def _shape(devices: Sequence[Any]) -> list[int]:
    """The sizes of a slice by the coordinates of its chips; empty if these are unknown."""
    if any(getattr(device, "coords", None) is None for device in devices):
        return []
    along = zip(*(device.coords for device in devices), strict=True)
    return _without_ones([len(set(positions)) for positions in along])


def _without_ones(sizes: Sequence[int]) -> list[int]:
    """The sizes in order of size, without those of 1, which nothing depends on."""
    return sorted(size for size in sizes if size > 1) or [1]


def _description(devices: Sequence[Any]) -> str:
    """The number of devices, their names, their kind if it is known, and their topology."""
    names = ", ".join(sorted({device.device_kind for device in devices}))
    facts = [kind_of(devices) or "of no known kind", "x".join(map(str, _shape(devices)))]
    return f"{len(devices)} x {names} ({', '.join(filter(None, facts))})"


@contextmanager
def _naming(name: str, parsed: TargetName) -> Iterator[None]:
    """Turn jax's error about a platform without devices into `UnknownTarget`, with the remedy."""
    try:
        yield
    # jax raises AssertionError if JAX_PLATFORMS names only a platform without devices
    except (RuntimeError, AssertionError) as error:
        other = "plan again for this machine" if parsed.kind else "use --target cpu"
        remedies = [] if parsed.platform == "cpu" else ["install the extra for it", other]
        if chosen := jax.config.values["jax_platforms"]:
            remedies[:0] = [f"unset JAX_PLATFORMS, which lets jax start {chosen} alone"]
        remedy = ", or ".join(remedies)
        raise UnknownTarget(
            f"target: {name!r} is not on this machine ({error or 'it has no devices'}). "
            f"{remedy[:1].upper()}{remedy[1:]}."
        ) from error


def _present(name: str, parsed: TargetName) -> Target:
    platform, count = parsed.platform, parsed.num_devices
    with _naming(name, parsed):
        is_alone = jax.process_count() == 1
        devices = (jax.local_devices if is_alone else jax.devices)(backend=platform)
    if len(devices) < count or (not is_alone and len(devices) != count):
        remedy = "Ask for as many as there are."
        if platform == "cpu":
            remedy = (
                "Simulated devices are made before jax starts: set XLA_FLAGS="
                f"--xla_force_host_platform_device_count={count}."
            )
        here = _description(devices) if parsed.kind else f"{len(devices)} of kind {platform}"
        raise UnknownTarget(f"target: {name} needs {count} devices, got {here}. {remedy}")
    return Target(name, platform, tuple(devices[:count]), is_present=True)


def _tpu_topology(name: str, parsed: TargetName) -> Target:
    from jax.experimental import topologies

    # without this, libtpu asks a metadata server that exists only on Google's machines
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # compiling needs no TPU, so other processes may use libtpu at the same time
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    options: dict[str, Any] = {}
    if parsed.kind == "v4":  # its two cores are one device, as on Google's machines
        options["chip_config_name"] = "megacore"
    if parsed.num_devices == 1:  # else hosts have a block of 2x2 chips
        options["chips_per_host_bounds"] = [1, 1, 1]
    topology = name.removeprefix("tpu:")
    try:
        with _LIBTPU:
            devices = topologies.get_topology_desc(topology, "tpu", **options).devices
    except Exception as error:
        raise UnknownTarget(
            f"target: no topology {topology!r} ({error}). Expected for example tpu:v5e:2x4; "
            f"compiling for absent TPUs needs the package libtpu."
        ) from error
    return Target(name, "tpu", tuple(devices), is_present=False)


def _gpu_topology(name: str, parsed: TargetName) -> Target:
    from jax.experimental import topologies

    if parsed.kind not in GPU_KINDS:
        raise UnknownTarget(
            f"target: no GPUs {name!r}. Expected for example gpu:h100:8: a kind of "
            f"{', '.join(GPU_KINDS)}."
        )
    config, topology = GPU_KINDS[parsed.kind].target_config(), host_topology(parsed.num_devices)
    try:
        devices = topologies.get_topology_desc(
            name, "cuda", target_config=config, topology=topology
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
