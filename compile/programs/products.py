"""Operations of a program's products: multiplications and additions of `dot` and `convolution`.

Knows nothing of models or hardware.
"""

import math

from ...modelzoo.cpu import MULTIPLY
from .hlo_text import Computation, Instruction, Program, array_sizes

_LIBRARY = '"__ynn_fusion"'


def product_flops(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Operations of an instruction's products, also inside a fusion: two for each factor pair."""
    if instruction.opcode == "dot":
        return _dot_flops(computation, instruction)
    if instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    if instruction.opcode == "custom-call" and _is_kernel(instruction):
        rows = array_sizes(computation.instructions[instruction.operands[0]].arrays[0])
        return 2 * math.prod(array_sizes(instruction.arrays[0])) * rows[-1]
    if instruction.opcode != "fusion" or (inside := program.fused(instruction)) is None:
        return 0
    return sum(product_flops(program, inside, each) for each in inside.instructions.values())


def slow_flops(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Operations of products in a CPU's program that run in no library and no kernel of ours."""
    if _LIBRARY in instruction.attributes or _is_kernel(instruction):
        return 0
    return product_flops(program, computation, instruction)


def _is_kernel(instruction: Instruction) -> bool:
    """Whether an instruction calls a kernel of products for the CPU."""
    return f'custom_call_target="{MULTIPLY}_' in instruction.attributes


def _dot_flops(computation: Computation, instruction: Instruction) -> int:
    sizes = array_sizes(computation.instructions[instruction.operands[0]].arrays[0])
    dimensions = instruction.attribute("lhs_contracting_dims", r"\{[\d,]*\}") or "{}"
    contracted = [sizes[int(number)] for number in dimensions.strip("{}").split(",") if number]
    return 2 * math.prod(array_sizes(instruction.arrays[0])) * math.prod(contracted)


def _convolution_flops(computation: Computation, instruction: Instruction) -> int:
    """Operations of a matrix product that the TPU's compiler writes as a convolution.

    In B products of [M, K] and [K, N], the operands and the result have B M K, B K N and B M N
    elements, and the product of these numbers is B (B M N K)^2. B is the dilated dimension.
    """
    factors = (computation.instructions[name].arrays[0] for name in instruction.operands)
    elements = math.prod(
        math.prod(array_sizes(array)) for array in (*factors, instruction.arrays[0])
    )
    dilated = instruction.attribute("lhs_dilate", r"[\dx]+") or "1"
    return 2 * math.isqrt(elements // math.prod(map(int, dilated.split("x"))))
