"""The default target: this machine's accelerator if it has one, else the CPU.

A job needs its target before it imports jax, because the target is part of the configuration by
which it recognises finished output. So the target is derived from device files and installed
packages, in jax's own order: the platform in `JAX_PLATFORMS`, a TPU, a GPU, the CPU. If a driver is
broken, the job later fails for lack of the device; it never falls back to the CPU.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

TPU_DEVICES = ("accel[0-9]*", "vfio/[0-9]*")
GPU_DEVICES = ("nvidia[0-9]*", "dxg")
"""Device files of GPUs; `dxg` is the GPU device of WSL."""
TPU_PLUGINS = ("libtpu",)
GPU_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_TARGETS = {"cuda": "gpu", "rocm": "gpu"}
"""The names of targets for jax's platforms with other names."""


def default_target(devices: Path = Path("/dev")) -> str:
    """The platform of the default target: `tpu`, `gpu`, `cpu`, or the first of `JAX_PLATFORMS`."""
    if chosen := _chosen_platforms().partition(",")[0]:
        return _TARGETS.get(chosen, chosen)
    if _has(devices, TPU_DEVICES) and _is_installed(TPU_PLUGINS):
        return "tpu"
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not is_hidden and _has(devices, GPU_DEVICES) and _is_installed(GPU_PLUGINS):
        return "gpu"
    return "cpu"


def _chosen_platforms() -> str:
    """The platforms that the user chose in the environment, or in jax's settings if it is there."""
    if (jax := sys.modules.get("jax")) is not None:
        return jax.config.values["jax_platforms"] or ""
    return os.environ.get("JAX_PLATFORMS", "")


def _has(devices: Path, patterns: tuple[str, ...]) -> bool:
    return any(any(devices.glob(pattern)) for pattern in patterns)


def _is_installed(modules: tuple[str, ...]) -> bool:
    """Whether any of the modules is installed; none is imported, because plugins start devices."""
    return any(_can_find(module) for module in modules)


def _can_find(module: str) -> bool:
    parent, _, _ = module.rpartition(".")
    return (not parent or find_spec(parent) is not None) and find_spec(module) is not None
