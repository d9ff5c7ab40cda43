"""Hardware that graphs are compiled for, present or not.

Knows nothing of models or grids. `cpu`, `gpu` and `tpu` are this machine's first device of that
kind; `tpu:<generation>:<topology>` (for example `tpu:v5e:2x4`) is a topology that need not be
present: graphs compile for it and report memory, and cannot run.
"""

import os
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)


class UnknownTarget(ValueError):
    """A target that cannot be parsed or is not there."""


@dataclass(frozen=True)
class Target:
    """Where graphs are compiled for, and how one array lies there (whole, on every device)."""

    name: str
    platform: str
    sharding: Sharding
    is_present: bool


def find_target(name: str) -> Target:
    """Parse a target's name and find its devices."""
    platform, colon, rest = name.partition(":")
    if platform not in ("cpu", "gpu", "tpu") or bool(colon) != bool(rest):
        raise UnknownTarget(
            f"target: expected cpu, gpu, tpu or tpu:<generation>:<topology>, got {name!r}."
        )
    if not rest:
        return _present(name, platform)
    if platform == "tpu":
        return _tpu_topology(name, rest)
    raise UnknownTarget(f"target: {platform} takes one device in this version, got {name!r}.")


def _present(name: str, platform: str) -> Target:
    try:
        device = jax.local_devices(backend=platform)[0]
    except RuntimeError as error:
        raise UnknownTarget(
            f"target: {platform!r} is not on this machine ({error}). Install the extra for it, "
            f"or use --target cpu."
        ) from error
    return Target(name, platform, SingleDeviceSharding(device), is_present=True)


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
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    return Target(name, "tpu", NamedSharding(mesh, PartitionSpec()), is_present=False)
