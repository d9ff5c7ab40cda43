"""A model of lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness) that runs here.

Importing this module registers the model `noria` in the harness. The harness tokenizes pairs of
texts as it does for its own models, so scores are those of the same tokens. Each call of the
harness is one submission of all its requests.

Does not know about tasks or metrics. Guarantees: nothing is truncated, as a request that does not
fit the plan raises an error before any request of its call runs.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import normalize_gen_kwargs  # pyright: ignore[reportMissingImports]
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
)

from ..checkpoint.generation_defaults import PUBLISHED
from ..errors import ConfigError
from ..llm import LLM
from ..request import SamplingParams
from ..text.chat_template import ChatRenderer
from ..text.tokenizer import DEFAULT

DEFAULT_MAX_TOKENS = 256
"""The tokens of an answer if a task does not say, as in the harness."""
_IGNORED = ("batch_size", "max_batch_size", "device")
"""Arguments that the harness gives to every model; the plan decides them here."""


@register_model("noria")
class HarnessModel(TemplateLM):
    """A model that answers the requests of the harness.

    Args:
        pretrained: The model, as in `LLM`; the harness has this name for it.
        options: Keyword arguments of `LLM`.

    Raises:
        ConfigError: The model has no tokenizer.
    """

    def __init__(self, pretrained: str, **options: Any):
        super().__init__()
        chosen = {key: value for key, value in options.items() if key not in _IGNORED}
        self._llm = LLM(pretrained, **chosen)
        self._name = pretrained
        encoder = self._llm.get_tokenizer()
        if encoder is None:
            raise ConfigError(
                f"{pretrained}: expected a model with a tokenizer, as tasks are texts, got one "
                "without. Put its files into the model's folder."
            )
        self._encoder = encoder

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        if (token := self._encoder.eos_id) is None:
            raise ConfigError("Expected a tokenizer with an eos_token, got none.")
        return token

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        return self.eot_token_id if self._encoder.bos_id is None else self._encoder.bos_id

    @property
    def max_length(self) -> int:
        """The largest number of tokens that a scored text may have before its last token."""
        return self._llm.plan.buckets.max_length - 1

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer in caches of the harness."""
        return self._name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The ids of a text; by default with BOS if the model's files say so."""
        ids, bos = self._encoder.encode(string, special_tokens=True), self._encoder.bos_id
        if add_special_tokens is False and self._encoder.add_bos and bos is not None:
            has_own = string.startswith(self._encoder.decode([bos], skip_special_tokens=False))
            return ids if has_own else ids[1:]
        return ids

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The chat template of the model, for the harness to record."""
        template = self._encoder.chat_templates.get(DEFAULT)
        return template.text if chat_template and template is not None else None

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation; the answer of the assistant begins after it.

        Raises:
            ConfigError: The task begins the answer itself.
        """
        if not add_generation_prompt:
            raise ConfigError(
                "Expected conversations that end before the answer, got a task that begins it "
                "(gen_prefix). Run it without the chat template."
            )
        with closing(ChatRenderer(self._encoder)) as renderer:
            ids = renderer.encode(list(chat_history), add_generation_prompt=True)
        return self._encoder.decode(ids, skip_special_tokens=False)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether it is the greedy one."""
        prompts = [context + continuation for _, context, continuation in requests]
        outputs = self._llm.score(prompts, num_alternatives=1) if prompts else []
        results = []
        for (texts, context, __), output in zip(requests, outputs, strict=True):
            entries = [entry for entry in (output.prompt_logprobs or ())[len(context) :] if entry]
            is_greedy = all(entry.top[0][0] == entry.token_id for entry in entries)
            results.append((sum(entry.logprob for entry in entries), is_greedy))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, results[-1])
        return results

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of each whole text, in windows if it is longer than the plan."""
        del disable_tqdm
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            (text,) = request.args
            ids = self.tok_encode(text)
            pieces = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            for piece in map(make_disjoint_window, pieces):
                windows.append((None, *piece))
                owners.append(index)
        sums = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += logprob
        for request, logprob in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, logprob)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to one of its stop strings."""
        del disable_tqdm
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        params = [sampling_of(request.args[1]) for request in requests]
        outputs = self._llm.generate(prompts, params) if prompts else []
        texts = [output.outputs[0].text for output in outputs]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


def sampling_of(options: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters that a task asks for.

    Raises:
        ConfigError: The task asks for something that noria does not have.
    """
    asked = dict(normalize_gen_kwargs(dict(options), DEFAULT_MAX_TOKENS))
    stop = [text for text in asked.pop("until") if text]
    is_sampled, temperature = asked.pop("do_sample"), asked.pop("temperature", 1.0)
    names = {"max_gen_toks": "max_tokens"} | {name: name for name in PUBLISHED}
    known = {names[key]: asked.pop(key) for key in list(asked) if key in names}
    if asked:
        raise ConfigError(
            f"Expected generation options among until, do_sample, temperature, {', '.join(names)}, "
            f"got {', '.join(asked)}. Leave them out of the task, or of --gen-kwargs."
        )
    return SamplingParams(stop=stop, temperature=temperature if is_sampled else 0.0, **known)
