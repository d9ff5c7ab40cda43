"""Products of activations with weights in panels, in float32 and bfloat16, and of codes in int8.

A *panel* has the numbers of some columns of a weight, so that a product reads them one after
another: `[K, columns]`, in bfloat16 `[K / 2, columns, 2]`, in int8 `[K / 4, columns, 4]`. A unit of
work is a panel and a block of rows. Rows that nobody reads, such as padding and idle slots, are not
computed.

Knows nothing of models. Guarantees: a row of the result depends on its own activations alone.
"""

# numba is an extra
# pyright: reportMissingImports=false

from collections.abc import Iterator
from typing import Any

from . import CODE_PRODUCT, PRODUCTS, product_name
from .frames import Buffer, argument, result, result_size, size
from .memory import call_address, load32, memset, native, on_stack, store32
from .processor import Processor, Width
from .threads import Kernel
from .tiles import Form, Matrix, Others, product
from .vectors import BYTES

NUM_BYTES = {"int8": 1, "bfloat16": 2, "float32": 4, "int32": 4}
_BLOCK_ROWS = 96
"""The maximum number of rows of a unit."""
_MIN_UNITS = 16
"""The number of units from which threads end at about the same time."""
_MIN_ROWS = 12


def product_kernels(processor: Processor) -> Iterator[Kernel]:
    """The kernels for a processor.

    Their arguments are activations `[M, K]`, weights `[G, K, N]`, each of the G in panels, and
    `[1 + M]` numbers: that of the rows to compute, then these rows, then the others. The result is
    `[G, M, N]`, and zero in the other rows.
    """
    for dtype, out in PRODUCTS:
        has_codes = (dtype, out) == CODE_PRODUCT
        if has_codes and not processor.has_code_products:
            continue
        is_paired, num_bytes = dtype == "bfloat16", NUM_BYTES[dtype]
        has_pair_products = is_paired and processor.has_pair_products
        form = Form(is_paired, has_pair_products, rounds=out == "bfloat16", picks=True)
        width, columns = processor.width, processor.width.columns
        if has_codes:
            multiply, lanes = _code_product(width, form), width.lanes
        else:
            multiply, lanes = product(width, form, has_single_columns=True), 1
        arguments = Buffer(dtype, 2), Buffer(dtype, 3), Buffer("int32", 1)
        run = _runner(multiply, columns, num_bytes, NUM_BYTES[out])
        count = _counter(columns, BYTES // num_bytes, lanes)
        yield Kernel(product_name(dtype, out), arguments, (Buffer(out, 3),), count, run)


def _code_product(width: Width, form: Form) -> Any:
    """The function `multiply` of products of codes.

    It computes the product with the number that is added to all codes of x first, and begins the
    sums at its negative.
    """
    form = form._replace(has_codes=True)
    multiply = product(width, form)
    of_center = product(width, form._replace(of_center=True, picks=False))
    zeros = (0,) * (width.columns * BYTES // 8)

    @native
    def multiply_codes(rows, columns, count, x, y, out, others):
        begin, sums = on_stack(zeros), on_stack(zeros)
        of_center(1, columns, count, x, y, Matrix(sums, 0), Others(0, 0, begin))
        for i in range(0, columns * BYTES, BYTES):
            store32(begin + i, -load32(sums + i))
        multiply(rows, columns, count, x, y, out, Others(0, others.picked, begin))

    return multiply_codes


@native
def _blocks(frame: int, num_panels: int) -> tuple[int, int]:
    """The rows of a unit, and the number of blocks of rows."""
    given, rows = load32(argument(frame, 2)), _BLOCK_ROWS
    while rows > _MIN_ROWS and num_panels * ((given + rows - 1) // rows) < _MIN_UNITS:
        rows //= 2
    # one block without rows writes zeros
    return rows, max(1, (given + rows - 1) // rows)


def _counter(columns: int, together: int, lanes: int) -> Any:
    """The function `count` of a kernel for panels of some columns.

    It takes a multiple of `together` inputs, and a multiple of `lanes` columns.
    """

    def count(frame: int) -> int:
        M, K, G, N = size(frame, 0, 0), size(frame, 0, 1), size(frame, 1, 0), size(frame, 1, 2)
        fits = size(frame, 1, 1) == K and K % together == 0 and N % lanes == 0
        fits &= result_size(frame, 0, 0) == G and size(frame, 2, 0) == 1 + M
        fits &= result_size(frame, 0, 1) == M and result_size(frame, 0, 2) == N
        if fits:
            rows = argument(frame, 2)
            fits &= 0 <= load32(rows) <= M
            for i in range(1, 1 + M):
                fits &= 0 <= load32(rows + i * BYTES) < M
        num_panels = G * ((N + columns - 1) // columns)
        return num_panels * _blocks(frame, num_panels)[1] if fits else -1

    return count


def _runner(multiply: Any, columns: int, num_bytes: int, out_bytes: int) -> Any:
    """The function `run` of a kernel."""

    def run(frame: int, unit: int) -> int:
        M, K, N = size(frame, 0, 0), size(frame, 0, 1), size(frame, 1, 2)
        per_group = (N + columns - 1) // columns
        rows, num_blocks = _blocks(frame, per_group * size(frame, 1, 0))
        panel, first = unit // num_blocks, unit % num_blocks * rows
        group, column = panel // per_group, panel % per_group * columns
        own, given = min(columns, N - column), load32(argument(frame, 2))
        x = Matrix(argument(frame, 0), K * num_bytes)
        y = Matrix(argument(frame, 1) + (group * N + column) * K * num_bytes, own * BYTES)
        place, picked = group * M * N + column, argument(frame, 2) + (1 + first) * BYTES
        out = Matrix(result(frame, 0) + place * out_bytes, N * out_bytes)
        others, units = Others(0, picked, 0), K * num_bytes // BYTES
        multiply(min(rows, given - first), own, units, x, y, out, others)
        if first == 0:
            for i in range(1 + given, 1 + M):
                row = out.address + load32(argument(frame, 2) + i * BYTES) * out.row
                call_address(memset(), (row, 0, own * out_bytes))
        return 0

    return run
