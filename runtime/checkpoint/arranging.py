"""Parameters from the canonical arrangement to that of a layout, array by array.

Works on arrays of numpy and of jax alike, inside a trace too, and tells parameters by their names.
Knows nothing of files. Guarantees: values are moved, never computed, and a parameter that an
arrangement does not concern stays as it is.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...modelzoo.config import Arrangement
from ...modelzoo.layer_groups import of_single_layers

if TYPE_CHECKING:
    import jax

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


def sharding_for(shape: tuple[int, ...], like: "jax.sharding.Sharding") -> "jax.sharding.Sharding":
    """Spread an array over the devices of a sharding that was made for another shape.

    A mesh axis that does not divide its dimension moves to the first dimension that it divides, and
    where there is none the array is replicated along it. Two key/value heads over four devices,
    `[D, K_tensor, J, H]`, become `[D_tensor, K, J, H]`. Other shardings than those of a mesh are
    returned as they are.
    """
    from jax.sharding import NamedSharding, PartitionSpec

    if not isinstance(like, NamedSharding):
        return like
    pieces = list(shape)
    spec: list[tuple[str, ...]] = [()] * len(shape)
    wishes = [
        (dimension, axis)
        for dimension, entry in enumerate(like.spec)
        for axis in ((entry,) if isinstance(entry, str) else entry or ())
    ]

    def take(dimension: int, axis: str) -> bool:
        if fits := pieces[dimension] % like.mesh.shape[axis] == 0:
            pieces[dimension] //= like.mesh.shape[axis]
            spec[dimension] += (axis,)
        return fits

    moved = [axis for dimension, axis in wishes if not take(dimension, axis)]
    for axis in moved:
        any(take(dimension, axis) for dimension in range(len(shape)))
    return NamedSharding(like.mesh, PartitionSpec(*spec), memory_kind=like.memory_kind)


def require_single_layers(parameters: Iterable[str]) -> None:
    """Raise ValueError if a parameter is of several layers: checkpoints of ours have none such."""
    for parameter in parameters:
        if of_single_layers(parameter) != [parameter]:
            raise ValueError(
                f"model.scan_layers: expected parameters of single layers, as checkpoints of ours "
                f"keep and restore them, got {parameter}. Leave out scan_layers, or read the "
                f"published checkpoint."
            )
