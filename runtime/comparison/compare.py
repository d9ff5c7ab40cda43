"""Compare models on the same tokens: the distributions of each next token, with teacher forcing.

The first model is the reference. It answers every prompt greedily, and all models read its answers;
or all models read given rows. End tokens do not end an answer, so that all rows count the same
number of tokens. The reference and one other model are in memory at the same time.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ...compile.expert_plan import default_experts
from ...compile.graphs.comparison_steps import comparison_graph
from ...compile.graphs.graph_kinds import DECODE, GraphKey
from ...compile.graphs.steps import NO_TOKEN
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.default_grid import ladder_grid
from ...compile.grids.grid_defaults import GridDefaults, round_up
from ...compile.grids.grid_values import check_page_size
from ...compile.plan import Numbers, Plan, PlannedModel
from ...compile.targets import Target, present_target
from ...sharding.layout import Layout
from ..bundles.cpu_kernels import load_kernels
from ..checkpoint import ModelFiles, open_model
from ..checkpoint.published_numbers import override_plan
from ..devices import backends
from ..devices.compiler_messages import without_alarms
from ..devices.default_target import default_target
from ..engine.model_runner import GraphCall, ModelRunner
from ..engine.padding import decode_pages, pack_greedy
from ..errors import ConfigError
from ..files.layout_files import read_layout
from ..files.run_config import apply_overrides
from ..plans import plan_checks
from ..rows.job_text import read_row_ids
from ..session import OpenedModel, build, resolve_dtype
from .statistics import PairFigures

if TYPE_CHECKING:
    from ...compile.build import BuildProgress


def forced_grid(
    prompt_lengths: Sequence[int],
    max_length: int,
    slots: int,
    layout: Layout | None,
    page: int | None = None,
) -> BucketGrid:
    """The grid of models that are compared.

    Args:
      prompt_lengths: The lengths of all prompts.
      max_length: The longest row, prompt and answer together.
      slots: The number of rows that run at once.
      layout: The layout of the models.
      page: The entries of a page of the cache; None for those that suit the layout.
    """
    defaults = GridDefaults.for_layout(layout)
    if page is not None:
        check_page_size(1, page)
        defaults = replace(defaults, page=page)
    # a grid has the lengths that the layout divides, which must not be shorter than rows
    max_length = round_up(max_length, defaults.length_multiple)
    grid = ladder_grid(max_length, slots, score=False, defaults=defaults)
    used = {grid.bucket_of(length) for length in prompt_lengths}
    prefill = tuple(bucket for bucket in grid.prefill if bucket in used)
    return replace(grid, prefill=prefill, steps_per_call=1)


class ForcedModel:
    """A built model whose rows read given tokens, one token in each call.

    It runs the graphs of a plan, as a job does, so that every number of the plan has its effect:
    formats of weights, of activations and of the cache. No call waits for another one: tokens are
    chosen and read on the devices.
    """

    def __init__(self, runner: ModelRunner, padded_vocab: int):
        self.runner = runner
        self._padded_vocab = padded_vocab
        self._pages = decode_pages(runner.grid)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Write prompts into the first slots, in order."""
        start, grid = 0, self.runner.grid
        while start < len(prompts):
            # a call has prompts of one bucket
            bucket = grid.bucket_of(len(prompts[start]))
            stop = start + 1
            while stop < min(start + bucket.batch, len(prompts)):
                if grid.bucket_of(len(prompts[stop])) != bucket:
                    break
                stop += 1
            rows = pack_greedy(prompts[start:stop], start, bucket, grid, self._padded_vocab)
            self.runner.call(GraphCall(GraphKey("prefill", bucket), rows))
            start = stop

    def read(self, forced_BV: jax.Array, is_live_B: np.ndarray) -> None:
        """Read the token that `forced_BV` chooses in each live slot."""
        self.runner.state = self.runner.decode_state._replace(logits_BV=forced_BV)
        self.runner.call(GraphCall(DECODE, (is_live_B, self._pages)))


DEFAULT_MAX_TOKENS = 64
DEFAULT_SLOTS = 16


@dataclass(frozen=True)
class ComparedModel:
    """A model and its numbers."""

    model: str
    """The model, as for `LLM`."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The table `[numbers]` of a plan; without `dtype`, it has the dtype of the comparison."""

    def __str__(self) -> str:
        """The model, and its numbers as in a plan, without the formats of its checkpoint."""
        shown = {key: value for key, value in self.numbers.items() if key != "published"}
        return " ".join([self.model, *(f"{key}={value}" for key, value in shown.items())])


@dataclass(frozen=True)
class Comparison:
    """The figures of all models against the first."""

    models: tuple[ComparedModel, ...]
    """The models with all of their numbers; the first is the reference."""
    figures: tuple[PairFigures, ...]
    """The figures of each model after the first."""
    num_rows: int
    num_tokens: int
    """The number of tokens whose distributions were compared."""
    read_answers: bool
    """Whether the tokens are the reference's answers; otherwise they are those of the rows."""


@without_alarms()
def compare(
    models: Sequence[ComparedModel],
    rows: Sequence[Sequence[int]] | str | Path,
    *,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    dtype: str = "auto",
    target: str | None = None,
    layout: str | None = None,
    slots: int = DEFAULT_SLOTS,
    overrides: Sequence[str] = (),
    say: Callable[[str], object] = lambda note: None,
) -> Comparison:
    """Compare models with the first of them.

    Args:
      models: At least two models with the same vocabulary.
      rows: A batch file with prompts, or prompts as token ids of the reference.
      max_tokens: The number of tokens of the reference's greedy answer to each prompt, over which
        models are compared; 0 compares over the rows' own tokens, from the second on.
      dtype: `float32`, `bfloat16` or `auto`, for models whose numbers have no dtype.
      target: The hardware to run on; by default jax's default backend.
      layout: The layout of all models on several devices.
      slots: The number of rows that run at once.
      overrides: Settings of all plans, such as `model.scan_layers=true`. `buckets.page=64` gives
        all models a cache in pages.
      say: Called with lines about progress.

    Raises:
      ValueError: There are fewer than two models or no tokens, vocabularies differ, a number is
        invalid, or logits are not finite.
      CheckpointError: A model cannot be used.
      OutOfMemory: Two models do not fit into the memory of the devices.
    """
    _check_models(models)
    target = target or default_target()
    backends.prepare_jax(target)
    load_kernels(target, say)
    if isinstance(rows, str | Path):
        with open_model(models[0].model) as files:
            rows = read_row_ids(Path(rows), files)
    work = _Rows.of(rows, max_tokens)
    devices = present_target(target)
    placed = None if layout is None else read_layout(layout, len(devices.devices))
    setup = _Setup(devices, placed, dtype, slots, overrides, say)
    # a model that cannot be compared is refused before any model is loaded
    plans, vocab_size = setup.plans(models, work)
    named = tuple(
        ComparedModel(m.model, p.numbers.to_table()) for m, p in zip(models, plans, strict=True)
    )
    reference, figures = setup.load(named[0], plans[0]), []
    for model, plan in zip(named[1:], plans[1:], strict=True):
        compared = setup.load(model, plan)
        figures.append(PairFigures.of(_figures(reference, compared, work, slots, vocab_size)))
        say(f"{model}: divergence {figures[-1].divergence.text(4)}")
        del compared  # before the next model is loaded
    counts = len(work.prompts), sum(work.counts)
    return Comparison(named, tuple(figures), *counts, read_answers=max_tokens > 0)


def _check_models(models: Sequence[ComparedModel]) -> None:
    """Refuse fewer than two models, and what is no model."""
    if len(models) < 2:
        raise ConfigError(f"compare: expected two models or more, got {len(models)}.")
    for index, model in enumerate(models):
        if not isinstance(model, ComparedModel):
            raise ConfigError(f"models[{index}]: expected a ComparedModel, got {model!r}.")


@dataclass(frozen=True)
class _Rows:
    """The prompts, and the tokens after them."""

    prompts: list[Sequence[int]]
    """In order of length."""
    counts: list[int]
    """The number of tokens after each prompt."""
    given: list[Sequence[int]]
    """The tokens after each prompt; empty if the reference chooses them."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], max_tokens: int) -> "_Rows":
        rows = sorted(rows, key=len)
        if max_tokens:
            work = cls(list(rows), [max_tokens] * len(rows), [()] * len(rows))
        else:
            rows = [row for row in rows if len(row) > 1]
            given = [row[1:] for row in rows]
            work = cls([row[:1] for row in rows], list(map(len, given)), given)
        if not work.prompts:
            raise ConfigError("compare: expected a row with tokens to compare, got none.")
        return work

    def check_ids(self, vocab_size: int) -> None:
        """Refuse rows without tokens, and tokens that the models do not have."""
        for ids in (*self.prompts, *(given for given in self.given if len(given))):
            ids_T = np.asarray(ids)
            is_list = ids_T.ndim == 1 and ids_T.dtype.kind in "iu" and ids_T.size
            if not is_list or not 0 <= ids_T.min() <= ids_T.max() < vocab_size:
                raise ConfigError(
                    f"compare: expected rows of token ids from 0 to {vocab_size - 1}, got "
                    f"{ids!r:.80}. Encode texts with the tokenizer of the models."
                )

    @property
    def max_length(self) -> int:
        """The longest row; the last token is compared and not read."""
        return max(len(p) + n for p, n in zip(self.prompts, self.counts, strict=True))


@dataclass(frozen=True)
class _Setup:
    """The settings that all models of a comparison share."""

    target: Target
    layout: Layout | None
    dtype: str
    slots: int
    overrides: Sequence[str]
    say: Callable[[str], object]

    def plans(self, models: Sequence[ComparedModel], work: _Rows) -> tuple[list[Plan], int]:
        """Check all models, and return their plans and the size of their vocabulary."""
        first, vocab_size = self._plan(models[0], work, None)
        others = [self._plan(model, work, vocab_size)[0] for model in models[1:]]
        return [first, *others], vocab_size

    def _plan(self, model: ComparedModel, work: _Rows, vocab_size: int | None) -> tuple[Plan, int]:
        """The plan of a model, and the size of its vocabulary."""
        with open_model(model.model) as files:
            config = files.spec.config
            if vocab_size not in (None, config.vocab_size):
                raise ConfigError(
                    f"{model.model}: expected the {vocab_size} tokens of the reference, as both "
                    f"read the same ids, got {config.vocab_size}. Compare models that share a "
                    f"vocabulary."
                )
            if work.max_length > config.max_position:
                raise ConfigError(
                    f"{model.model}: expected rows of at most {config.max_position} tokens, its "
                    f"published context, got {work.max_length}, answer included. Give shorter "
                    f"rows, or a smaller --max-tokens."
                )
            work.check_ids(config.vocab_size)
            plan_checks.check_layout(self.layout, files, self.target)
            lengths = list(map(len, work.prompts))
            grid = forced_grid(lengths, work.max_length, self.slots, self.layout, self._page)
            plan = self._derived(model, files, grid)
            return OpenedModel.of(files, self.target, plan).plan, config.vocab_size

    @property
    def _page(self) -> Any:
        """The entries of a page of the caches, if the overrides give them."""
        buckets = apply_overrides({}, self.overrides).get("buckets")
        return buckets.get("page") if isinstance(buckets, Mapping) else None

    def load(self, named: ComparedModel, plan: Plan) -> ForcedModel:
        """Load a model and compile the graphs of its plan."""
        with open_model(named.model) as files:
            loaded = OpenedModel.of(files, self.target, plan).load(self.say)

        def report(built: "BuildProgress") -> None:
            self.say(f"{named}: {built}")

        return ForcedModel(build(loaded, plan, report), loaded.definition.padded_vocab)

    def _derived(self, model: ComparedModel, files: ModelFiles, grid: BucketGrid) -> Plan:
        dtype = resolve_dtype(self.dtype, self.target)
        numbers = Numbers.from_table({"dtype": dtype, **model.numbers})
        planned = PlannedModel(files.name, files.fingerprint())
        experts = default_experts(files.spec.config)
        plan = Plan(self.target.name, planned, numbers, grid, self.layout, experts)
        plan = Plan.from_table(override_plan(tomllib.loads(plan.to_toml()), self.overrides))
        if plan.buckets != grid:
            raise ConfigError(
                "--set buckets: expected no settings of buckets but page, as compare has a grid of "
                "its own, got others. Remove them; --slots changes the number of rows that run at "
                "once."
            )
        return plan


def _figures(
    reference: ForcedModel, compared: ForcedModel, work: _Rows, slots: int, vocab_size: int
) -> list[np.ndarray]:
    """The figures of the tokens of each row, `[tokens, 5]`."""
    first, second, host = reference.runner, compared.runner, reference.runner.host
    graph = comparison_graph(first.decode_state, second.decode_state, vocab_size, host.sharding)
    found = []
    for start in range(0, len(work.prompts), slots):
        rows = slice(start, start + slots)
        count_B = np.zeros(first.grid.decode_slots, np.int32)
        count_B[: len(work.counts[rows])] = work.counts[rows]
        token_QB = np.full((count_B.max(), len(count_B)), NO_TOKEN, np.int32)
        for b, given in enumerate(work.given[rows]):
            token_QB[: len(given), b] = given
        for model in (reference, compared):
            model.prefill(work.prompts[rows])
        steps = []
        for q, token_B in enumerate(token_QB):
            logits = first.decode_state.logits_BV, second.decode_state.logits_BV
            chosen = graph(*logits, host.put(token_B))
            steps.append(chosen.figures)
            is_live_B = q + 1 < count_B
            reference.read(chosen.reference_forced_BV, is_live_B)
            compared.read(chosen.compared_forced_BV, is_live_B)
        figures_QB5 = np.stack([np.stack(step, axis=-1) for step in jax.device_get(steps)])
        found += [figures_QB5[:count, b] for b, count in enumerate(work.counts[rows])]
    if not all(np.isfinite(row).all() for row in found):
        raise ConfigError(
            "compare: expected finite log-probabilities from both models, got others. Try --dtype "
            "float32; if it fails too, the weights of one of them are at fault."
        )
    return found
