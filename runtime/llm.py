"""The Python surface that people know: `LLM.generate`, `.chat` and `.score`.

Names are vLLM's, and so are the defaults of `SamplingParams`, except that `max_tokens` is None by
default and fills the plan's `max_length`, that log-probabilities are a `TokenLogprob` for each
token, and that `score` takes prompts, not pairs of texts. All graphs are compiled at construction;
a prompt that does not fit the grid raises before anything of its call runs.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..compile.bucket_grid import BucketGrid
from ..compile.default_grid import GridDefaults, ladder_grid
from ..compile.expert_plan import ExpertPlan, default_experts
from ..compile.plan import Plan, PlannedModel
from ..compile.targets import find_target
from ..sharding.layout import Layout
from . import compilation_cache, session
from .bundles.warm_start import begin
from .checkpoint import ModelFiles, open_model
from .layout_files import read_layout_table
from .plan_files import read_plan_table
from .request import Request, RequestOutput, RowError, SamplingParams
from .text.chat_template import ChatRenderer

Prompt = str | Sequence[int] | Mapping[str, Any]
_Row = tuple[str | None, list[int]]
"""The text of a prompt, where there was one, and its ids."""

DEFAULT_MAX_LENGTH = 2048
DEFAULT_SLOTS = 16


class LLM:
    """A model with its compiled grid, for scripts and notebooks.

    Args:
      model: A Hugging Face directory, a `.gguf` file, a checkpoint of ours, or `smollm2`.
      plan: The plan to build, its file, or a bundle, which compiles nothing; without one the grid
        comes from the next two.
      max_model_len: Longest prompt and output together; by default the model's own limit, at
        most 2048.
      max_num_seqs: Decode slots.
      dtype: `float32`, `bfloat16` or `auto` (float32 on CPU, bfloat16 elsewhere).
      target: Device kind, with a number of devices (`cpu:8`) for a layout; by default jax's default
        backend.
      layout: How the model lies on several devices: the name of a layout, with another mesh as in
        `data-tensor@data=4,tensor=2`, or a TOML file.
      experts: How tokens come to the experts of a mixture; by default without loss.
      seed: Seeds the rows that bring no seed of their own.
    """

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
    ):
        import jax

        path = Path(plan) if isinstance(plan, str | Path) else None
        if isinstance(plan, str | Path):
            plan = Plan.from_table(read_plan_table(Path(plan)))
        compilation_cache.enable()
        session.prepare_cpu(target or (plan.target if plan else None))
        found = find_target(target or (plan.target if plan else jax.default_backend()))
        files = open_model(model)
        if plan is None:
            dtype = session.resolve_dtype(dtype, found)
            chosen = None if layout is None else Layout.from_table(read_layout_table(layout))
            session.check_layout(chosen, files, found)
            grid = _ladder(files, max_model_len, max_num_seqs, GridDefaults.for_layout(chosen))
            planned = PlannedModel(model, files.fingerprint(), dtype)
            experts = experts or default_experts(files.spec.config)
            plan = Plan(found.name, planned, grid, chosen, experts)
        elif layout is not None or experts is not None:
            raise ValueError("layout, experts: the plan has its own. Change them there.")
        session.check_plan(plan, files, found, dtype)
        self.plan = plan
        warm = begin(path, plan, found, files, partial(print, file=sys.stderr))
        self._model = session.load_model(
            files, found, plan.model.dtype, plan.layout, warm, plan.model.scan_layers
        )
        self._generator = session.start(self._model, plan, seed=seed, warm=warm)
        self._renderer: ChatRenderer | None = None
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts: text, ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`."""
        rows = _as_list(prompts)
        return self._run([self._tokenize(row) for row in rows], sampling_params)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several."""
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

    def score(
        self, prompts: Prompt | Sequence[Prompt], *, num_alternatives: int = 0
    ) -> list[RequestOutput]:
        """Log-probabilities of every prompt token, in `prompt_logprobs`; nothing is generated."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=num_alternatives)
        return self.generate(prompts, params)

    def get_tokenizer(self):
        """The model's tokenizer, or None."""
        return self._model.tokenizer

    def close(self) -> None:
        """Stop the child process that renders chat templates, if there is one."""
        if self._renderer is not None:
            self._renderer.close()

    def _run(
        self,
        rows: list[_Row],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        params = _one_each(sampling_params, len(rows))
        requests = []
        for (text, ids), param in zip(rows, params, strict=True):
            requests.append(Request(str(self._num_requests), ids, param, text))
            self._num_requests += 1
        # all are checked before the first is queued, so a refusal leaves nothing half done
        for request in requests:
            self._generator.check(request)
        for request in requests:
            self._generator.submit(request)
        outputs = {output.request_id: output for output in self._generator.run()}
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
            return None, list(prompt)  # pyright: ignore[reportReturnType]
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            raise RowError(
                "invalid_request",
                "prompt: this model has no tokenizer; give token ids instead of text.",
                "prompt",
            )
        return prompt, tokenizer.encode(prompt, special_tokens=True)

    def _chat_renderer(self) -> ChatRenderer:
        if self._renderer is None:
            if self._model.tokenizer is None:
                raise RowError(
                    "chat_template_error",
                    "messages: this model has no tokenizer, so no chat template; use generate "
                    "with token ids.",
                    "messages",
                )
            self._renderer = ChatRenderer(self._model.tokenizer)
        return self._renderer


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
    is_one = isinstance(prompts, str | Mapping) or (
        len(prompts) > 0 and isinstance(prompts[0], int)
    )
    return [prompts] if is_one else list(prompts)  # pyright: ignore[reportReturnType]


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
