"""Operations of a program's products: what a `dot` or a `convolution` multiplies and adds.

Knows nothing of models or hardware.
"""

import math

from .hlo_text import Computation, Instruction, Program, array_sizes

_LIBRARY = '"__ynn_fusion"'


def product_flops(program: Program, computation: Computation, one: Instruction) -> int:
    """Operations of an instruction's products, also inside a fusion: two a pair of factors."""
    if one.opcode == "dot":
        return _dot_flops(computation, one)
    if one.opcode == "convolution":
        return _convolution_flops(computation, one)
    if one.opcode != "fusion":
        return 0
    inside = program.computations[dict(one.called())["calls"]]
    return sum(product_flops(program, inside, each) for each in inside.instructions.values())


def slow_flops(program: Program, computation: Computation, one: Instruction) -> int:
    """The same of a CPU's program, where no library runs them."""
    return 0 if _LIBRARY in one.attributes else product_flops(program, computation, one)


def _dot_flops(computation: Computation, one: Instruction) -> int:
    sizes = array_sizes(computation.instructions[one.operands[0]].arrays[0])
    dimensions = one.attribute("lhs_contracting_dims", r"\{[\d,]*\}") or "{}"
    contracted = [sizes[int(number)] for number in dimensions.strip("{}").split(",") if number]
    return 2 * math.prod(array_sizes(one.arrays[0])) * math.prod(contracted)


def _convolution_flops(computation: Computation, one: Instruction) -> int:
    """The operations of a product of matrices that a TPU's compiler writes as a convolution.

    Of B products of [M, K] and [K, N] the operands and the result have B M K, B K N and B M N
    elements; their product is B (B M N K)^2. The dimension B is the one that is dilated.
    """
    factors = (computation.instructions[name].arrays[0] for name in one.operands)
    elements = math.prod(math.prod(array_sizes(array)) for array in (*factors, one.arrays[0]))
    dilated = one.attribute("lhs_dilate", r"[\dx]+") or "1"
    return 2 * math.isqrt(elements // math.prod(map(int, dilated.split("x"))))
