"""Loads the kernels for the CPU, and keeps their object code beside compiled programs.

Object code is kept by processor, by the sources of the kernels and by the versions of the tools
that compile them. Guarantees: object code that is damaged, or that was compiled for anything else,
is compiled anew; a job without kernels says why in one line.
"""

import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ...compile.target_names import TargetName
from ...modelzoo import cpu
from ...modelzoo.cpu.objects import compile_all, is_loaded, register
from ...modelzoo.cpu.processor import Processor
from ..errors import CacheUnusable
from ..files.file_checks import default_directory
from .compilation_cache import make_folder

FOLDER = "kernels"
"""The name of the folder, beside those of programs."""
EXTRA = "pip install 'noria[cpu]'"
TOOLS = "numba", "llvmlite"
FEATURES = {
    "x86_64": ("avx2", "fma"),
    "AMD64": ("avx2", "fma"),
    "aarch64": ("neon",),
    "arm64": ("neon",),
}
"""The features of processors that kernels need, by the name of the architecture."""


def load_kernels(target: str, on_note: Callable[[str], object]) -> None:
    """Load the kernels for the CPU if a target is one; they compile if none are kept.

    Args:
      target: The target's name.
      on_note: Called with a line before kernels compile, and with one if there are none.
    """
    if TargetName.parse(target).platform != "cpu" or is_loaded():
        return
    if (reason := refusal()) is not None:
        on_note(f"calls without the kernels for the CPU, which takes longer: {reason}")
        return
    processor = Processor.here()
    key = key_of(processor)
    path = _path(key)
    code = None if path is None else read(path, key)
    if code is None:
        on_note("compiling kernels for this processor, which takes about 15 s, once")
        code = compile_all(processor)
        if path is not None:
            write(path, key, code)
    register(code)


def kernels_of(target: str) -> str:
    """The words after a target's name that say whether kernels serve it; sums have their order."""
    is_cpu = target.partition(":")[0] == "cpu"
    return " with kernels" if is_cpu and refusal() is None else ""


def refusal() -> str | None:
    """The reason why kernels cannot be loaded here, or None if they can."""
    if any(find_spec(name) is None for name in TOOLS):
        return f"they need numba ({EXTRA})"
    needed = FEATURES.get(platform.machine())
    if needed is None:
        return f"they serve x86-64 and ARM of 64 bits, got {platform.machine()}"
    here = Processor.here()
    missing = [feature for feature in needed if not here.has(feature)]
    if missing:
        return f"they need a processor with {' and '.join(needed)}, got none with {missing[0]}"
    if (version := _interface_version()) not in cpu.VERSIONS:
        known, found = (
            ", ".join(f"{major}.{minor}" for major, minor in versions)
            for versions in (cpu.VERSIONS, [version] if version else [])
        )
        return f"they know versions {known} of XLA's interface, got {found or 'none'}"
    return None


def key_of(processor: Processor) -> str:
    """Everything that object code depends on, as JSON."""
    digest = hashlib.sha256()
    for path in sorted(Path(next(iter(cpu.__path__))).glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    versions = {name: metadata.version(name) for name in TOOLS}
    return json.dumps([digest.hexdigest(), versions, *processor], sort_keys=True)


def read(path: Path, key: str) -> bytes | None:
    """Kept object code; None if there is none for this key, or if it is damaged."""
    with suppress(OSError, ValueError):
        head, _, code = path.read_bytes().partition(b"\n")
        if json.loads(head) == [key, hashlib.sha256(code).hexdigest()]:
            return code
    return None


def write(path: Path, key: str, code: bytes) -> None:
    """Keep object code, unless the disk does not let it."""
    head = json.dumps([key, hashlib.sha256(code).hexdigest()]).encode()
    with suppress(OSError):
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(head + b"\n" + code)
        Path(name).replace(path)


def _path(key: str) -> Path | None:
    """The file of object code; None if nothing can be kept, as `compilation_cache` has said."""
    try:
        folder = default_directory().with_name(FOLDER)
        make_folder(folder)
    except CacheUnusable:
        return None
    return folder / hashlib.sha256(key.encode()).hexdigest()[:32]


def _interface_version() -> tuple[int, int] | None:
    """The version of XLA's interface for foreign functions, by the header of jaxlib."""
    jaxlib = find_spec("jaxlib")
    if jaxlib is None or jaxlib.origin is None:
        return None
    # where `jax.ffi.include_dir` says, without an import of jax
    header = Path(jaxlib.origin).parent / "include" / "xla" / "ffi" / "api" / "c_api.h"
    found = re.findall(r"define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header.read_text("utf-8"))
    return (int(found[0]), int(found[1])) if len(found) == 2 else None
