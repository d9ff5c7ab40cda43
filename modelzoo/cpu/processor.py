"""A processor for which kernels are compiled, and the vectors that its registers hold.

Knows nothing of kernels.
"""

# numba is an extra
# pyright: reportMissingImports=false

from functools import cache
from typing import NamedTuple


class Width(NamedTuple):
    """The registers of a processor, as products use them."""

    lanes: int
    """The numbers of a vector."""
    vectors: int
    """The vectors of a row of a tile. With those of six rows they stay in registers."""

    @property
    def columns(self) -> int:
        """The columns of a tile."""
        return self.lanes * self.vectors


class Processor(NamedTuple):
    """A processor for which object code is compiled."""

    name: str
    features: str
    """LLVM's features: each with a sign, with commas between them."""

    @classmethod
    @cache
    def here(cls) -> "Processor":
        """The processor of this machine."""
        import llvmlite.binding as llvm

        return cls(llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())

    def has(self, feature: str) -> bool:
        """Whether it has a feature."""
        return f"+{feature}" in self.features.split(",")

    @property
    def has_pair_products(self) -> bool:
        """Whether it multiplies pairs of bfloat16."""
        return self.has("avx512bf16")

    @property
    def has_code_products(self) -> bool:
        """Whether it multiplies codes of eight bits, four at a time."""
        return self.has("avx512vnni")

    @property
    def width(self) -> Width:
        """Its vectors, and the number of them that products use."""
        if self.has("avx512f"):
            return Width(16, 4)
        return Width(4, 4) if self.has("neon") else Width(8, 2)
