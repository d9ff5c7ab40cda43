"""XLA's options for the graphs of a plan, by kind of graph. Knows nothing of what they mean."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .graph_failures import reason
from .plan_tables import check_keys

CompilerOptions = Mapping[str, Mapping[str, str | int | float | bool]]
"""Values by the kind of graph, then by the name of the option."""
NO_OPTIONS: CompilerOptions = {}
KINDS = ("prefill", "score", "fork", "decode")


class CompilerOptionRefused(ValueError):
    """The compiler does not know an option of the plan, or refuses its value."""

    exit_code = 2


def read_options(table: Any) -> CompilerOptions:
    """The table `[compiler]` of a plan; ValueError names what is wrong. No order is kept."""
    check_keys("[compiler]", table, set(), set(KINDS))
    for kind, options in table.items():
        if not isinstance(options, Mapping):
            raise ValueError(f"[compiler.{kind}]: expected a table, got {options!r}.")
        for name, value in options.items():
            is_finite = isinstance(value, int | float) and math.isfinite(value)
            if not is_finite and not isinstance(value, str):
                raise ValueError(
                    f"compiler.{kind}.{name}: expected a string, a finite number, true or false, "
                    f"got {value!r}."
                )
    return {kind: dict(sorted(table[kind].items())) for kind in KINDS if table.get(kind)}


@contextmanager
def naming_option(graph: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Turn an error of XLA about one of these options into `CompilerOptionRefused`."""
    try:
        yield
    except RuntimeError as error:
        name = next((name for name in options if name in str(error)), None)
        if name is None:
            raise
        raise CompilerOptionRefused(
            f"plan compiler.{graph.split()[0]}.{name}: expected an option and a value that the "
            f"target's compiler knows, got {options[name]!r} for graph {graph!r}: "
            f"{reason(error)}. Correct it, or remove it from the plan."
        ) from error
