"""Numbers at addresses, for functions that numba compiles: loads, stores, counters, C functions.

An address is an integer. Nothing here checks one: callers know which memory they own.
"""

# numba is an extra
# pyright: reportMissingImports=false

import inspect
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()


def native(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function when a compiled one first calls it.

    It must raise nothing: a number that is divided by zero is no error in it.
    """
    made = numba.njit(error_model="numpy", **options)
    return made if function is None else made(function)


C_FUNCTIONS: dict[Callable[..., int], Any] = {}
"""All functions that `c_function` has compiled. Object code has them all."""


def c_function(function: Callable[..., int]) -> Any:
    """Compile a function of integers that C can call, and that returns an integer, once."""
    if function not in C_FUNCTIONS:
        signature = types.intp(*[types.intp] * len(inspect.signature(function).parameters))
        options: dict[str, Any] = {"nopython": True, "error_model": "numpy"}
        C_FUNCTIONS[function] = numba.cfunc(signature, **options)(function)
    return C_FUNCTIONS[function]


def intrinsic(function: Callable[..., Any]) -> Any:
    """Make a function of the LLVM code that it stands for; it has one argument less."""
    return extending.intrinsic(function)


def pointer(builder: Any, address: Any, pointee: ir.Type) -> Any:
    """The pointer with an address."""
    return builder.inttoptr(address, pointee.as_pointer())


def _loader(pointee: ir.Type) -> Any:
    """A function that loads a number from an address; integers are extended with their sign."""
    result = types.float32 if pointee == F32 else types.intp

    @intrinsic
    def load(typing: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            loaded = builder.load(pointer(builder, args[0], pointee), align=4)
            return builder.sext(loaded, I64) if pointee == I32 else loaded

        return result(types.intp), code

    return load


def _storer(pointee: ir.Type) -> Any:
    """A function that stores a number at an address; integers lose their upper bits."""
    given = types.float32 if pointee == F32 else types.intp

    @intrinsic
    def store(typing: Any, address: Any, number: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            stored = builder.trunc(args[1], I32) if pointee == I32 else args[1]
            builder.store(stored, pointer(builder, args[0], pointee), align=4)
            return context.get_dummy_value()

        return types.void(types.intp, given), code

    return store


load64, load32, load_float = _loader(I64), _loader(I32), _loader(F32)
store64, store32, store_float = _storer(I64), _storer(I32), _storer(F32)


@intrinsic
def atomic_add(typing: Any, address: Any, number: Any) -> Any:
    """Add to a 64-bit number, and return what it was."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, args[0], I64), args[1], "seq_cst")

    return types.intp(types.intp, types.intp), code


def _call(builder: Any, function: Any, arguments: Any) -> Any:
    """Call a C function with the integers of a tuple."""
    return builder.call(
        function, [builder.extract_value(arguments, i) for i in range(arguments.type.count)]
    )


@intrinsic
def call_address(typing: Any, function: Any, arguments: Any) -> Any:
    """Call the C function at an address with a tuple of integers, and return its integer."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(I64, [I64] * arguments.count)
        return _call(builder, pointer(builder, args[0], kind), args[1])

    return types.intp(types.intp, arguments), code


def caller(function: Callable[..., int]) -> Any:
    """A function that calls a C function with a tuple of its integers.

    numba compiles functions that call each other once more for each caller; a C function it
    compiles once.
    """
    name = c_function(function).native_name

    @intrinsic
    def call(typing: Any, arguments: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(I64, [I64] * arguments.count)
            return _call(
                builder, cgutils.get_or_insert_function(builder.module, kind, name), args[0]
            )

        return types.intp(arguments), code

    return call


@intrinsic
def on_stack(typing: Any, numbers: Any) -> Any:
    """The address of a tuple of integers, which is valid until the function returns."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory = cgutils.alloca_once(builder, I64, numbers.count)
        for i in range(numbers.count):
            builder.store(builder.extract_value(args[0], i), builder.gep(memory, [I64(i)]))
        return builder.ptrtoint(memory, I64)

    return types.intp(numbers), code


def address_of(function: str) -> Any:
    """A function that returns the address of a C function, by its name."""

    @intrinsic
    def address(typing: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(I64, [I64])
            found = cgutils.get_or_insert_function(builder.module, kind, function)
            return builder.ptrtoint(found, I64)

        return types.intp(), code

    return address


def text(words: str) -> Any:
    """A function that returns the address of a text that ends with a zero."""

    @intrinsic
    def address(typing: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.ptrtoint(context.insert_const_string(builder.module, words), I64)

        return types.intp(), code

    return address


malloc, free, memset, sched_yield = map(address_of, ("malloc", "free", "memset", "sched_yield"))
