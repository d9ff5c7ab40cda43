"""Read generation defaults of a published model: end tokens and sampling parameters.

The sources are the parsed `generation_config.json` and `config.json` of a Hugging Face directory,
or GGUF metadata. Does not know about rows: the caller decides whether a default applies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...modelzoo.families.config_reader import listing
from ..errors import InvalidConfig, RowError
from ..request import PARAMETERS, SamplingParams

PUBLISHED = tuple(name for name, entry in PARAMETERS.items() if entry.published)
NEUTRAL: Mapping[str, object] = {
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "top_h": 1,
    "penalty_alpha": 0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "bad_words_ids": [],
    "force_words_ids": [],
    "constraints": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "forced_decoder_ids": [],
    "sequence_bias": [],
    "exponential_decay_length_penalty": None,
    "stop_strings": [],
    "watermarking_config": None,
    "dola_layers": None,
    "token_healing": False,
}
"""Keys of generation_config.json that change answers and are not served, and the values with which
they change nothing (transformers, `GenerationConfig`)."""
HARMLESS = {
    *("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id"),
    *("transformers_version", "_from_model_config", "generation_kwargs", "trust_remote_code"),
    *("do_sample", "max_length", "max_new_tokens", "max_time", "early_stopping", "length_penalty"),
    *("use_cache", "cache_implementation", "cache_config", "return_legacy_cache", "low_memory"),
    *("num_return_sequences", "output_scores", "output_logits", "output_attentions"),
    *("output_hidden_states", "return_dict_in_generate", "renormalize_logits", "is_assistant"),
    *("remove_invalid_values", "prefill_chunk_size", "compile_config", "disable_compile"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit"),
    *("assistant_lookbehind", "target_lookbehind"),
}
"""Other keys that are known. Rows say how many tokens they get, and whether they are sampled."""
GGUF_END_KEYS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))


@dataclass(frozen=True)
class GenerationDefaults:
    """End tokens, each of which ends a sequence, and the publisher's sampling parameters."""

    eos_ids: tuple[int, ...] = ()
    sampling: Mapping[str, int | float] = field(default_factory=dict)
    eos_source: str = field(default="", compare=False)
    """The file and the key of the end tokens."""
    unserved: tuple[str, ...] = field(default=(), compare=False)
    """Keys that change answers and are not served, in the form `key = value`."""
    unknown: tuple[str, ...] = field(default=(), compare=False)
    """Keys of which nothing is known, in the same form."""

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
        given = {key: value for key, value in generation.items() if value is not None}
        sampling = {key: given[key] for key in PUBLISHED if key in given}
        try:
            SamplingParams(**sampling)
        except RowError as error:
            raise InvalidConfig(f"generation_config.json: {error.message}") from None
        unserved = (key for key in NEUTRAL if key in given and not _is_neutral(key, given[key]))
        unknown = given.keys() - NEUTRAL.keys() - HARMLESS - {*PUBLISHED}
        return cls(
            _token_ids(ids, source),
            sampling,
            source,
            tuple(f"{key} = {given[key]!r}" for key in unserved),
            tuple(f"{key} = {given[key]!r}" for key in sorted(unknown)),
        )

    def report(self, say: Callable[[str], object]) -> None:
        """Report keys of which nothing is known, before the sampling parameters are used.

        Raises:
          InvalidConfig: There are keys that change answers and are not served.
        """
        if self.unserved:
            raise InvalidConfig(
                f"generation_config.json: expected only defaults that are served, got "
                f"{listing(self.unserved)}. Use --generation-config none, which leaves out all "
                f"defaults of the model, or remove these keys."
            )
        if self.unknown:
            say(
                f"generation_config.json: keys without effect, as nothing reads them: "
                f"{listing(self.unknown)}"
            )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "GenerationDefaults":
        """Read the end tokens of sequence, turn and message."""
        present = {key: metadata[key] for key in GGUF_END_KEYS if key in metadata}
        source = ", ".join(present)
        return cls(_token_ids([*present.values()], source), eos_source=source)

    def as_json(self) -> dict[str, Any]:
        """Return the defaults as a generation_config.json that `from_hf` reads."""
        return {"eos_token_id": list(self.eos_ids), **self.sampling}


def _is_neutral(key: str, value: object) -> bool:
    """Whether a key changes nothing with this value; all empty values are alike."""
    neutral = NEUTRAL[key]
    return value == neutral or (neutral == [] and value in ({}, ()))


def _token_ids(ids: list[Any], where: str) -> tuple[int, ...]:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise InvalidConfig(f"{where}: expected token ids, got {token!r}.")
    return tuple(dict.fromkeys(ids))
