"""Collectives of the reports of calls, which do not depend on the number of layers alone.

A report has counts of experts, of each layer and shard of tokens, and of dropped choices and clean
rows. XLA may compute equal counts once, and join any of them.
"""

from noria.compile.programs.collectives import Collective


def is_of_report(collective: Collective, most_bytes: int) -> bool:
    """Return whether a collective is of a report of at most so many bytes.

    It then has the scope of the use of experts, or is for outputs of the program: integers outside
    of loops, of no operation.
    """
    is_of_outputs = not collective.source and not collective.loops
    are_integers = all(array.startswith(("s32", "u32")) for array in collective.arrays)
    is_small = collective.num_bytes <= most_bytes
    return "expert_use" in collective.source or (is_of_outputs and are_integers and is_small)
