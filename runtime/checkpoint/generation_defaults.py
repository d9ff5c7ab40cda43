"""What a published model says about generating with it: end tokens and sampling defaults.

Knows nothing of requests; whether a default applies is for the caller to say. Reads the parsed
`generation_config.json` and `config.json` of a Hugging Face directory, or GGUF metadata.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import InvalidConfig

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
GGUF_END_KEYS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))


@dataclass(frozen=True)
class GenerationDefaults:
    """End tokens, any of which ends a sequence, and sampling parameters the publisher suggests."""

    eos_ids: tuple[int, ...] = ()
    sampling: Mapping[str, int | float] = field(default_factory=dict)

    @classmethod
    def from_hf(
        cls, generation: Mapping[str, Any], config: Mapping[str, Any]
    ) -> "GenerationDefaults":
        """Read generation_config.json, and config.json for the end tokens it leaves out."""
        ids = generation.get("eos_token_id")
        if ids is None:
            ids = config.get("eos_token_id")
        text = config.get("text_config")
        if ids is None and isinstance(text, Mapping):
            # a model of more than text keeps them with its text part
            ids = text.get("eos_token_id")
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        sampling = {}
        for key in SAMPLING_KEYS:
            value = generation.get(key)
            if value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value):
                raise InvalidConfig(
                    f"generation_config.json: {key}: expected a finite number, got {value!r}."
                )
            sampling[key] = value
        return cls(_token_ids(ids, "generation_config.json: eos_token_id"), sampling)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "GenerationDefaults":
        """Read the end tokens: of the sequence, of the turn and of the message."""
        present = [metadata[key] for key in GGUF_END_KEYS if key in metadata]
        return cls(_token_ids(present, "tokenizer.ggml.eos_token_id"))

    def as_json(self) -> dict[str, Any]:
        """Return the form that `from_hf` reads."""
        return {"eos_token_id": list(self.eos_ids), **self.sampling}


def _token_ids(ids: list[Any], where: str) -> tuple[int, ...]:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise InvalidConfig(f"{where}: expected token ids, got {token!r}.")
    return tuple(dict.fromkeys(ids))
