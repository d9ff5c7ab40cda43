"""Loops over vectors as LLVM code, for functions that numba compiles: products, softmax, copies.

Vectors are as wide as the registers of the processor. All addresses and distances are in bytes, and
arrays are in float32, but for products of bfloat16. Each number of a product is one chain of
additions, so it depends neither on the other rows nor on how many there are.

Knows nothing of attention or of call frames.
"""

# numba is an extra
# pyright: reportMissingImports=false

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from .memory import F32, I32, I64, caller, intrinsic, load64, native, on_stack, pointer
from .processor import Width

BYTES = 4
"""Bytes of a number in float32."""
_FETCH = "llvm.prefetch.p0"
_ALIGNED = 2
"""The bytes that addresses are a multiple of."""
_CENTER = 128
LOWEST = -1e30
"""Less than all scores."""


ROWS = 6, 4, 2, 1
"""The numbers of rows of tiles."""


class Form(NamedTuple):
    """The numbers that a product reads and writes."""

    is_paired: bool = False
    """Whether x and y have pairs of bfloat16, which lie together, in place of float32."""
    has_pair_products: bool = False
    """Whether the processor multiplies pairs; otherwise they are widened to float32."""
    is_narrow: bool = False
    """Whether y has bfloat16 and x has float32."""
    adds: bool = False
    """Whether the product is added to the result."""
    rounds: bool = False
    """Whether the result is rounded to bfloat16."""
    fetches: bool = False
    """Whether memory sends the y of the next product meanwhile."""
    picks: bool = False
    """Whether the rows of x and of the result are those of a list, and not one after another."""
    has_codes: bool = False
    """Whether x and y have codes in int8, four of which lie together, and the result int32. The
    processor multiplies codes of y with numbers from 0 to 255: those of x with `_CENTER` added."""
    of_center: bool = False
    """Whether all codes of x are zero, and nothing is read of it: the product with `_CENTER`."""

    @property
    def has_units(self) -> bool:
        """Whether several numbers of x and y fill 32 bits."""
        return self.is_paired or self.has_codes


OF_FLOATS = Form()


def _repeated(kind: ir.VectorType, number: float) -> ir.Constant:
    return ir.Constant(kind, [number] * kind.count)


class _Code:
    """Writes the LLVM code of one function, for vectors of a width."""

    def __init__(self, context: Any, builder: Any, lanes: int):
        self.context, self.builder, self.lanes = context, builder, lanes
        self.vector, self.integers = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
        self.halves = ir.VectorType(ir.IntType(16), lanes)

    def all(self, number: float) -> ir.Constant:
        """A vector of one number."""
        return _repeated(self.vector, number)

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
        return self._operation(f"llvm.{name}.v{self.lanes}f32", *given)

    def _operation(self, name: str, *given: Any) -> Any:
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

    def factors(self, form: Form, numbers: Any) -> list[Any]:
        """The vectors that `multiply_add` takes: a vector, or both halves of pairs as float32."""
        if not form.is_paired or form.has_pair_products:
            return [numbers]
        builder = self.builder
        low = builder.shl(numbers, ir.Constant(self.integers, [16] * self.lanes))
        high = builder.and_(numbers, ir.Constant(self.integers, [-(1 << 16)] * self.lanes))
        return [builder.bitcast(half, self.vector) for half in (low, high)]

    def row_numbers(self, form: Form, picked: Any, count: int) -> list[Any]:
        """The numbers of the next rows, which are in a list if the form picks rows."""
        if not form.picks:
            return list(map(I64, range(count)))
        of_list = [self.load(self.at(picked, i, BYTES), I32) for i in range(count)]
        return [self.builder.sext(number, I64) for number in of_list]

    def of_row(self, form: Form, address: Any) -> Any:
        """A vector of the number of x at an address, or of its unit of pairs or codes."""
        center = I32(_CENTER * 0x01010101)
        if form.of_center:
            return self.spread(center)
        number = self.load(address, I32 if form.has_units else F32)
        # as bytes from 0 to 255
        return self.spread(self.builder.xor(number, center) if form.has_codes else number)

    def multiply_add(self, form: Form, of_x: list[Any], of_y: list[Any], total: Any) -> Any:
        """The sum of a total and the products of the `factors` of two vectors."""
        if form.has_codes:
            name = f"x86.avx512.vpdpbusd.{32 * self.lanes}"
            return self._operation(f"llvm.{name}", total, *of_x, *of_y)
        if form.has_pair_products:
            name = f"x86.avx512bf16.dpbf16ps.{32 * self.lanes}"
            return self._operation(f"llvm.{name}", total, *of_x, *of_y)
        for x, y in zip(of_x, of_y, strict=True):
            total = self.call("fma", x, y, total)
        return total

    def rounded(self, x: Any) -> Any:
        """Numbers in bfloat16, rounded to even, as integers of 16 bits."""
        builder, bits = self.builder, self.builder.bitcast(x, self.integers)
        constant = partial(_repeated, self.integers)
        odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
        nearest = builder.add(bits, builder.add(odd, constant(0x7FFF)))
        # to round the bits of NaN could make infinity of it
        is_nan = builder.fcmp_unordered("uno", x, x)
        bits = builder.select(is_nan, builder.or_(bits, constant(1 << 22)), nearest)
        return builder.trunc(builder.lshr(bits, constant(16)), self.halves)

    def widened(self, halves: Any) -> Any:
        """Numbers in float32, from bfloat16 as integers of 16 bits."""
        bits = self.builder.zext(halves, self.integers)
        bits = self.builder.shl(bits, _repeated(self.integers, 16))
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


def _tile(form: Form, lanes: int, num_rows: int, num_vectors: int) -> Any:
    """A function `tile(x, y, out, distances, count)`: the product of rows and columns.

    The distances are those between the rows of x, y and out, that to the next y, and the addresses
    of the numbers of the rows and of the row at which sums of codes begin. `count` numbers or pairs
    of each row of x are multiplied with as many rows of y.
    """

    @intrinsic
    def tile(typing: Any, x: Any, y: Any, out: Any, distances: Any, count: Any) -> Any:
        def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, y, out, distances, count = args
            x_row, y_row, out_row, ahead, picked, begin = (
                builder.extract_value(distances, i) for i in range(6)
            )
            code = _Code(context, builder, lanes)
            numbers = code.row_numbers(form, picked, num_rows)
            size, out_size = (
                lanes * BYTES // (2 if is_half else 1) for is_half in (form.is_narrow, form.rounds)
            )
            rows, outs = (
                [builder.add(address, builder.mul(distance, number)) for number in numbers]
                for address, distance in ((x, x_row), (out, out_row))
            )
            places = [
                code.at(row, vector * out_size) for row in outs for vector in range(num_vectors)
            ]
            start = [code.load(place) if form.adds else code.all(0.0) for place in places]
            kind = code.integers if form.has_units else code.vector
            kind = code.halves if form.is_narrow else kind
            if form.has_codes:
                first = [code.load(code.at(begin, i * size), kind) for i in range(num_vectors)]
                start = num_rows * first

            def turn(index: Any, sums: list[Any]) -> list[Any]:
                row_of_y = builder.add(y, builder.mul(y_row, index))
                places = [code.at(row_of_y, i * size) for i in range(num_vectors)]
                of_y = [code.load(place, kind) for place in places]
                for place in places if form.fetches else []:
                    code.fetch(builder.add(place, ahead))
                of_y = [
                    [code.widened(vector)] if form.is_narrow else code.factors(form, vector)
                    for vector in of_y
                ]
                new = []
                for row in range(num_rows):
                    of_x = code.factors(form, code.of_row(form, code.at(rows[row], index, BYTES)))
                    for i, vector in enumerate(of_y):
                        total = sums[row * num_vectors + i]
                        new.append(code.multiply_add(form, of_x, vector, total))
                return new

            for place, total in zip(places, code.loop(count, 1, start, turn), strict=True):
                code.store(place, code.rounded(total) if form.rounds else total)
            return context.get_dummy_value()

        given = *[types.intp] * 3, types.UniTuple(types.intp, 6), types.intp
        return types.void(*given), write

    return tile


class Matrix(NamedTuple):
    """Rows of numbers."""

    address: int
    row: int
    """The distance between its rows."""


class Others(NamedTuple):
    """The addresses that some forms of products read beside their matrices, and a distance."""

    ahead: int
    """The bytes from this y to the next one, which memory sends."""
    picked: int = 0
    """The address of the numbers of the rows of x and out."""
    begin: int = 0
    """The address of the row at which the sums of codes begin."""


def _by_rows(lanes: int, num_vectors: int, form: Form) -> Any:
    """A function `run(rows, count, x, y, out, others)`: some rows of x times some columns of y."""
    six, four, two, one = (_tile(form, lanes, rows, num_vectors) for rows in ROWS)
    picks = form.picks

    @native
    def run(rows, count, x, y, out, others):
        to, of, (ahead, picked, begin) = out.address, x.address, others
        while rows > 0:
            distances = x.row, y.row, out.row, ahead, picked, begin
            if rows >= 6:
                done = 6
                six(of, y.address, to, distances, count)
            elif rows >= 4:
                done = 4
                four(of, y.address, to, distances, count)
            elif rows >= 2:
                done = 2
                two(of, y.address, to, distances, count)
            else:
                done = 1
                one(of, y.address, to, distances, count)
            if picks:
                picked += done * BYTES
            else:
                of += done * x.row
                to += done * out.row
            rows -= done

    return run


@native(inline="always")
def _matrix(address: int) -> Matrix:
    return Matrix(load64(address), load64(address + 8))


@cache
def product(width: Width, form: Form = OF_FLOATS, *, has_single_columns: bool = False) -> Any:
    """A function `multiply(rows, columns, count, x, y, out, others)`: `out = x @ y`.

    x, y and out are matrices, and y has `count` rows, of numbers or of pairs. Without
    `has_single_columns`, the columns are a multiple of the lanes.
    """
    wide, narrow = width.columns, width.lanes
    y_bytes, out_bytes = (2 if is_half else BYTES for is_half in (form.is_narrow, form.rounds))
    of_wide, of_narrow = _by_rows(narrow, width.vectors, form), _by_rows(narrow, 1, form)
    # heads of few features are less wide than a tile
    half = 2 * narrow if width.vectors > 2 and not has_single_columns else wide
    of_half = _by_rows(narrow, half // narrow, form)
    of_one, single = of_narrow, narrow
    if has_single_columns:
        # a number alone has no product of pairs
        of_one, single = _by_rows(1, 1, form._replace(has_pair_products=False)), 1

    def multiply(given: int) -> int:
        rows, columns, count = load64(given), load64(given + 8), load64(given + 16)
        x, y, out = _matrix(given + 24), _matrix(given + 40), _matrix(given + 56)
        ahead, picked, begin = load64(given + 72), load64(given + 80), load64(given + 88)
        column = 0
        while column < columns:
            y_here = Matrix(y.address + column * y_bytes, y.row)
            out_here = Matrix(out.address + column * out_bytes, out.row)
            others = ahead, picked, begin + column * BYTES
            if columns - column >= wide:
                of_wide(rows, count, x, y_here, out_here, others)
                column += wide
            elif columns - column >= half:
                of_half(rows, count, x, y_here, out_here, others)
                column += half
            elif columns - column >= narrow:
                of_narrow(rows, count, x, y_here, out_here, others)
                column += narrow
            else:
                of_one(rows, count, x, y_here, out_here, others)
                column += single
        return 0

    multiply_all = caller(multiply)

    @native(inline="always")
    def call(rows, columns, count, x, y, out, others):
        places = x.address, x.row, y.address, y.row, out.address, out.row
        given = others.ahead, others.picked, others.begin
        multiply_all((on_stack((rows, columns, count, *places, *given)),))

    return call


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
            code = _Code(context, builder, lanes)
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
            code = _Code(context, builder, lanes)
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
            code = _Code(context, builder, lanes)
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

    def cap(code: _Code, x: Any, most: Any) -> Any:
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
