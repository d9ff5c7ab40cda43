"""Kernels for the CPU, which numba compiles for the processor at hand.

`objects.py` compiles and loads them, `processor.py` describes processors, and `moves.py` calls
kernels. The other modules import numba, and are imported only to compile.
"""

ENTRIES = "float32", "bfloat16", "int8"
"""The dtypes of keys and values of each kernel of attention; int8 are codes with scales."""
MULTIPLY = "noria_multiply"
"""The beginning of the names of all kernels of products."""
CODE_PRODUCT = "int8", "int32"
PRODUCTS = (
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    CODE_PRODUCT,
)
"""The dtypes of activations and weights, and of the result, of each kernel of products. Processors
that do not multiply codes lack that of codes."""


def attend_name(dtype: str) -> str:
    """The name of a kernel of attention among XLA's foreign functions."""
    return f"noria_attend_pages_{dtype}"


def product_name(dtype: str, out: str) -> str:
    """The name of a kernel of products among XLA's foreign functions."""
    return f"{MULTIPLY}_{dtype}_{out}"


PUT_LINES, TAKE_PAIRS = "noria_put_lines", "noria_take_pairs"
"""The names of kernels that move numbers among XLA's foreign functions."""
PUT_RANK = 5
"""The axes of arrays that lines are put in: layers, pages, heads, entries and features."""
NAMES = (
    PUT_LINES,
    TAKE_PAIRS,
    *map(attend_name, ENTRIES),
    *(product_name(*dtypes) for dtypes in PRODUCTS),
)
"""The names of all kernels among XLA's foreign functions."""
VERSIONS = (0, 3), (0, 4), (0, 5)
"""The versions of XLA's interface for foreign functions whose call frames `frames.py` reads."""
