"""The key of executables: everything that they depend on, stored with them and compared before use.

Reads the sources of the library, but no file of a bundle.
"""

import hashlib
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import jax

from ... import compile as compile_floor
from ... import modelzoo, sharding
from ...compile.plan import Plan
from ...compile.targets import Target
from ...modelzoo.config import DecoderConfig
from ...modelzoo.cpu.objects import is_loaded
from ...modelzoo.cpu.processor import Processor
from ..devices.machine import processor_flags, versions
from ..errors import BundleUnusable
from ..files.differences import differences
from ..plans.plan_facts import plan_facts
from .cpu_kernels import key_of as key_of_kernels

_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_HARMLESS = ("cache", "log", "platforms", "traceback")
"""Parts of the names of those jax settings that do not change programs."""


def key_of(plan: Plan, target: Target, config: DecoderConfig) -> dict[str, str]:
    """Everything that the executables of a plan depend on."""
    return surroundings(target, config) | {"plan": plan_facts(plan)}


def surroundings(target: Target, config: DecoderConfig) -> dict[str, str]:
    """Everything except the plan that an executable depends on."""
    device = target.devices[0]
    return {
        **{f"version of {name}": number for name, number in versions().items()},
        "compiler": str(device.client.platform_version),
        "devices": f"{len(target.devices)} x {device.device_kind}",
        "coordinates": repr([getattr(device, "coords", None) for device in target.devices]),
        "process": f"{jax.process_index()} of {jax.process_count()}",
        # code for a CPU uses the instruction sets of the processor that compiled it
        "processor": digest(processor_flags()) if target.platform == "cpu" else "",
        "kernels for the CPU": _cpu_kernels(target),
        **{name: os.environ.get(name, "") for name in _FLAGS},
        "settings of jax": _settings(),
        "sources": _source_fingerprint(),
        "model": digest(repr(config)),
    }


def _cpu_kernels(target: Target) -> str:
    """A hash of the kernels that programs for the CPU call; empty if they call none."""
    if target.platform != "cpu" or not is_loaded():
        return ""
    return digest(key_of_kernels(Processor.here()))


def check_key(built_for: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Check that executables were built under the wanted key.

    Raises:
      BundleUnusable: The keys differ; the error lists every difference.
    """
    if lines := differences(built_for, wanted, ("then", "now")):
        listed = "; ".join(line.strip() for line in lines)
        raise BundleUnusable(f"it was built for something else ({listed})")


def _settings() -> str:
    """A hash of jax's settings, as many of them change programs."""
    names = sorted(name for name in jax.config.values if not any(x in name for x in _HARMLESS))
    return digest(repr([(name, jax.config.values[name]) for name in names]))


@cache
def _source_fingerprint() -> str:
    """A hash of all source files that graphs depend on."""
    digest = hashlib.sha256()
    for package in (modelzoo, sharding, compile_floor):
        root = Path(next(iter(package.__path__)))
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{package.__name__} {path.relative_to(root)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def digest(text: str) -> str:
    """The SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
