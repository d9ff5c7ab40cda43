"""Compiles the kernels to object code, loads it without numba, and registers it with jax.

Knows nothing of files: who keeps object code must know who has written it, and for what it was
compiled. Guarantees: kernels are registered once a process.
"""

# numba is an extra
# pyright: reportMissingImports=false

import ctypes
import re
from threading import Lock
from typing import Any, NamedTuple

from . import ATTEND_PAGES

_STUBS = rb"(?<=\0)(?:numba_|NRT_|Py)\w+(?=\0)"
"""The names in object code of functions that only a kernel that raises an error calls."""
_lock = Lock()
_engines: list[Any] = []
"""The owner of the code that is registered, once it is."""
_is_used = False


class Processor(NamedTuple):
    """A processor for which object code is compiled."""

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


def is_loaded() -> bool:
    """Whether graphs may call the kernels, which are registered in this process."""
    return _is_used


def compile_all(processor: Processor) -> bytes:
    """The object code of all kernels, which takes about ten seconds."""
    import llvmlite.binding as llvm

    from .attention import attention_kernel
    from .threads import compile_kernel
    from .vectors import Width

    width = Width(8, 2)
    if processor.has("avx512f"):
        width = Width(16, 4)
    elif processor.has("neon"):
        width = Width(4, 4)
    module = llvm.parse_assembly("")
    kernel = attention_kernel(width)
    compiled = compile_kernel(kernel)
    for part in (compiled.task, compiled.handler):
        module.link_in(llvm.parse_assembly(part.inspect_llvm()))
    module.get_function(compiled.handler.native_name).name = kernel.name
    return _machine(processor).emit_object(module)


def register(code: bytes) -> None:
    """Load object code for this processor, and make its kernels known to jax."""
    import jax
    import llvmlite.binding as llvm

    global _is_used
    with _lock:
        _is_used = True
        if _engines:
            return
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(Processor.here()))
        abort = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
        for name in set(re.findall(_STUBS, code)):
            llvm.add_symbol(name.decode(), abort)
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        address = ctypes.c_void_p(engine.get_function_address(ATTEND_PAGES))
        jax.ffi.register_ffi_target(ATTEND_PAGES, jax.ffi.pycapsule(address), platform="cpu")
        _engines.append(engine)


def _machine(processor: Processor) -> Any:
    """LLVM's description of a processor."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(*processor, opt=3, jit=True)
