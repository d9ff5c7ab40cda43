"""Whether the numbers of a published config.json can be those of a model at all.

Knows nothing of families: which keys must be there, and how they hang together, is theirs to say.
Guarantees that a size that made it past here can be multiplied with another without surprise: an
absurd one is refused by key before anything is allocated or traced.
"""

import math
from collections.abc import Mapping
from typing import Any

from .errors import InvalidConfig

SIZES = {
    "num_hidden_layers": 10_000,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**14,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**31,
}
"""The largest plausible value of each size; all are at least 1."""

POSITIVE_NUMBERS = ("rope_theta", "rms_norm_eps")


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Raise InvalidConfig for a value that no model has. Absent and null keys pass."""
    for key, limit in SIZES.items():
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise InvalidConfig(
                f"{where}: {key}: expected an integer from 1 to {limit}, got {value!r:.80}."
            )
    for key in POSITIVE_NUMBERS:
        value = config.get(key)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise InvalidConfig(
                f"{where}: {key}: expected a finite number above 0, got {value!r:.80}."
            )
    architectures = config.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise InvalidConfig(
            f"{where}: architectures: expected a list of names, got {architectures!r:.80}."
        )
    model_type = config.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise InvalidConfig(f"{where}: model_type: expected a name, got {model_type!r:.80}.")
