"""Kernels for the CPU, which numba compiles for the processor at hand.

`objects.py` compiles and loads them. The other modules import numba, and are imported only to
compile.
"""

ATTEND_PAGES = "noria_attend_pages"
"""The name of the kernel of attention among XLA's foreign functions."""
VERSIONS = (0, 3), (0, 4), (0, 5)
"""The versions of XLA's interface for foreign functions whose call frames `frames.py` reads."""
