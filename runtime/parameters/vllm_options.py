"""Keyword arguments of vLLM that are accepted if they have no effect here.

The names are those of vLLM's `LLM`, `LLM.generate`, `LLM.chat` and `SamplingParams`
(github.com/vllm-project/vllm, entrypoints/llm.py, engine/arg_utils.py, sampling_params.py).
Guarantees: a value that would change an answer is refused by name, with the remedy; no other name
is accepted.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

from ..errors import UserError

_F = TypeVar("_F", bound=Callable[..., Any])


class AcceptedValues(NamedTuple):
    """The values of an argument that have no effect, and the remedy for other values."""

    values: tuple[Any, ...]
    remedy: str

    def has(self, value: Any) -> bool:
        """Whether the value has no effect."""
        return self is ANY or value in self.values


ANY = AcceptedValues((), "")
"""An argument whose values all have no effect."""
NOT_OFFERED = "noria has no such feature: leave it out"
_OWN_TOKENIZER = "Put the tokenizer's files into the model's folder"
_REVISION = "Download that revision with hf download --revision, and name its folder"
OFF, _NONE = (
    AcceptedValues((False,), NOT_OFFERED),
    AcceptedValues((None, [], {}, ()), NOT_OFFERED),
)
_DEVICES = AcceptedValues(
    (1,), "Give target and layout, as in target='gpu:4', layout='weight-stationary-1d'"
)

CALL: Mapping[str, AcceptedValues] = {
    "use_tqdm": ANY,
    "priority": ANY,
    "lora_request": AcceptedValues((None,), "Give adapter, a name in LLM(adapters=...)"),
    "prompt_adapter_request": _NONE,
    "guided_options_request": _NONE,
    "tokenization_kwargs": _NONE,
    "mm_processor_kwargs": _NONE,
}
EMBED = CALL | {
    "truncate_prompt_tokens": AcceptedValues(
        (None,), "Only rows of noria batch cut texts: shorten the text"
    ),
    "pooling_params": AcceptedValues((None,), "Pooling is as the model's files say"),
    "pooling_task": AcceptedValues((None, "embed"), NOT_OFFERED),
}
CHAT = CALL | {
    "chat_template": AcceptedValues(
        (None,), "Put it into the model's folder, as chat_template.jinja"
    ),
    "chat_template_content_format": AcceptedValues(
        ("auto",), "Templates get contents as they are given"
    ),
}
MODEL: Mapping[str, AcceptedValues] = {
    **dict.fromkeys(
        (
            "gpu_memory_utilization",
            "kv_cache_memory_bytes",
            "swap_space",
            "cpu_offload_gb",
            "enforce_eager",
            "compilation_config",
            "max_seq_len_to_capture",
            "max_num_batched_tokens",
            "block_size",
            "num_gpu_blocks_override",
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "disable_custom_all_reduce",
            "disable_async_output_proc",
            "disable_log_stats",
            "distributed_executor_backend",
            "max_parallel_loading_workers",
            "use_tqdm_on_load",
            "allowed_local_media_path",
            "download_dir",
            "hf_token",
        ),
        ANY,
    ),
    "trust_remote_code": AcceptedValues((False,), "No code that comes with a model is run"),
    "tensor_parallel_size": _DEVICES,
    "pipeline_parallel_size": _DEVICES,
    "data_parallel_size": _DEVICES,
    "tokenizer": AcceptedValues((None,), _OWN_TOKENIZER),
    "tokenizer_mode": AcceptedValues(("auto",), _OWN_TOKENIZER),
    "skip_tokenizer_init": AcceptedValues(
        (False,), "Give token ids as prompts, and read token_ids"
    ),
    "load_format": AcceptedValues(("auto", "safetensors"), "The format is seen from the files"),
    "quantization": AcceptedValues((None,), "Give numbers, such as {'weights': 'int8'}"),
    "kv_cache_dtype": AcceptedValues(("auto",), "Give numbers, such as {'cache': 'int8'}"),
    "logprobs_mode": AcceptedValues(("raw_logprobs",), "Log-probabilities are of the raw logits"),
    "revision": AcceptedValues((None,), _REVISION),
    "code_revision": AcceptedValues((None,), _REVISION),
    "tokenizer_revision": AcceptedValues((None,), _REVISION),
    "task": AcceptedValues(("auto", "generate"), "Give runner='pooling' for vectors of texts"),
    "enable_lora": AcceptedValues((False,), "Give adapters, the folders of adapters by name"),
    "hf_overrides": AcceptedValues((None, {}), "Edit config.json in the model's folder"),
    "limit_mm_per_prompt": _NONE,
    "mm_processor_kwargs": _NONE,
    "speculative_config": _NONE,
}
SAMPLING: Mapping[str, AcceptedValues] = {
    "output_kind": ANY,
    "stream_interval": ANY,
    "skip_clone": ANY,
    "detokenize": AcceptedValues((True,), "Read token_ids of the outputs, and leave their text"),
    "spaces_between_special_tokens": AcceptedValues((True,), NOT_OFFERED),
    "flat_logprobs": OFF,
    "best_of": AcceptedValues((None, 1), "Ask for n, and choose by cumulative_logprob"),
    "use_beam_search": OFF,
    "early_stopping": OFF,
    "length_penalty": AcceptedValues((1.0,), NOT_OFFERED),
    "logits_processors": _NONE,
    "logprob_token_ids": _NONE,
    "guided_decoding": AcceptedValues((None,), "Give structured_outputs"),
    "thinking_token_budget": _NONE,
    "repetition_detection": _NONE,
    "truncate_prompt_tokens": AcceptedValues(
        (None,), "Only rows of noria batch cut prompts: shorten the prompt"
    ),
    "extra_args": _NONE,
}
STRUCTURED: Mapping[str, AcceptedValues] = {
    "structural_tag": AcceptedValues((None,), "Give json, regex, choice or grammar"),
    "whitespace_pattern": AcceptedValues((None,), "Spaces follow colons and commas only"),
    "disable_fallback": ANY,
    "disable_any_whitespace": ANY,
    "disable_additional_properties": ANY,
}


def also_accepts(options: Mapping[str, AcceptedValues]) -> Callable[[_F], _F]:
    """Make a decorator that lets a function or a constructor accept more keyword arguments.

    The decorated callable raises ValueError for a value that would have an effect.

    Args:
      options: The accepted values of each argument.
    """

    def decorate(target: _F) -> _F:
        if isinstance(target, type):
            decorated_class = cast(Any, target)
            decorated_class.__init__ = decorate(decorated_class.__init__)
            return decorated_class

        @wraps(target)
        def call(*arguments: Any, **named: Any) -> Any:
            for name in named.keys() & options.keys():
                _check(name, named.pop(name), options[name])
            return target(*arguments, **named)

        return cast(_F, call)

    return decorate


def _check(name: str, value: Any, accepted: AcceptedValues) -> None:
    if accepted.has(value):
        return
    listed = " or ".join(map(repr, accepted.values))
    raise UserError(f"{name}: expected {listed}, got {value!r}. {accepted.remedy}.")
