"""The Python interface: `LLM.generate`, `LLM.chat`, `LLM.score` and `LLM.embed`.

Names and the defaults of `SamplingParams` are vLLM's, with three exceptions. `max_tokens` is None
by default, and means all tokens that the plan's `max_length` leaves. Log-probabilities are one
`TokenLogprob` per token. `score` takes prompts, not pairs of texts. All graphs are compiled at
construction. If a prompt does not fit the grid, its call raises an error before any prompt of the
call runs. After a call that was interrupted, or that failed on the device, the model can be used
again.
"""

import operator
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np

from ..compile.expert_plan import ExpertPlan, default_experts
from ..compile.grids.bucket_grid import BucketGrid
from ..compile.grids.default_grid import ladder_grid
from ..compile.grids.embed_grid import embed_ladder
from ..compile.grids.grid_defaults import GridDefaults
from ..compile.grids.grid_values import is_count
from ..compile.plan import Numbers, Plan, PlannedModel
from ..compile.targets import Target, default_platform, find_target
from ..sharding.layout import Layout
from . import session
from .adapters.adapter_set import AdapterSet
from .adapters.merged_model import open_merged
from .bundles import compilation_cache
from .bundles.warm_start import WarmStart
from .checkpoint import ModelFiles
from .checkpoint.published_numbers import keep_published
from .console import tell
from .embedding.outputs import EmbeddingOutput, EmbeddingRequestOutput
from .embedding.plan import aims
from .embedding.session import EmbeddingSession
from .embedding.texts import EncodedText, pack, whole_text
from .embedding.vectors import shortened
from .engine.generation import GenerationSession
from .errors import RowError, check_process
from .files.layout_files import read_layout_table
from .files.run_config import read_instant, read_plan_table
from .request import Request, RequestOutput, SamplingParams
from .structured.params import StructuredOutputsParams
from .structured.structures import Structures
from .text.chat_template import ChatRenderer
from .text.load_tokenizer import load_tokenizer
from .text.tokenizer import Tokenizer
from .vllm_options import CALL, CHAT, EMBED, MODEL, also_accepts

Prompt = str | Sequence[int] | Mapping[str, Any]
_Row = tuple[str | None, list[int]]
"""The text of a prompt, or None if it was given as ids, and its token ids."""

AdapterName = str | Sequence[str | None] | None
"""The name of an adapter for all prompts of a call, or a name or None for each."""

DEFAULT_MAX_LENGTH = 2048
DEFAULT_SLOTS = 16
_NO_OUTPUT = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=0)
RUNNERS = ("auto", "generate", "pooling")


class LLM:
    """A model with a compiled grid, for scripts and notebooks.

    Close it, or use it in `with`, to free the memory of its devices. Keyword arguments of vLLM
    that have no effect here are accepted by the constructor and all methods.

    Args:
      model: A Hugging Face directory, a `.gguf` file, a checkpoint of noria, or `smollm2`.
      merge_adapter: The folder of an adapter of peft, which is merged into the weights.
      adapters: The folders of adapters of peft, by the names that prompts give.
      plan: A plan, a plan file, or a bundle, which needs no compile. By default the plan is derived
        from `max_model_len` and `max_num_seqs`.
      max_model_len: Maximum length of prompt and output together, at which rows without
        `max_tokens` end. By default the model's own limit, at most 2048; a line on stderr says so
        if the limit is longer.
      max_num_seqs: Number of decode slots.
      dtype: `float32`, `bfloat16`, or `auto` for the faster of the two.
      numbers: Keys of a plan's table `[numbers]`, except `dtype`, such as `{"weights": "int8"}` or
        `{"weights": "int4", "group": 64}`. By default all numbers are float.
      target: Device kind, with a number of devices for a layout (`cpu:8`). By default jax's default
        backend.
      layout: The layout of the model on several devices: its name, optionally with another mesh
        as in `data-tensor@data=4,tensor=2`, or a TOML file.
      experts: How tokens are dispatched to experts. By default no expert choice is dropped.
      seed: Derives the seeds of requests that have no seed of their own.
      strict_config: Whether to refuse a config.json with keys that nothing reads.
      runner: `generate`, or `pooling` to compute vectors of texts with `embed` only. By default
        `pooling` if the plan or the model can only embed, else `generate`.
      structured_outputs: The forms that requests may ask for, which are compiled with the graphs.
      now: The local time that chat templates see, such as `2026-01-31T12:00:00`. By default the
        time of the first chat.

    Raises:
      ValueError: An argument or a plan is invalid, or does not fit the model or the target.
      OSError: A file cannot be read.
      CheckpointError: The model cannot be used.
      GraphFailed: A graph does not compile, or needs more memory than a device has.
      OutOfMemory: The weights do not fit into the memory of the devices.
    """

    @also_accepts(MODEL)
    def __init__(
        self,
        model: str,
        *,
        merge_adapter: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        plan: Plan | str | Path | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = DEFAULT_SLOTS,
        dtype: str = "auto",
        numbers: Mapping[str, Any] | None = None,
        target: str | None = None,
        layout: str | None = None,
        experts: ExpertPlan | None = None,
        seed: int = 0,
        strict_config: bool = False,
        runner: str = "auto",
        structured_outputs: Sequence[StructuredOutputsParams] = (),
        now: str | None = None,
    ):
        """Load the model and compile its grid; see the class for the arguments."""
        if runner not in RUNNERS:
            raise ValueError(f"runner: expected one of {', '.join(RUNNERS)}, got {runner!r}.")
        self._now = None if now is None else read_instant("now", now)
        path = Path(plan) if isinstance(plan, str | Path) else None
        if isinstance(plan, str | Path):
            plan = Plan.from_table(read_plan_table(Path(plan)))
        say = partial(tell, sys.stderr)
        session.prepare_jax(target or (plan.target if plan else None))
        cache = compilation_cache.enable(say)
        device = find_target(target or (plan.target if plan else default_platform()))
        with open_merged(model, merge_adapter) as files:
            files.unread.report(say, is_strict=strict_config)
            named = {name: Path(folder) for name, folder in (adapters or {}).items()}
            own_adapters = AdapterSet.open(files, named) if named else None
            if plan is None:
                dtype = session.resolve_dtype(dtype, device)
                planned = PlannedModel(model, files.fingerprint())
                own = Numbers.from_table({"dtype": dtype, **(numbers or {})})
                own = keep_published(own, files)
                arguments = files, device, planned, own, layout
                if _pools(runner, files):
                    if experts is not None or structured_outputs:
                        raise ValueError(
                            "experts, structured_outputs: expected none for vectors of texts. "
                            "Remove them, or open the model with runner='generate'."
                        )
                    plan = _pooling_plan(*arguments, max_model_len)
                else:
                    plan = _own_plan(*arguments, experts, max_model_len, max_num_seqs)
            elif layout is not None or experts is not None or numbers is not None:
                raise ValueError(
                    "layout, experts, numbers: expected none beside a plan, which has its own. "
                    "Change them in the plan."
                )
            elif runner not in ("auto", "pooling" if plan.buckets.embed else "generate"):
                raise ValueError(
                    f"runner: expected {'pooling' if plan.buckets.embed else 'generate'!r} or "
                    f"'auto', as the plan says, got {runner!r}."
                )
            plan = replace(plan, numbers=keep_published(plan.numbers, files))
            structures = _structures(files, structured_outputs)
            if path is None and plan.buckets.structured is None and not plan.buckets.embed:
                forms = {form.fingerprint for form in structured_outputs}
                grid = replace(plan.buckets, structured=structures.grid(forms))
                plan = replace(plan, buckets=grid)
            if own_adapters is not None:
                if path is None and plan.buckets.adapters is None:
                    grid = replace(plan.buckets, adapters=own_adapters.grid())
                    plan = replace(plan, buckets=grid)
                own_adapters.check(plan.buckets.adapters)
            session.check_plan(plan, files, device, dtype)
            self.plan = plan
            bundle = path if path is not None and path.is_dir() else None
            warm = WarmStart(bundle, cache, plan, device, files, say)
            loaded = session.load_model(
                files,
                device,
                plan.numbers.dtype,
                plan.layout,
                plan.model.scan_layers,
                say,
                plan.numbers.weight_rules,
                plan.numbers.cache_codes,
                plan.buckets.adapters,
                own_adapters,
            )
        self._tokenizer = loaded.tokenizer
        self._generator: GenerationSession | EmbeddingSession | None
        if plan.buckets.embed:
            self._generator = session.start_embedding(loaded, plan, warm=warm)
        else:
            self._generator = session.start(
                loaded, plan, seed=seed, warm=warm, structures=structures
            )
        config = loaded.definition.config
        self._pooling, self._vector_size = config.pooling, config.pooling.size(config.embed)
        self._renderer: ChatRenderer | None = None
        self._num_requests = 0
        self._lock, self._is_running = threading.Lock(), False

    def __enter__(self) -> "LLM":
        """Return the model itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the model."""
        self.close()

    @also_accepts(CALL)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterName = None,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
          prompts: One prompt or several. A prompt is a text, token ids, `{"prompt": text}` or
            `{"prompt_token_ids": ids}`; ids are a list or a one-dimensional array of integers.
          sampling_params: Parameters for all prompts, or a sequence with parameters for each.
          adapter: The name of the adapter for all prompts, or a list with a name or None for each.

        Returns:
          One output for each prompt, in order.

        Raises:
          RowError: A prompt or its parameters cannot be served; no prompt of the call has run.
          ValueError: The numbers of prompts and parameters differ, or the model is closed.
          GraphFailed: The device failed.
        """
        self._require_open()
        rows = _as_list(prompts)
        return self._run([self._tokenize(row) for row in rows], sampling_params, adapter)

    @also_accepts(CHAT)
    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        adapter: AdapterName = None,
    ) -> list[RequestOutput]:
        """Answer conversations.

        Args:
          messages: One conversation, which is a list of messages, or a list of conversations.
          sampling_params: Parameters for all conversations, or a sequence with parameters for each.
          add_generation_prompt: Whether to begin the assistant's answer in the prompt.
          chat_template_kwargs: Extra variables for the model's chat template.
          tools: The tools that the template shows to the model, as in a chat request. Calls stay
            text in the answers.
          adapter: The name of the adapter for all conversations, or a list with one for each.

        Returns:
          One output for each conversation, in order.

        Raises:
          RowError: The model has no chat template, or a conversation or its parameters cannot be
            served; nothing of the call has run.
          ValueError: The numbers of conversations and parameters differ, or the model is closed.
          GraphFailed: The device failed.
        """
        self._require_open()
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else messages
        rows: list[_Row] = [
            (
                None,
                self._chat_renderer().encode(
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    template_kwargs=chat_template_kwargs,
                    tools=tools,
                ),
            )
            for conversation in conversations
        ]
        return self._run(rows, sampling_params, adapter)

    @also_accepts(CALL)
    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        num_alternatives: int = 0,
        adapter: AdapterName = None,
    ) -> list[RequestOutput]:
        """Compute the log-probability of every prompt token, without generating tokens.

        Args:
          prompts: One prompt or several, as for `generate`.
          num_alternatives: The number of likeliest tokens to report beside each prompt token.
          adapter: The name of the adapter for all prompts, or a list with a name or None for each.

        Returns:
          One output for each prompt, with the log-probabilities in `prompt_logprobs`.

        Raises:
          RowError: A prompt cannot be served, or the plan has no score graphs.
        """
        params = SamplingParams(max_tokens=0, prompt_logprobs=num_alternatives)
        return self.generate(prompts, params, adapter=adapter)

    @also_accepts(EMBED)
    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None
    ) -> list[EmbeddingRequestOutput]:
        """Compute the vectors of texts, pooled and normalised as the model's files say.

        Texts get the default prompt of the model's files, if there is one, and the special tokens
        of the tokenizer's template; token ids are taken as they are.

        Args:
          prompts: One text or several, as for `generate`.
          dimensions: The number of leading features to keep; None for all. Shorter vectors are
            normalised again, if the model normalises.

        Returns:
          One output for each text, in order, with its vector in `outputs.embedding`.

        Raises:
          RowError: A text cannot be served, or has fewer features; no text of the call has run.
          ValueError: The model was opened to generate, or is closed.
          GraphFailed: The device failed.
        """
        embedder = self._require_open()
        if not isinstance(embedder, EmbeddingSession):
            raise ValueError(
                "embed: expected a model for vectors of texts, got one that generates. Open it "
                "with LLM(..., runner='pooling')."
            )
        if self._pooling.labels:
            raise ValueError(
                "embed: expected a model of embeddings, got a classifier. Give /v1/classify rows "
                "to noria batch."
            )
        if dimensions is not None and not (
            is_count(dimensions) and dimensions <= self._vector_size
        ):
            raise RowError(
                "invalid_request",
                f"dimensions: expected a number from 1 to {self._vector_size}, got {dimensions!r}.",
                "dimensions",
            )
        texts = [self._whole(prompt) for prompt in _as_list(prompts)]
        packed: list[_Row] = [(None, pack([text])) for text in texts]
        outputs = self._run_session(embedder, packed, repeat(_NO_OUTPUT), [None] * len(texts))
        return [
            EmbeddingRequestOutput(output.request_id, list(text.ids), EmbeddingOutput(vector))
            for output, text in zip(outputs, texts, strict=True)
            for vector in self._vectors(output, dimensions)
        ]

    def get_tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer, or None if it has none."""
        return self._tokenizer

    def close(self) -> None:
        """Free the model, and stop the child process that renders chat templates.

        A second call does nothing.
        """
        if self._renderer is not None:
            self._renderer.close()
        self._generator = None

    def _require_open(self) -> GenerationSession | EmbeddingSession:
        check_process()
        if self._generator is None:
            raise ValueError("LLM: expected an open model, got one after close(). Make another.")
        return self._generator

    def _vectors(self, output: RequestOutput, dimensions: int | None) -> np.ndarray:
        if output.error is not None or output.vectors is None:
            raise output.error or AssertionError("a request ends with vectors or an error")
        normalises = self._pooling.normalises
        return shortened(output.vectors, dimensions, normalises=normalises)

    def _whole(self, prompt: Prompt) -> EncodedText:
        """A text with the special tokens of the tokenizer's template; ids as they are."""
        content = _content(prompt)
        if not isinstance(content, str):
            return whole_text(_token_ids(content))
        if self._tokenizer is None:
            raise _no_tokenizer()
        (encoded,) = self._tokenizer.encode_whole([self._pooling.prompt + content])
        if isinstance(encoded, RowError):
            raise encoded
        return encoded

    def _run(
        self,
        rows: list[_Row],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: AdapterName,
    ) -> list[RequestOutput]:
        generator = self._require_open()
        if not isinstance(generator, GenerationSession):
            raise ValueError(
                "LLM: expected a model that generates, got one for vectors of texts. Call embed, "
                "or open it with runner='generate'."
            )
        names = _names_of(adapter, len(rows))
        return self._run_session(generator, rows, _one_each(sampling_params, len(rows)), names)

    def _run_session(
        self,
        generator: GenerationSession | EmbeddingSession,
        rows: list[_Row],
        params: Iterable[SamplingParams],
        adapters: Sequence[str | None],
    ) -> list[RequestOutput]:
        with self._lock:
            requests = []
            for (text, ids), param, name in zip(rows, params, adapters, strict=False):
                requests.append(Request(str(self._num_requests), ids, param, text, name))
                self._num_requests += 1
            # check all requests before the first is queued, so that an error leaves none queued
            for request in requests:
                generator.check(request)
            # clean up after an earlier call that was interrupted
            if self._is_running:
                generator.abandon()
            self._is_running = True
            for request in requests:
                generator.submit(request)
            outputs = {output.request_id: output for output in generator.run()}
            self._is_running = False
        return [outputs[request.request_id] for request in requests]

    def _tokenize(self, prompt: Prompt) -> _Row:
        content = _content(prompt)
        if not isinstance(content, str):
            return None, _token_ids(content)
        if self._tokenizer is None:
            raise _no_tokenizer()
        return content, self._tokenizer.encode(content, special_tokens=True)

    def _chat_renderer(self) -> ChatRenderer:
        if self._renderer is None:
            if self._tokenizer is None:
                raise RowError(
                    "chat_template_error",
                    "messages: expected a model with a chat template, got one without a "
                    "tokenizer. Use generate with token ids.",
                    "messages",
                )
            self._renderer = ChatRenderer(self._tokenizer, now=self._now)
        return self._renderer


def _structures(files: ModelFiles, forms: Sequence[StructuredOutputsParams]) -> Structures:
    """Compile the forms that requests may ask for."""
    structures = Structures()
    if forms and (tokenizer := load_tokenizer(files.tokenizer_files)) is not None:
        structures.make_trie = partial(session.vocabulary_trie, files, tokenizer)
    for form in forms:
        structures.automaton(form)
    return structures


def _own_plan(
    files: ModelFiles,
    target: Target,
    model: PlannedModel,
    numbers: Numbers,
    layout: str | None,
    experts: ExpertPlan | None,
    max_model_len: int | None,
    max_num_seqs: int,
) -> Plan:
    """Make the plan of an `LLM` without a given plan."""
    config = files.spec.config
    model_layout = None if layout is None else Layout.from_table(read_layout_table(layout))
    session.check_layout(model_layout, files, target, weight_rules=numbers.weight_rules)
    grid = _ladder(files, max_model_len, max_num_seqs, GridDefaults.for_layout(model_layout))
    reason = ""
    if max_model_len is None and grid.max_length < config.max_position:
        reason = f"LLM plans for {grid.max_length} tokens if max_model_len is not given"
        tell(sys.stderr, f"rows without max_tokens: {reason}")
    experts = experts or default_experts(config)
    return Plan(target.name, model, numbers, grid, model_layout, experts, max_length_reason=reason)


def _ladder(
    files: ModelFiles, max_model_len: int | None, max_num_seqs: int, defaults: GridDefaults
) -> BucketGrid:
    max_length = _max_length(files, max_model_len)
    return ladder_grid(max_length, max_num_seqs, score=True, defaults=defaults)


def _max_length(files: ModelFiles, max_model_len: int | None) -> int:
    limit = files.spec.config.max_position
    if max_model_len is not None and max_model_len > limit:
        raise ValueError(
            f"max_model_len: expected at most {limit}, the published context of this model, got "
            f"{max_model_len}."
        )
    return min(limit, max_model_len or DEFAULT_MAX_LENGTH)


def _pools(runner: str, files: ModelFiles) -> bool:
    """Whether to make a plan that only embeds texts."""
    if runner == "auto":
        return files.spec.config.lacks_generation is not None
    return runner == "pooling"


def _pooling_plan(
    files: ModelFiles,
    target: Target,
    model: PlannedModel,
    numbers: Numbers,
    layout: str | None,
    max_model_len: int | None,
) -> Plan:
    """Make the plan of an `LLM` for vectors of texts."""
    model_layout = None if layout is None else Layout.from_table(read_layout_table(layout))
    session.check_layout(model_layout, files, target, weight_rules=numbers.weight_rules)
    max_length = _max_length(files, max_model_len)
    grid = embed_ladder(max_length, aims(target.name, model_layout))
    experts = default_experts(files.spec.config)
    return Plan(target.name, model, numbers, grid, model_layout, experts)


def _content(prompt: Prompt) -> Any:
    """The text or the ids of a prompt."""
    if not isinstance(prompt, Mapping):
        return prompt
    if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
        raise RowError(
            "invalid_request",
            "prompt: expected {'prompt': text} or {'prompt_token_ids': ids}, "
            f"got the keys {sorted(prompt)}.",
            "prompt",
        )
    return next(iter(prompt.values()))


def _no_tokenizer() -> RowError:
    return RowError(
        "invalid_request",
        "prompt: expected token ids, as this model has no tokenizer, got text. Give token ids.",
        "prompt",
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    is_one = isinstance(prompts, str | Mapping | np.ndarray) or (
        len(prompts) > 0 and isinstance(prompts[0], Number)
    )
    return [prompts] if is_one else list(prompts)  # pyright: ignore[reportReturnType]


def _token_ids(prompt: Any) -> list[int]:
    """Token ids as Python integers; raises RowError for values that cannot be ids."""
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1:
            raise _no_ids(f"an array of shape {prompt.shape}", "Give its rows as list(array)")
        prompt = prompt.tolist()
    try:
        ids = list(prompt)
        # bool is an int in Python, but an array of bool is a mask, not a prompt
        if any(isinstance(token, bool) for token in ids):
            raise TypeError
        return [operator.index(token) for token in ids]
    except TypeError:
        remedy = "Give token ids as integers, as with array.astype(int), or text"
        raise _no_ids(repr(prompt)[:60], remedy) from None


def _no_ids(got: str, remedy: str) -> RowError:
    expected = "text, or a list or one-dimensional array of integers"
    return RowError("invalid_request", f"prompt: expected {expected}, got {got}. {remedy}.")


def _names_of(adapter: AdapterName, count: int) -> Sequence[str | None]:
    if adapter is None or isinstance(adapter, str):
        return [adapter] * count
    if len(adapter) != count:
        raise ValueError(
            f"adapter: expected one for all prompts or one each ({count}), got {len(adapter)}."
        )
    return adapter


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(
            f"sampling_params: expected one for all prompts or one each ({count}), "
            f"got {len(params)}."
        )
    return params
