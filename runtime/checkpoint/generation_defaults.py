"""Read generation defaults of a published model: end tokens and sampling parameters.

The sources are the parsed `generation_config.json` and `config.json` of a Hugging Face directory,
or GGUF metadata. Does not know about rows: the caller decides whether a default applies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidConfig, RowError
from ..request import SamplingParams

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
GGUF_END_KEYS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))


@dataclass(frozen=True)
class GenerationDefaults:
    """End tokens, each of which ends a sequence, and the publisher's sampling parameters."""

    eos_ids: tuple[int, ...] = ()
    sampling: Mapping[str, int | float] = field(default_factory=dict)
    eos_source: str = field(default="", compare=False)
    """The file and the key of the end tokens."""

    @classmethod
    def from_hf(
        cls, generation: Mapping[str, Any], config: Mapping[str, Any]
    ) -> "GenerationDefaults":
        """Read generation_config.json; end tokens that it lacks are read from config.json."""
        ids, source = generation.get("eos_token_id"), "generation_config.json: eos_token_id"
        if ids is None:
            ids, source = config.get("eos_token_id"), "config.json: eos_token_id"
        text = config.get("text_config")
        if ids is None and isinstance(text, Mapping):
            # multimodal models keep their end tokens in the configuration of the text part
            ids, source = text.get("eos_token_id"), "config.json: text_config.eos_token_id"
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        sampling = {k: generation[k] for k in SAMPLING_KEYS if generation.get(k) is not None}
        try:
            SamplingParams(**sampling)
        except RowError as error:
            raise InvalidConfig(f"generation_config.json: {error.message}") from None
        return cls(_token_ids(ids, source), sampling, source)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "GenerationDefaults":
        """Read the end tokens of sequence, turn and message."""
        present = {key: metadata[key] for key in GGUF_END_KEYS if key in metadata}
        source = ", ".join(present)
        return cls(_token_ids([*present.values()], source), eos_source=source)

    def as_json(self) -> dict[str, Any]:
        """Return the defaults as a generation_config.json that `from_hf` reads."""
        return {"eos_token_id": list(self.eos_ids), **self.sampling}


def _token_ids(ids: list[Any], where: str) -> tuple[int, ...]:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise InvalidConfig(f"{where}: expected token ids, got {token!r}.")
    return tuple(dict.fromkeys(ids))
