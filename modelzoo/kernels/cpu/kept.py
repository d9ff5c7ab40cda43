"""Compiles the kernels once, keeps their object code, loads it, and registers it with jax.

Object code is kept by processor, by the sources of the kernels and by the versions of the tools
that compile them. It is loaded without numba. Whoever can write the folder can run code in the
process, so the caller checks whose it is.

Guarantees: object code that is damaged, or that was compiled for anything else, is compiled anew;
kernels are registered once a process.
"""

import ctypes
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
from threading import Lock
from typing import Any, NamedTuple

import jax

from . import VERSIONS

EXTRA = "pip install 'noria[cpu]'"
_FLAG = "avx512f"
_PROCESSORS = {
    "x86_64": ("avx2", "fma"),
    "AMD64": ("avx2", "fma"),
    "aarch64": ("neon",),
    "arm64": ("neon",),
}
"""The features that vectors need, by the name of the architecture."""
_STUBS = "numba_", "NRT_", "Py"
"""The beginnings of the names of functions that only a kernel that raises an error calls."""
_lock = Lock()
_engines: list[Any] = []
"""What owns the code that is registered."""


class Processor(NamedTuple):
    """What object code is compiled for."""

    name: str
    features: str
    """LLVM's features: each with a sign, with commas between them."""

    @classmethod
    def here(cls) -> "Processor":
        """The processor of this machine."""
        import llvmlite.binding as llvm

        return cls(llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())

    def has(self, feature: str) -> bool:
        """Whether it has a feature."""
        return f"+{feature}" in self.features.split(",")


def refusal() -> str | None:
    """The reason why kernels cannot be loaded here, or None if they can."""
    if any(find_spec(name) is None for name in ("numba", "llvmlite")):
        return f"they need numba ({EXTRA})"
    needed = _PROCESSORS.get(platform.machine())
    if needed is None:
        return f"they serve x86-64 and ARM of 64 bits, got {platform.machine()}"
    here = Processor.here()
    missing = [feature for feature in needed if not here.has(feature)]
    if missing:
        return f"they need a processor with {' and '.join(needed)}, got one without {missing[0]}"
    if (version := _interface_version()) not in VERSIONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in VERSIONS)
        found = "none" if version is None else f"{version[0]}.{version[1]}"
        return f"they know versions {known} of XLA's interface, got {found}"
    return None


def is_loaded() -> bool:
    """Whether the kernels are registered in this process."""
    return bool(_engines)


def load(folder: Path | None = None, on_compile: Callable[[], None] = lambda: None) -> str | None:
    """Register the kernels, which compile if no object code of them is kept.

    Args:
      folder: The folder of kept object code, which only the user can write; None to keep nothing.
      on_compile: Called before a compile, which takes about ten seconds.

    Returns:
      The reason why there are none; None if they are registered.
    """
    with _lock:
        if is_loaded():
            return None
        if (reason := refusal()) is not None:
            return reason
        processor = Processor.here()
        key = key_of(processor)
        code = None if folder is None else _read(_path(folder, key), key)
        if code is None:
            on_compile()
            code = compile_all(processor)
            if folder is not None:
                _write(_path(folder, key), key, code)
        register(code)
    return None


def key_of(processor: Processor) -> str:
    """Everything that object code depends on, as JSON."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    versions = {name: metadata.version(name) for name in ("numba", "llvmlite")}
    return json.dumps([digest.hexdigest(), versions, *processor], sort_keys=True)


def names() -> list[str]:
    """The names of all kernels among XLA's foreign functions."""
    return ["noria_attend_pages"]


def compile_all(processor: Processor) -> bytes:
    """The object code of all kernels."""
    import llvmlite.binding as llvm

    from .attention import attention_kernel
    from .threads import compile_kernel
    from .vectors import Width

    width = Width(16, 4) if processor.has(_FLAG) else Width(8, 2)
    if processor.has("neon"):
        width = Width(4, 4)
    module = llvm.parse_assembly("")
    for kernel in (attention_kernel(width),):
        compiled = compile_kernel(kernel)
        for part in (compiled.task, compiled.handler):
            module.link_in(llvm.parse_assembly(part.inspect_llvm()))
        module.get_function(compiled.handler.native_name).name = kernel.name
    return _machine(processor).emit_object(module)


def register(code: bytes) -> None:
    """Load object code into this process, and make its kernels known to jax."""
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(Processor.here()))
    abort = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
    for name in _stubs(code):
        llvm.add_symbol(name, abort)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    for name in names():
        address = ctypes.c_void_p(engine.get_function_address(name))
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform="cpu")
    _engines.append(engine)


def _machine(processor: Processor) -> Any:
    """LLVM's description of a processor."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(*processor, opt=3, jit=True)


def _stubs(code: bytes) -> set[str]:
    """The names in object code of functions that are never called, as kernels raise nothing."""
    found = re.findall(rb"(?<=\0)(?:" + "|".join(_STUBS).encode() + rb")\w+(?=\0)", code)
    return {name.decode() for name in found}


def _interface_version() -> tuple[int, int] | None:
    """The version of XLA's interface for foreign functions, by the header of jaxlib."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    found = re.findall(r"define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header.read_text("utf-8"))
    return (int(found[0]), int(found[1])) if len(found) == 2 else None


def _path(folder: Path, key: str) -> Path:
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.kernels"


def _read(path: Path, key: str) -> bytes | None:
    """Kept object code; None if there is none, or if it is damaged."""
    with suppress(OSError, ValueError):
        head, _, code = path.read_bytes().partition(b"\n")
        if json.loads(head) == [key, hashlib.sha256(code).hexdigest()]:
            return code
    return None


def _write(path: Path, key: str, code: bytes) -> None:
    """Keep object code, unless the disk does not let it."""
    head = json.dumps([key, hashlib.sha256(code).hexdigest()]).encode()
    with suppress(OSError):
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(head + b"\n" + code)
        Path(name).replace(path)
