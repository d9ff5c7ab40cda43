"""The kind of work of each instruction of a graph for the CPU, found from the compiled text.

The einsum in its name identifies a product with weights. All other products are those of attention:
with values if the first factor comes from an exponential, otherwise scores. Any other instruction
is identified by its source file and by the operations in it. Knows nothing of times.
"""

import re
from collections.abc import Iterable

from noria.compile.programs.executions import Executions
from noria.compile.programs.hbm_bytes import Traffic
from noria.compile.programs.hlo_text import Computation, Instruction, read_program
from noria.compile.programs.products import product_flops

PRODUCTS = {
    "BTD,DKJH->BTKJH": "queries, keys, values",
    "BTA,AD->BTD": "heads merged",
    "P...D,PDF->P...F": "gate and up",
    "BTF,FD->BTD": "down",
    "...D,VD->...V": "logits",
    "BTKGH,KGHD->BTD": "heads merged",
    "BTD,PDF->PBTF": "gate and up",
    "BD,VD->BV": "logits",
}
"""Products with weights, by the einsum in their names."""
SCORES, VALUES = "attention: scores", "attention: values"
KERNEL = "attention: kernel"
"""Attention by one kernel."""
SOFTMAX, WRITES, BETWEEN = (
    "attention: masks, softmax, merge",
    "cache writes",
    "between instructions",
)
MOVED = "conversions and copies"
REST = "rest"
FILES = {
    "cpu_attention.py": KERNEL,
    "rope.py": "rotations",
    "sampling.py": "sampling",
    "steps.py": "sampling",
    "pages.py": WRITES,
    "attend.py": SOFTMAX,
    "layer_attention.py": SOFTMAX,
    "blockwise.py": SOFTMAX,
    "paged.py": SOFTMAX,
    "shared_pages.py": SOFTMAX,
}
_MOVES = {"parameter", "constant", "convert", "copy", "bitcast", "transpose", "reshape", "slice",
          "broadcast", "tuple", "get-tuple-element"}  # fmt: skip
_EINSUM = re.compile(r"([A-Z.]+,[A-Z.]+->[A-Z.]+)/(?:dot_general|ffi_call)$")


def group_of(source: str, file: str, opcodes: Iterable[str], is_of_weights: bool = False) -> str:
    """The kind of work of one instruction.

    Args:
      source: What the compiler says it comes from, such as `jit(graph)/layers.0/dot_general`.
      file: The file that it comes from, without its folders.
      opcodes: The operations in it.
      is_of_weights: Whether the first factor of a product comes from an exponential.
    """
    found, opcodes = _EINSUM.search(source), set(opcodes)
    if found and found[1] in PRODUCTS:
        return PRODUCTS[found[1]]
    if "custom-call" in opcodes and file in FILES:
        return FILES[file]
    if source.endswith("dot_general") or "dot" in opcodes:
        return VALUES if is_of_weights else SCORES
    if opcodes & {"scatter", "dynamic-update-slice"} or FILES.get(file) == WRITES:
        return WRITES
    if opcodes <= _MOVES:
        return MOVED
    if file == "layers.py":
        return "gated unit" if opcodes & {"logistic", "exponential", "tanh"} else "norms"
    return FILES.get(file, REST)


class Groups:
    """The instructions of one graph by name: kinds of work, and operations of products."""

    def __init__(self, text: str, steps: int):
        self._program = read_program(text)
        self._group: dict[str, str] = {}
        self.flops: dict[str, float] = {}
        """Operations of the products in a call of `steps` steps, by group."""
        for computation in self._program.computations.values():
            for one in computation.instructions.values():
                self._group[one.name] = self._of(computation, one)
        # only what is executed: the instructions inside a fusion would count twice
        for each in Executions(self._program, Traffic(self._program)):
            one, group = each.instruction, self._group[each.instruction.name]
            flops = product_flops(self._program, each.computation, one)
            times = each.times * (1 if each.is_once else steps)
            self.flops[group] = self.flops.get(group, 0) + times * flops

    def of(self, event: str) -> str | None:
        """The group of an event of the profiler, or None for what is no work of a graph."""
        return BETWEEN if event == "ThunkExecutor::Execute" else self._group.get(event)

    def _of(self, computation: Computation, one: Instruction) -> str:
        file = self._program.line(one).rpartition("/")[2].partition(":")[0]
        inside = dict(one.called()).get("calls") if one.opcode == "fusion" else None
        fused = self._program.computations[inside].instructions.values() if inside else [one]
        return group_of(
            one.source, file, {each.opcode for each in fused}, _is_of_weights(computation, one)
        )


def _is_of_weights(computation: Computation, one: Instruction) -> bool:
    """Whether what an instruction reads first is an exponential, perhaps converted since then."""
    while one.operands and (first := computation.instructions.get(one.operands[0])):
        if first.source.endswith("/exp"):
            return True
        if "dot_general" in first.source:
            return False
        one = first
    return False
