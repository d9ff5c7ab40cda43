"""Describes this machine, so that readers can judge measurements made on it.

Does not know about models or requests. Guarantees: imports nothing heavy, and asks jax for devices
only if jax is already imported.
"""

import os
import platform
import resource
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The file with the limit of a container."""
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, load, devices, system and versions, as a dict for JSON."""
    facts = _processor_facts()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": facts.get("model name") or platform.processor() or platform.machine(),
        "instructions": instructions(),
        "cores": usable_cores(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "devices": _devices(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions(),
    }


def processor_flags() -> str:
    """The processor's name and instruction set flags, as far as the system reports them."""
    facts = _processor_facts()
    return f"{platform.machine()} {facts.get('model name', '')} {facts.get('flags', '')}".strip()


def instructions() -> list[str]:
    """The instruction sets of the processor that determine the speed of matrix products."""
    flags = _processor_facts().get("flags", "").split()
    return [name for name in _INSTRUCTIONS if name in flags]


def faster_dtype(platform: str) -> str:
    """The dtype with the fastest matrix products.

    It is bfloat16 on TPU and GPU, and on CPUs with AMX. It is also bfloat16 on AMD's CPUs with
    `avx512_bf16`, where these products are twice as fast as those of float32. On Intel's they take
    twice as long: XLA makes 198 GFLOP/s in bfloat16 and 389 in float32 on two cores without AMX.
    """
    found = set(instructions())
    is_fast = "amx_bf16" in found or ("avx512_bf16" in found and vendor() == "AuthenticAMD")
    return "bfloat16" if platform != "cpu" or is_fast else "float32"


def vendor() -> str | None:
    """The vendor of the processor as it names itself; None if it is unknown."""
    return _processor_facts().get("vendor_id")


def _processor_facts() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    pairs = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def usable_cores() -> int | None:
    """The number of cores that this process may run on; None if it is unknown."""
    # a container or taskset may leave fewer cores than the machine has
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _devices() -> list[str]:
    jax = sys.modules.get("jax")
    return [] if jax is None else [device.device_kind for device in jax.devices()]


def versions() -> dict[str, str]:
    """The versions of installed packages that affect results; imports none of them."""
    names = ("noria", "jax", "jaxlib", "flax", "numpy", "tokenizers", "sentencepiece")
    installed = {}
    for name in names:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def host_bytes() -> int:
    """The memory that this process may have in bytes; 0 if it is not known."""
    limits = []
    with suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError):
        # "max" is no number
        limits.append(int(_CGROUP_LIMIT.read_text("ascii")))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits += [] if soft == resource.RLIM_INFINITY else [soft]
    return min(limits, default=0)
