"""Products of matrices as LLVM code, for functions that numba compiles.

A *tile* is some rows of a product by some vectors of its columns, whose sums stay in registers. All
addresses and distances are in bytes. Each number of a product is one chain of additions, so it
depends neither on the other rows nor on how many there are.

Knows nothing of attention or of call frames.
"""

# numba is an extra
# pyright: reportMissingImports=false

from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from .memory import F32, I32, I64, caller, intrinsic, load64, native, on_stack
from .processor import Width
from .vectors import BYTES, Code

_CENTER = 128
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


class _TileCode(Code):
    """Writes the LLVM code of a tile."""

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
            return self.operation(f"llvm.{name}", total, *of_x, *of_y)
        if form.has_pair_products:
            name = f"x86.avx512bf16.dpbf16ps.{32 * self.lanes}"
            return self.operation(f"llvm.{name}", total, *of_x, *of_y)
        for x, y in zip(of_x, of_y, strict=True):
            total = self.call("fma", x, y, total)
        return total


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
            code = _TileCode(context, builder, lanes)
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
