"""Parameters from the canonical arrangement to that of a layout, array by array.

Works on arrays of numpy and of jax alike, inside a trace too, and tells parameters by their names.
Knows nothing of files. Guarantees: values are moved, never computed, and a parameter that an
arrangement does not concern stays as it is.
"""

from typing import Any

from ...modelzoo.config import Arrangement

QKV = ("attention.qkv", "attention.qkv_bias")
BY_QUERY_HEAD = ("attention.output", "attention.sinks")
TABLES = ("embedding.table", "head.table")


def concerns(arrangement: Arrangement, parameter: str) -> bool:
    """Whether an arrangement gives a parameter another shape."""
    if parameter.endswith(TABLES):
        return arrangement.padded_vocab is not None
    return parameter.endswith((*QKV, *BY_QUERY_HEAD)) and arrangement.kv_copies > 1


def to_arrangement(x: Any, parameter: str, arrangement: Arrangement) -> Any:
    """Arrange a canonical array."""
    if not concerns(arrangement, parameter):
        return x
    array_functions, copies = x.__array_namespace__(), arrangement.kv_copies
    if parameter.endswith(TABLES):
        V, D = x.shape
        padding = array_functions.zeros((arrangement.padded_vocab - V, D), x.dtype)
        return array_functions.concat([x, padding])
    if parameter.endswith(BY_QUERY_HEAD):
        K, G, *rest = x.shape
        return x.reshape(K * copies, G // copies, *rest)

    *outer, K, J, H = x.shape
    G = J - 2
    queries = x[..., :G, :].reshape(*outer, K * copies, G // copies, H)
    key_value = array_functions.repeat(x[..., G:, :], copies, axis=-3)
    return array_functions.concat([queries, key_value], axis=-2)
