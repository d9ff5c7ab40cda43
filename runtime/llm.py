"""The Python interface: `LLM.generate`, `.chat` and `.score`.

Names are vLLM's, and so are the defaults of `SamplingParams`, except that `max_tokens` is None by
default and fills the plan's `max_length`, that log-probabilities are a `TokenLogprob` for each
token, and that `score` takes prompts, not pairs of texts. All graphs are compiled at construction;
a prompt that does not fit the grid raises before anything of its call runs. A call that is
interrupted, or that the device fails, leaves the model ready for the next one.
"""

import operator
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np

from ..compile.expert_plan import ExpertPlan, default_experts
from ..compile.grids.bucket_grid import BucketGrid
from ..compile.grids.default_grid import ladder_grid
from ..compile.grids.grid_defaults import GridDefaults
from ..compile.plan import Numbers, Plan, PlannedModel
from ..compile.targets import Target, default_platform, find_target
from ..sharding.layout import Layout
from . import session
from .bundles import compilation_cache
from .bundles.warm_start import WarmStart
from .checkpoint import ModelFiles, open_model
from .console import tell
from .engine.generation import GenerationSession
from .errors import RowError, check_process
from .files.layout_files import read_layout_table
from .files.run_config import read_instant, read_plan_table
from .request import Request, RequestOutput, SamplingParams
from .text.chat_template import ChatRenderer
from .text.tokenizer import Tokenizer
from .vllm_options import CALL, CHAT, MODEL, also_accepts

Prompt = str | Sequence[int] | Mapping[str, Any]
_Row = tuple[str | None, list[int]]
"""The text of a prompt, where there was one, and its ids."""

DEFAULT_MAX_LENGTH = 2048
DEFAULT_SLOTS = 16


class LLM:
    """A model with its compiled grid, for scripts and notebooks.

    Close it, or use it in `with`, to give its devices' memory back. Keyword
    arguments of vLLM that change nothing are accepted everywhere.

    Args:
      model: A Hugging Face directory, a `.gguf` file, a checkpoint of ours, or `smollm2`.
      plan: The plan to build, its file, or a bundle, which compiles nothing; without one the grid
        comes from the next two.
      max_model_len: Longest prompt and output together, where rows without `max_tokens` end; by
        default the model's own limit, at most 2048, and one line on stderr where that is less.
      max_num_seqs: Decode slots.
      dtype: `float32`, `bfloat16` or `auto`, the faster one.
      target: Device kind, with a number of devices (`cpu:8`) for a layout; by default jax's default
        backend.
      layout: How the model lies on several devices: the name of a layout, with another mesh as in
        `data-tensor@data=4,tensor=2`, or a TOML file.
      experts: How tokens come to the experts of a mixture; by default without loss.
      seed: Seeds the rows that bring no seed of their own.
      strict_config: Refuse a config.json with keys that nothing reads.
      now: Local time that chat templates see, such as `2026-01-31T12:00:00`; by default that of the
        first chat.
    """

    @also_accepts(MODEL)
    def __init__(
        self,
        model: str,
        *,
        plan: Plan | str | Path | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = DEFAULT_SLOTS,
        dtype: str = "auto",
        target: str | None = None,
        layout: str | None = None,
        experts: ExpertPlan | None = None,
        seed: int = 0,
        strict_config: bool = False,
        now: str | None = None,
    ):
        self._now = None if now is None else read_instant("now", now)
        path = Path(plan) if isinstance(plan, str | Path) else None
        if isinstance(plan, str | Path):
            plan = Plan.from_table(read_plan_table(Path(plan)))
        say = partial(tell, sys.stderr)
        session.prepare_jax(target or (plan.target if plan else None))
        cache = compilation_cache.enable(say)
        found = find_target(target or (plan.target if plan else default_platform()))
        with open_model(model) as files:
            files.unread.report(say, is_strict=strict_config)
            if plan is None:
                dtype = session.resolve_dtype(dtype, found)
                planned = PlannedModel(model, files.fingerprint())
                numbers = Numbers(dtype)
                plan = _own_plan(
                    files, found, planned, numbers, layout, experts, max_model_len, max_num_seqs
                )
            elif layout is not None or experts is not None:
                raise ValueError("layout, experts: the plan has its own. Change them there.")
            session.check_plan(plan, files, found, dtype)
            self.plan = plan
            bundle = path if path is not None and path.is_dir() else None
            warm = WarmStart(bundle, cache, plan, found, files, say)
            dtype, scan_layers = plan.numbers.dtype, plan.model.scan_layers
            loaded = session.load_model(files, found, dtype, plan.layout, scan_layers, say)
        self._tokenizer = loaded.tokenizer
        self._generator: GenerationSession | None = session.start(
            loaded, plan, seed=seed, warm=warm
        )
        self._renderer: ChatRenderer | None = None
        self._num_requests = 0
        self._lock, self._is_running = threading.Lock(), False

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @also_accepts(CALL)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts: text, ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.

        Ids are a list or a one-dimensional array of integers.
        """
        self._require_open()
        rows = _as_list(prompts)
        return self._run([self._tokenize(row) for row in rows], sampling_params)

    @also_accepts(CHAT)
    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several."""
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
                ),
            )
            for conversation in conversations
        ]
        return self._run(rows, sampling_params)

    @also_accepts(CALL)
    def score(
        self, prompts: Prompt | Sequence[Prompt], *, num_alternatives: int = 0
    ) -> list[RequestOutput]:
        """Log-probabilities of every prompt token, in `prompt_logprobs`; nothing is generated."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=num_alternatives)
        return self.generate(prompts, params)

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None."""
        return self._tokenizer

    def close(self) -> None:
        """Drop the model, and stop the child process that renders chat templates.

        A second call does nothing.
        """
        if self._renderer is not None:
            self._renderer.close()
        self._generator = None

    def _require_open(self) -> GenerationSession:
        check_process()
        if self._generator is None:
            raise ValueError("LLM: expected an open model, got one after close(). Make another.")
        return self._generator

    def _run(
        self,
        rows: list[_Row],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        generator, params = self._require_open(), _one_each(sampling_params, len(rows))
        with self._lock:
            requests = []
            for (text, ids), param in zip(rows, params, strict=True):
                requests.append(Request(str(self._num_requests), ids, param, text))
                self._num_requests += 1
            # all are checked before the first is queued, so a refusal leaves nothing half done
            for request in requests:
                generator.check(request)
            if (
                self._is_running
            ):  # an interrupt may come anywhere, so the next call cleans up after it
                generator.abandon()
            self._is_running = True
            for request in requests:
                generator.submit(request)
            outputs = {output.request_id: output for output in generator.run()}
            self._is_running = False
        return [outputs[request.request_id] for request in requests]

    def _tokenize(self, prompt: Prompt) -> _Row:
        if isinstance(prompt, Mapping):
            if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
                raise RowError(
                    "invalid_request",
                    "prompt: expected {'prompt': text} or {'prompt_token_ids': ids}, "
                    f"got the keys {sorted(prompt)}.",
                    "prompt",
                )
            prompt = next(iter(prompt.values()))
        if not isinstance(prompt, str):
            return None, _token_ids(prompt)
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RowError(
                "invalid_request",
                "prompt: this model has no tokenizer; give token ids instead of text.",
                "prompt",
            )
        return prompt, tokenizer.encode(prompt, special_tokens=True)

    def _chat_renderer(self) -> ChatRenderer:
        if self._renderer is None:
            if self._tokenizer is None:
                raise RowError(
                    "chat_template_error",
                    "messages: this model has no tokenizer, so no chat template; use generate "
                    "with token ids.",
                    "messages",
                )
            self._renderer = ChatRenderer(self._tokenizer, now=self._now)
        return self._renderer


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
    """The plan of a model for which none was given."""
    config = files.spec.config
    chosen = None if layout is None else Layout.from_table(read_layout_table(layout))
    session.check_layout(chosen, files, target)
    grid = _ladder(files, max_model_len, max_num_seqs, GridDefaults.for_layout(chosen))
    reason = ""
    if max_model_len is None and grid.max_length < config.max_position:
        reason = f"LLM plans for {grid.max_length} tokens where max_model_len is not given"
        tell(sys.stderr, f"rows without max_tokens: {reason}")
    experts = experts or default_experts(config)
    return Plan(target.name, model, numbers, grid, chosen, experts, max_length_reason=reason)


def _ladder(
    files: ModelFiles, max_model_len: int | None, max_num_seqs: int, defaults: GridDefaults
) -> BucketGrid:
    limit = files.spec.config.max_position
    if max_model_len is not None and max_model_len > limit:
        raise ValueError(
            f"max_model_len: expected at most {limit}, the longest sequence that this model was "
            f"published for, got {max_model_len}."
        )
    max_length = min(limit, max_model_len or DEFAULT_MAX_LENGTH)
    return ladder_grid(max_length, max_num_seqs, score=True, defaults=defaults)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    is_one = isinstance(prompts, str | Mapping | np.ndarray) or (
        len(prompts) > 0 and isinstance(prompts[0], Number)
    )
    return [prompts] if is_one else list(prompts)  # pyright: ignore[reportReturnType]


def _token_ids(prompt: Any) -> list[int]:
    """Token ids as Python's integers; raises RowError for values that cannot be ids."""
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1:
            raise _no_ids(f"an array of shape {prompt.shape}", "Give its rows as list(array)")
        prompt = prompt.tolist()
    try:
        ids = list(prompt)
        # bool is an int in Python, but a mask is no prompt
        if any(isinstance(token, bool) for token in ids):
            raise TypeError
        return [operator.index(token) for token in ids]
    except TypeError:
        remedy = "Give token ids as integers, as with array.astype(int), or text"
        raise _no_ids(repr(prompt)[:60], remedy) from None


def _no_ids(got: str, remedy: str) -> RowError:
    expected = "text, or a list or one-dimensional array of integers"
    return RowError("invalid_request", f"prompt: expected {expected}, got {got}. {remedy}.")


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
