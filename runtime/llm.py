"""The Python interface: `LLM.generate`, `LLM.chat`, `LLM.score` and `LLM.embed`.

Names and the defaults of `SamplingParams` are vLLM's, with four exceptions. `max_tokens` is None by
default, and means all tokens that the plan's `max_length` leaves. Log-probabilities are one
`TokenLogprob` per token. `score` takes prompts, not pairs of texts. All graphs are compiled at
construction, so forms of `structured_outputs` are given there too. If a prompt does not fit the
grid, its call raises an error before any prompt of the call runs. After a call that was
interrupted, or that failed on the device, the model can be used again.
"""

import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..compile.expert_plan import ExpertPlan
from ..compile.plan import Plan
from ..compile.targets import present_target
from ..modelzoo.config_values import is_count
from . import session
from .adapters.adapter_set import AdapterSet
from .adapters.merged_model import open_merged
from .bundles import compilation_cache
from .bundles.cpu_kernels import load_kernels
from .bundles.warm_start import Stores, WarmStart
from .console import tell
from .devices import backends
from .devices.default_target import default_target
from .embedding.texts import pack
from .embedding.vectors import EmbeddingOutput, EmbeddingRequestOutput, shortened
from .errors import UserError, check_process, invalid_request
from .files.run_config import read_instant, read_plan_table
from .parameters.vllm_options import CALL, CHAT, EMBED, MODEL, also_accepts
from .planning.plan_arguments import PlanArguments, check_kinds
from .request import Request, RequestOutput, SamplingParams
from .session import Session
from .structured.params import AllowedTokens, StructuredOutputsParams
from .text.chat_messages import read_messages
from .text.prompts import Prompt, PromptReader, as_conversations, as_list, one_each
from .text.tokenizer import Tokenizer

AdapterName = str | Sequence[str | None] | None
"""The name of an adapter for all prompts of a call, or a name or None for each."""

_NO_OUTPUT = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=0)


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
      max_num_seqs: Number of decode slots, by default 16.
      dtype: `float32`, `bfloat16`, or `auto` for the faster of the two.
      numbers: Keys of a plan's table `[numbers]`, except `dtype`, such as `{"weights": "int8"}` or
        `{"weights": "int4", "group": 64}`. By default all numbers are float.
      target: Device kind, with a number of devices for a layout (`cpu:8`). By default that of the
        plan, else this machine's accelerator if it has one, else the CPU.
      layout: The layout of the model on several devices: its name, optionally with another mesh
        as in `data-tensor@data=4,tensor=2`, or a TOML file.
      experts: How tokens are dispatched to experts. By default no expert choice is dropped.
      seed: Derives the seeds of requests that have no seed of their own.
      strict_config: Whether to refuse a config.json with keys that nothing reads.
      runner: `generate`, or `pooling` to compute vectors of texts with `embed` only. By default
        `pooling` if the plan or the model can only embed, else `generate`.
      structured_outputs: The forms and the allowed tokens that requests may ask for, which are
        compiled with the graphs.
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
        max_num_seqs: int | None = None,
        dtype: str = "auto",
        numbers: Mapping[str, Any] | None = None,
        target: str | None = None,
        layout: str | Path | None = None,
        experts: ExpertPlan | None = None,
        seed: int = 0,
        strict_config: bool = False,
        runner: str = "auto",
        structured_outputs: Sequence[StructuredOutputsParams | AllowedTokens] = (),
        now: str | None = None,
    ):
        """Load the model and compile its grid; see the class for the arguments."""
        check_kinds(model=model, adapters=adapters, plan=plan, dtype=dtype, target=target)
        check_kinds(merge_adapter=merge_adapter, seed=seed, strict_config=strict_config, now=now)
        arguments = PlanArguments(
            runner, numbers, layout, experts, max_model_len, max_num_seqs, structured_outputs
        )
        instant = None if now is None else read_instant("now", now)
        path = Path(plan) if isinstance(plan, str | Path) else None
        if isinstance(plan, str | Path):
            plan = Plan.from_table(read_plan_table(Path(plan)))
        say = partial(tell, sys.stderr)
        target = target or (plan.target if plan else default_target())
        backends.prepare_jax(target)
        load_kernels(target, say)
        cache, device = compilation_cache.enable(say), present_target(target)
        with open_merged(model, merge_adapter) as files:
            files.unread.report(say, is_strict=strict_config)
            named = {name: Path(folder) for name, folder in (adapters or {}).items()}
            own_adapters = AdapterSet.open(files, named) if named else None
            if plan is None:
                dtype = session.resolve_dtype(dtype, device)
                plan = arguments.plan(model, files, device, dtype)
                if plan.max_length_reason:
                    say(f"rows without max_tokens: {plan.max_length_reason}")
            else:
                arguments.check_beside(plan)
            structures = arguments.structures(files)
            if path is None:
                plan = arguments.with_tables(plan, structures, own_adapters)
            arguments.check_forms(plan)
            opened = session.OpenedModel.of(files, device, plan, own_adapters, dtype)
            bundle = path if path is not None and path.is_dir() else None
            warm = WarmStart(Stores(bundle, cache), opened.plan, device, files, say)
            loaded = opened.load(say)
        self.plan, self._config = opened.plan, files.spec.config
        self._prompts = PromptReader(loaded.tokenizer, instant)
        started = session.start(loaded, self.plan, seed=seed, warm=warm, structures=structures)
        self._generator: Session | None = started
        self._num_requests, self._is_running, self._lock = 0, False, threading.Lock()

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
        generator = self._require_generation()
        rows = [self._prompts.read(prompt) for prompt in as_list(prompts)]
        return self._run(generator, rows, sampling_params, adapter)

    @also_accepts(CHAT)
    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
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
          continue_final_message: Whether answers continue the last message, which is then the end
            of the prompt; it needs `add_generation_prompt=False`.
          adapter: The name of the adapter for all conversations, or a list with one for each.

        Returns:
          One output for each conversation, in order.

        Raises:
          RowError: The model has no chat template, or a conversation or its parameters cannot be
            served; nothing of the call has run.
          InvalidTokenizer: The chat template leaves out the texts of users.
          ValueError: The numbers of conversations and parameters differ, or the model is closed.
          GraphFailed: The device failed.
        """
        generator = self._require_generation()
        rows = [
            (
                None,
                self._prompts.chats.encode(
                    read_messages(conversation),
                    add_generation_prompt=add_generation_prompt,
                    template_kwargs=chat_template_kwargs,
                    tools=tools,
                    continue_final_message=continue_final_message,
                ),
            )
            for conversation in as_conversations(messages)
        ]
        return self._run(generator, rows, sampling_params, adapter)

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
        of the tokenizer's template, and are cut at the `max_seq_length` of the model's files, as in
        sentence-transformers; token ids are taken as they are.

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
        embedder, pooling = self._require_open(), self._config.pooling
        if not self.plan.buckets.embed:
            raise UserError(
                "embed: expected a model for vectors of texts, got one that generates. Open it "
                "with LLM(..., runner='pooling')."
            )
        if pooling.labels:
            raise UserError(
                "embed: expected a model of embeddings, got a classifier. Give /v1/classify rows "
                "to noria batch."
            )
        size = pooling.size(self._config.embed)
        if dimensions is not None and not (is_count(dimensions) and dimensions <= size):
            raise invalid_request(
                "dimensions", f"expected a number from 1 to {size}, got {dimensions!r}."
            )
        texts = [
            self._prompts.read_whole(prompt, pooling.prompt, pooling.max_tokens)
            for prompt in as_list(prompts)
        ]
        packed = [(None, pack([text])) for text in texts]
        results = []
        for output, text in zip(self._run(embedder, packed, _NO_OUTPUT), texts, strict=True):
            if output.error is not None or output.vectors is None:
                raise output.error or AssertionError("a request ends with vectors or an error")
            (vector,) = shortened(output.vectors, dimensions, normalises=pooling.normalises)
            embedding = EmbeddingOutput(vector)
            results.append(EmbeddingRequestOutput(output.request_id, list(text.ids), embedding))
        return results

    def get_tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer, or None if it has none."""
        return self._prompts.tokenizer

    def close(self) -> None:
        """Free the model, and stop the child process that renders chat templates.

        A second call does nothing.
        """
        self._prompts.close()
        self._generator = None

    def _require_open(self) -> Session:
        check_process()
        if self._generator is None:
            raise UserError("LLM: expected an open model, got one after close(). Make another.")
        return self._generator

    def _require_generation(self) -> Session:
        generator = self._require_open()
        if self.plan.buckets.embed:
            raise UserError(
                "LLM: expected a model that generates, got one for vectors of texts. Call embed, "
                "or open it with runner='generate'."
            )
        return generator

    def _run(
        self,
        generator: Session,
        rows: Sequence[tuple[str | None, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: AdapterName = None,
    ) -> list[RequestOutput]:
        """Run rows, which are pairs of a text, if one was given, and its token ids."""
        names = one_each("adapter", adapter, str | None, len(rows))
        params = SamplingParams() if params is None else params
        params = one_each("sampling_params", params, SamplingParams, len(rows))
        with self._lock:
            requests = []
            for (text, ids), param, name in zip(rows, params, names, strict=True):
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
