"""Hardware that graphs are compiled for, present or not.

Knows nothing of models or grids. `cpu`, `gpu` and `tpu` are this machine's first device of that
kind, `cpu:8` eight of them (on the CPU simulated, so any number); with several processes they are
the devices of all. `tpu:<generation>:<topology>` (for example `tpu:v5e:2x4`) is a topology that
need not be present: graphs compile for it and report memory and collectives, and cannot run.
"""

import os
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ..sharding.layout import Layout
from ..sharding.placement import Placement

EXPERT_TILES = {"cpu": (4, 64), "gpu": (16, 128), "tpu": (8, 128)}
"""The fewest and the most rows of one product of an expert: a register tile's (TPU: sublanes of
float32; GPU: a tensor core's), and those of one pass of the matrix unit, past which a larger tile
gains no speed; a CPU's products are at full speed from 32 to 64 rows."""


class UnknownTarget(ValueError):
    """A target that cannot be parsed or is not there."""


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
    platform, colon, rest = name.partition(":")
    if platform not in ("cpu", "gpu", "tpu") or bool(colon) != bool(rest):
        raise _unknown(name)
    if platform == "tpu" and ":" in rest:
        return _tpu_topology(name, rest)
    if rest and not (rest.isascii() and rest.isdigit() and int(rest) > 0):
        raise _unknown(name)
    return _present(name, platform, int(rest or 1))


def num_simulated(name: str) -> int:
    """How many devices of the CPU a target asks for; 1 for other targets."""
    platform, _, rest = name.partition(":")
    return int(rest) if platform == "cpu" and rest.isascii() and rest.isdigit() else 1


def _unknown(name: str) -> UnknownTarget:
    return UnknownTarget(
        f"target: expected cpu, gpu, tpu, a number of them (cpu:8) or "
        f"tpu:<generation>:<topology>, got {name!r}."
    )


def _present(name: str, platform: str, count: int) -> Target:
    is_alone = jax.process_count() == 1
    try:
        devices = (jax.local_devices if is_alone else jax.devices)(backend=platform)
    except RuntimeError as error:
        raise UnknownTarget(
            f"target: {platform!r} is not on this machine ({error}). Install the extra for it, "
            f"or use --target cpu."
        ) from error
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
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=rest).devices
    except Exception as error:
        raise UnknownTarget(
            f"target: no topology {rest!r} ({error}). Expected for example tpu:v5e:2x4; "
            f"compiling for absent TPUs needs the package libtpu."
        ) from error
    return Target(name, "tpu", tuple(devices), is_present=False)
