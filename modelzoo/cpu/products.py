"""Products of activations with weights in panels, in float32 and bfloat16.

A *panel* has the numbers of some columns of a weight, so that a product reads them one after
another: `[K, columns]`, and in bfloat16 `[K / 2, columns, 2]`. A unit of work is a panel and a
block of rows.

Knows nothing of models. Guarantees: a row of the result depends on its own activations alone.
"""

# numba is an extra
# pyright: reportMissingImports=false

from collections.abc import Iterator
from typing import Any

from . import PRODUCTS, product_name
from .frames import Buffer, argument, result, result_size, size
from .memory import native
from .processor import Processor
from .threads import Kernel
from .vectors import BYTES, Form, Matrix, product

_BLOCK_ROWS = 96
"""The maximum number of rows of a unit."""
_MIN_UNITS = 16
"""The number of units from which threads end at about the same time."""
_MIN_ROWS = 12


def product_kernels(processor: Processor) -> Iterator[Kernel]:
    """The kernels for a processor.

    Their arguments are activations `[M, K]` and weights `[G, K, N]`, each of the G in panels. The
    result is `[G, M, N]`.
    """
    for dtype, out in PRODUCTS:
        is_paired = dtype == "bfloat16"
        has_pair_products = is_paired and processor.has_pair_products
        form = Form(is_paired, has_pair_products, rounds=out == "bfloat16")
        multiply = product(processor.width, form, has_single_columns=True)
        arguments = Buffer(dtype, 2), Buffer(dtype, 3)
        columns, num_bytes = processor.width.columns, 2 if is_paired else BYTES
        run = _runner(multiply, columns, num_bytes, 2 if form.rounds else BYTES)
        count = _counter(columns, BYTES // num_bytes)
        yield Kernel(product_name(dtype, out), arguments, (Buffer(out, 3),), count, run)


@native
def _block_rows(M: int, num_panels: int) -> int:
    """The rows of a unit."""
    rows = _BLOCK_ROWS
    while rows > _MIN_ROWS and num_panels * ((M + rows - 1) // rows) < _MIN_UNITS:
        rows //= 2
    return rows


def _counter(columns: int, together: int) -> Any:
    """The function `count` of a kernel for panels of some columns."""

    def count(frame: int) -> int:
        M, K, G, N = size(frame, 0, 0), size(frame, 0, 1), size(frame, 1, 0), size(frame, 1, 2)
        fits = size(frame, 1, 1) == K and K % together == 0
        fits &= result_size(frame, 0, 0) == G
        fits &= result_size(frame, 0, 1) == M and result_size(frame, 0, 2) == N
        num_panels = G * ((N + columns - 1) // columns)
        rows = _block_rows(M, num_panels)
        return num_panels * ((M + rows - 1) // rows) if fits else -1

    return count


def _runner(multiply: Any, columns: int, num_bytes: int, out_bytes: int) -> Any:
    """The function `run` of a kernel."""

    def run(frame: int, unit: int) -> int:
        M, K, N = size(frame, 0, 0), size(frame, 0, 1), size(frame, 1, 2)
        per_group = (N + columns - 1) // columns
        rows = _block_rows(M, per_group * size(frame, 1, 0))
        num_blocks = (M + rows - 1) // rows
        panel, first = unit // num_blocks, unit % num_blocks * rows
        group, column = panel // per_group, panel % per_group * columns
        own = min(columns, N - column)
        x = Matrix(argument(frame, 0) + first * K * num_bytes, K * num_bytes)
        y = Matrix(argument(frame, 1) + (group * N + column) * K * num_bytes, own * BYTES)
        place = (group * M + first) * N + column
        out = Matrix(result(frame, 0) + place * out_bytes, N * out_bytes)
        multiply(min(rows, M - first), own, K * num_bytes // BYTES, x, y, out)
        return 0

    return run
