"""The target of those who name none: this machine's accelerator, where there is one, or the CPU.

A job looks at its rows and at what is finished before it imports jax, and its target is among the
things that it is known by. So the answer comes from what the system and the installed packages say,
and is jax's own: what the user chose with `JAX_PLATFORMS`, a TPU, a GPU, the CPU. Where a driver is
broken the job says that there is no such device; it never falls back to the CPU.
"""

import os
from importlib.util import find_spec
from pathlib import Path

TPU_DEVICES = ("accel[0-9]*", "vfio/[0-9]*")
GPU_DEVICES = ("nvidia[0-9]*", "dxg")
"""The latter on WSL."""
TPU_PLUGINS = ("libtpu",)
GPU_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_TARGETS = {"cuda": "gpu", "rocm": "gpu"}
"""Of jax's platforms that targets call otherwise."""


def default_target(devices: Path = Path("/dev")) -> str:
    """`tpu`, `gpu` or `cpu`."""
    if chosen := os.environ.get("JAX_PLATFORMS", "").partition(",")[0]:
        return _TARGETS.get(chosen, chosen)
    if _has(devices, TPU_DEVICES) and _is_installed(TPU_PLUGINS):
        return "tpu"
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not is_hidden and _has(devices, GPU_DEVICES) and _is_installed(GPU_PLUGINS):
        return "gpu"
    return "cpu"


def _has(devices: Path, patterns: tuple[str, ...]) -> bool:
    return any(any(devices.glob(pattern)) for pattern in patterns)


def _is_installed(modules: tuple[str, ...]) -> bool:
    """Whether any is there; none is imported, as plugins start devices."""
    return any(_is_there(module) for module in modules)


def _is_there(module: str) -> bool:
    parent, _, _ = module.rpartition(".")
    return (not parent or find_spec(parent) is not None) and find_spec(module) is not None
