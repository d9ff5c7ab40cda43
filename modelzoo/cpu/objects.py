"""Compiles the kernels to object code, loads it without numba, and registers it with jax.

Knows nothing of files: who keeps object code must know who has written it, and for what it was
compiled. Guarantees: kernels are registered once a process.
"""

# numba is an extra
# pyright: reportMissingImports=false

import ctypes
import re
from threading import Lock
from typing import Any

from . import CODE_PRODUCT, NAMES, product_name
from .processor import Processor

_STUBS = rb"(?<=\0)(?:numba_|NRT_|Py)\w+(?=\0)"
"""The names in object code of functions that only a kernel that raises an error calls."""
_lock = Lock()
_engines: list[Any] = []
"""The owner of the code that is registered, once it is."""
_is_used = False


def is_loaded() -> bool:
    """Whether graphs may call the kernels, which are registered in this process."""
    return _is_used


def panel_columns() -> int | None:
    """The columns of the panels of weights that the kernels read; None if they are not loaded."""
    return Processor.here().width.columns if _is_used else None


def code_lanes() -> int | None:
    """The lanes of products of codes; None if the kernels are not loaded, or have none."""
    if not _is_used or not Processor.here().has_code_products:
        return None
    return Processor.here().width.lanes


def kernel_names() -> tuple[str, ...]:
    """The names of the kernels that this processor has."""
    lacking = () if Processor.here().has_code_products else (product_name(*CODE_PRODUCT),)
    return tuple(name for name in NAMES if name not in lacking)


def compile_all(processor: Processor) -> bytes:
    """The object code of all kernels, which takes about 15 seconds."""
    import llvmlite.binding as llvm

    from .attention import attention_kernels
    from .lines import put_kernel, take_kernel
    from .memory import C_FUNCTIONS
    from .products import product_kernels
    from .threads import compile_kernel

    products = product_kernels(processor)
    kernels = (*attention_kernels(processor), *products, put_kernel(), take_kernel())
    handlers = {kernel.name: compile_kernel(kernel) for kernel in kernels}
    module = llvm.parse_assembly("")
    for function in C_FUNCTIONS.values():
        module.link_in(llvm.parse_assembly(function.inspect_llvm()))
    for name, handler in handlers.items():
        module.get_function(handler).name = name
    return _machine(processor).emit_object(module)


def register(code: bytes) -> None:
    """Load object code for this processor, and make its kernels known to jax."""
    import jax
    import llvmlite.binding as llvm

    global _is_used
    with _lock:
        if _engines:
            _is_used = True
            return
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(Processor.here()))
        abort = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
        for name in set(re.findall(_STUBS, code)):
            llvm.add_symbol(name.decode(), abort)
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        for name in kernel_names():
            address = ctypes.c_void_p(engine.get_function_address(name))
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform="cpu")
        _engines.append(engine)
        _is_used = True


def _machine(processor: Processor) -> Any:
    """LLVM's description of a processor."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(*processor, opt=3, jit=True)
