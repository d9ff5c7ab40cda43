"""Loops over vectors as LLVM code, for functions that numba compiles: softmax, turns, copies.

Vectors are as wide as the registers of the processor. All addresses and distances are in bytes, and
arrays are in float32, unless a function says otherwise.

Knows nothing of attention or of call frames.
"""

# numba is an extra
# pyright: reportMissingImports=false

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from llvmlite import ir
from numba import types

from .memory import F32, I32, I64, caller, intrinsic, native, pointer

BYTES = 4
"""Bytes of a number in float32."""
_FETCH = "llvm.prefetch.p0"
_ALIGNED = 2
"""The bytes that addresses are a multiple of."""
LOWEST = -1e30
"""Less than all scores."""


def repeated(kind: ir.VectorType, number: float) -> ir.Constant:
    """A vector of one number that is known when code is written."""
    return ir.Constant(kind, [number] * kind.count)


class Code:
    """Writes the LLVM code of one function, for vectors of a width."""

    def __init__(self, context: Any, builder: Any, lanes: int):
        self.context, self.builder, self.lanes = context, builder, lanes
        self.vector, self.integers = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
        self.halves = ir.VectorType(ir.IntType(16), lanes)

    def all(self, number: float) -> ir.Constant:
        """A vector of one number."""
        return repeated(self.vector, number)

    def spread(self, number: Any) -> Any:
        """A vector of a number that is known when the code runs."""
        one = ir.Constant(ir.VectorType(number.type, self.lanes), ir.Undefined)
        one = self.builder.insert_element(one, number, ir.Constant(I32, 0))
        order = ir.Constant(self.integers, [0] * self.lanes)
        return self.builder.shuffle_vector(one, one, order)

    def at(self, address: Any, offset: Any = 0, scale: int = 1) -> Any:
        """The address so many times `scale` bytes further."""
        if isinstance(offset, int):
            return self.builder.add(address, I64(offset * scale))
        return self.builder.add(address, self.builder.mul(offset, I64(scale)))

    def load(self, address: Any, kind: Any = None) -> Any:
        """A vector at an address, or a number of a kind."""
        where = pointer(self.builder, address, kind or self.vector)
        return self.builder.load(where, align=_ALIGNED)

    def store(self, address: Any, value: Any) -> None:
        """Store a vector at an address."""
        self.builder.store(value, pointer(self.builder, address, value.type), align=_ALIGNED)

    def fetch(self, address: Any) -> None:
        """Have memory send the line of an address to the second cache."""
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), I32, I32, I32])
        known = self.builder.module.globals.get(_FETCH)
        fetch = known or ir.Function(self.builder.module, kind, _FETCH)
        line = pointer(self.builder, address, ir.IntType(8))
        self.builder.call(fetch, [line, I32(0), I32(2), I32(1)])

    def call(self, name: str, *given: Any) -> Any:
        """Call an operation of LLVM on vectors, such as `fma`."""
        return self.operation(f"llvm.{name}.v{self.lanes}f32", *given)

    def operation(self, name: str, *given: Any) -> Any:
        known = self.builder.module.globals.get(name)
        kind = ir.FunctionType(given[0].type, [value.type for value in given])
        return self.builder.call(known or ir.Function(self.builder.module, kind, name), given)

    def loop(
        self,
        count: Any,
        step: int,
        start: list[Any],
        body: Callable[[Any, list[Any]], list[Any]],
    ) -> list[Any]:
        """Run `body(index, carried)` for all indices below a count, in steps.

        Returns:
          What the last turn carries; `start` without any turn.
        """
        builder, before = self.builder, self.builder.block
        head, turn, after = (builder.append_basic_block(name) for name in ("head", "turn", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(I64)
        index.add_incoming(I64(0), before)
        carried = [builder.phi(value.type) for value in start]
        for phi, value in zip(carried, start, strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", index, count), turn, after)
        builder.position_at_end(turn)
        new = body(index, carried)
        index.add_incoming(builder.add(index, I64(step)), builder.block)
        for phi, value in zip(carried, new, strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        return carried

    def over_lanes(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Combine the lanes of a vector; all lanes have the result."""
        distance = self.lanes // 2
        while distance:
            order = [(lane + distance) % self.lanes for lane in range(self.lanes)]
            turned = self.builder.shuffle_vector(vector, vector, ir.Constant(self.integers, order))
            vector, distance = combine(vector, turned), distance // 2
        return vector

    def larger(self, a: Any, b: Any) -> Any:
        """The larger numbers; those of `a` where b is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", b, a), b, a)

    def rounded(self, x: Any) -> Any:
        """Numbers in bfloat16, rounded to even, as integers of 16 bits."""
        builder, bits = self.builder, self.builder.bitcast(x, self.integers)
        constant = partial(repeated, self.integers)
        odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
        nearest = builder.add(bits, builder.add(odd, constant(0x7FFF)))
        # to round the bits of NaN could make infinity of it
        is_nan = builder.fcmp_unordered("uno", x, x)
        bits = builder.select(is_nan, builder.or_(bits, constant(1 << 22)), nearest)
        return builder.trunc(builder.lshr(bits, constant(16)), self.halves)

    def widened(self, halves: Any) -> Any:
        """Numbers in float32, from bfloat16 as integers of 16 bits."""
        bits = self.builder.zext(halves, self.integers)
        bits = self.builder.shl(bits, repeated(self.integers, 16))
        return self.builder.bitcast(bits, self.vector)

    def exp(self, x: Any) -> Any:
        """exp, to about two units in the last place, of numbers up to 88; below -87 it is 1e-38.

        The polynomial is that of Cephes' expf (Moshier, netlib.org/cephes).
        """
        builder = self.builder
        for limit, order in ((-87.3, "<"), (88.0, ">")):
            is_beyond = builder.fcmp_ordered(order, x, self.all(limit))
            x = builder.select(is_beyond, self.all(limit), x)
        power = self.call("rint", builder.fmul(x, self.all(1.4426950408889634)))
        rest = self.call("fma", power, self.all(-0.693359375), x)
        rest = self.call("fma", power, self.all(2.12194440e-4), rest)
        sum_ = self.all(1.9875691500e-4)
        for factor in (
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        ):
            sum_ = self.call("fma", sum_, rest, self.all(factor))
        square, linear = builder.fmul(rest, rest), builder.fadd(rest, self.all(1.0))
        sum_ = self.call("fma", sum_, square, linear)
        # LLVM defines no integer for NaN; the sum stays NaN
        is_nan = builder.fcmp_unordered("uno", power, power)
        power = builder.select(is_nan, self.all(0.0), power)
        bias = ir.Constant(self.integers, [127] * self.lanes)
        exponent = builder.add(builder.fptosi(power, self.integers), bias)
        exponent = builder.shl(exponent, ir.Constant(self.integers, [23] * self.lanes))
        return builder.fmul(sum_, builder.bitcast(exponent, self.vector))


@cache
def transposer(lanes: int, *, is_narrow: bool = False) -> Any:
    """A function `transpose(to, to_row, of, of_row, ahead)` of a square of numbers.

    A row has as many numbers as a vector has lanes. With `is_narrow`, it reads bfloat16, and writes
    float32. Memory sends the next square meanwhile, which is so many bytes ahead.
    """

    @intrinsic
    def transpose(typing: Any, to: Any, to_row: Any, of: Any, of_row: Any, ahead: Any) -> Any:
        def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            to, to_row, of, of_row, ahead = args
            code = Code(context, builder, lanes)
            kind = code.halves if is_narrow else code.vector
            places = [code.at(of, of_row, row) for row in range(lanes)]
            rows = [code.load(place, kind) for place in places]
            for place in places:
                code.fetch(builder.add(place, ahead))
            rows = [code.widened(row) for row in rows] if is_narrow else rows
            distance = 1
            while distance < lanes:
                # exchange the numbers of pairs of rows that lie off the diagonal of their squares
                orders = [
                    [
                        lane if not lane & distance else lane - distance + lanes
                        for lane in range(lanes)
                    ],
                    [
                        lane + distance if not lane & distance else lane + lanes
                        for lane in range(lanes)
                    ],
                ]
                new = list(rows)
                for row in range(lanes):
                    if not row & distance:
                        pair = rows[row], rows[row + distance]
                        for place, order in zip((row, row + distance), orders, strict=True):
                            constant = ir.Constant(code.integers, order)
                            new[place] = builder.shuffle_vector(*pair, constant)
                rows, distance = new, 2 * distance
            for row, vector in enumerate(rows):
                code.store(code.at(to, to_row, row), vector)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), write

    def transpose_one(to, to_row, of, of_row, ahead):
        transpose(to, to_row, of, of_row, ahead)
        return 0

    return caller(transpose_one)


@cache
def softmax(lanes: int) -> Any:
    """A function `softmax(x, count, factor, top)` that replaces x by weights exp(score - largest).

    Scores are x times the factor. The largest is that of the scores and of `top`. The count is a
    multiple of the lanes.

    Returns:
      The largest, and the sum of the weights. Scores that are NaN make the sum NaN.
    """

    @intrinsic
    def weigh(typing: Any, x: Any, count: Any, factor: Any, top: Any) -> Any:
        result = types.UniTuple(types.float32, 2)

        def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, count, factor, top = args
            code = Code(context, builder, lanes)
            spread = code.spread(factor)

            def score(index: Any) -> Any:
                return builder.fmul(code.load(code.at(x, index, BYTES)), spread)

            def compare(index: Any, carried: list[Any]) -> list[Any]:
                return [code.larger(carried[0], score(index))]

            (largest,) = code.loop(count, lanes, [code.spread(top)], compare)
            largest = code.over_lanes(largest, code.larger)

            def add(index: Any, carried: list[Any]) -> list[Any]:
                weights = code.exp(builder.fsub(score(index), largest))
                code.store(code.at(x, index, BYTES), weights)
                return [builder.fadd(carried[0], weights)]

            (total,) = code.loop(count, lanes, [code.all(0.0)], add)
            total = code.over_lanes(total, builder.fadd)
            firsts = [builder.extract_element(x, I32(0)) for x in (largest, total)]
            return context.make_tuple(builder, result, firsts)

        return result(types.intp, types.intp, types.float32, types.float32), write

    return weigh


def _elementwise(
    lanes: int, function: Callable[..., Any], num_bytes: int = BYTES, *, of_codes: bool = False
) -> Any:
    """A function `change(to, of, count, factor)` that writes a function of numbers and a factor."""

    @intrinsic
    def change(typing: Any, to: Any, of: Any, count: Any, factor: Any) -> Any:
        def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            to, of, count, factor = args
            code = Code(context, builder, lanes)
            spread = code.spread(factor)

            def turn(index: Any, carried: list[Any]) -> list[Any]:
                if of_codes:
                    codes = code.load(code.at(of, index), ir.VectorType(ir.IntType(8), lanes))
                    read = builder.sitofp(codes, code.vector)
                else:
                    read = code.load(code.at(of, index, BYTES))
                code.store(code.at(to, index, num_bytes), function(code, read, spread))
                return []

            code.loop(count, lanes, [], turn)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp, types.float32), write

    return change


@cache
def scaler(lanes: int, *, of_codes: bool = False) -> Any:
    """A function `scale(to, of, count, factor)`; the count is a multiple of the lanes.

    It may read codes in int8, and writes float32.
    """
    return _elementwise(
        lanes, lambda code, x, factor: code.builder.fmul(x, factor), of_codes=of_codes
    )


@cache
def rounder(lanes: int) -> Any:
    """A function `round(to, of, count, factor)` that writes products with a factor in bfloat16."""
    return _elementwise(
        lanes, lambda code, x, factor: code.rounded(code.builder.fmul(x, factor)), 2
    )


@cache
def capper(lanes: int) -> Any:
    """A function `cap(to, of, count, most)` of `most * tanh(x / most)`."""

    def cap(code: Code, x: Any, most: Any) -> Any:
        builder = code.builder
        # tanh(z) = 1 - 2 / (exp(2 z) + 1)
        doubled = builder.fmul(builder.fdiv(x, most), code.all(2.0))
        below = builder.fadd(code.exp(doubled), code.all(1.0))
        tanh = builder.fsub(code.all(1.0), builder.fdiv(code.all(2.0), below))
        return builder.fmul(tanh, most)

    return _elementwise(lanes, cap)


@cache
def filler(lanes: int) -> Any:
    """A function `fill(to, count, number)`; the count is a multiple of the lanes."""
    change = _elementwise(lanes, lambda code, x, number: number)

    @native
    def fill(to, count, number):
        change(to, to, count, number)

    return fill
