"""The model of a batch job, and the options with which it is planned and built.

Work is delayed until the job needs it: the model's files are named and fingerprinted first, its
tokenizer is opened for the scan, and jax is imported only if there is something to build.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..adapters.adapter_set import AdapterSet
from ..checkpoint import ModelFiles
from ..devices.default_target import default_target
from ..errors import (
    EXIT_USAGE,
    CheckpointError,
    JobError,
)
from ..pods.peers import ALONE, Peers
from ..progress.progress import Progress
from ..rows.job_text import JobText, open_text, row_shape
from ..rows.part import WHOLE, Part
from ..rows.row_kinds import check_kind, text_lengths
from ..rows.scan import RowRequirements, ScanSummary
from ..structured.structures import Structures
from .graph_rows import naming_rows
from .job import Build
from .job_runs import PhaseClock

if TYPE_CHECKING:
    from ...compile.build import BuildProgress
    from ...compile.grids.prefix_table import PrefixTable
    from ...compile.grids.row_shape import RowShape
    from ...compile.plan import Plan
    from ...compile.targets import Target
    from ...modelzoo.config import DecoderConfig
    from ...modelzoo.pooling_config import Pooling
    from ...sharding.layout import Layout
    from ..bundles.warm_start import WarmStart
    from ..engine.shared_prefixes import RowLengths, Submission


@dataclass(frozen=True)
class BuildOptions:
    """The options of a job that decide its plan, and how the plan is built."""

    target: str
    dtype: str = "auto"
    """The dtype of a plan that is derived, and the one that a given plan must have; or `auto`."""
    overrides: tuple[str, ...] = ()
    """Keys of the plan, as `A.B=V`."""
    bundle: Path | None = None
    """The plan or the bundle that the user gave."""
    requires_bundle: bool = False
    """Whether the job ends unless every executable of the bundle can be used."""
    part: Part = WHOLE
    seed: int = 0
    shares: bool = True
    """Whether prompts that begin alike share what they have in common."""
    is_strict: bool = False
    """Whether texts to embed that are too long are refused instead of cut."""
    shows_plan: bool = False
    """Whether the whole plan is shown as TOML."""


@dataclass(frozen=True)
class BatchModel:
    """The files of a model and the options of a job; implements `JobModel`."""

    files: ModelFiles
    options: BuildOptions
    plan_table: Mapping[str, Any] | None
    layout_table: Mapping[str, Any] | None
    peers: Peers = ALONE
    adapters: AdapterSet | None = None
    """The adapters that rows may name."""
    structures: Structures = field(default_factory=Structures)
    """The forms of answers that rows ask for, which the scan compiles."""

    @property
    def _layout(self) -> "Layout | None":
        from ...sharding.layout import Layout

        return None if self.layout_table is None else Layout.from_table(self.layout_table)

    def open_text(self, now: datetime) -> AbstractContextManager[JobText]:
        """Open the tokenizer, and the process that renders chat templates."""
        adapters = () if self.adapters is None else self.adapters.names
        is_strict = self.options.is_strict
        return open_text(self.files, now, self.structures, adapters, is_strict=is_strict)

    def pooling(self) -> "Pooling":
        """The pooling with which the model makes one vector of a text."""
        return self.files.spec.config.pooling

    def weights(self) -> str:
        """The digest of the weights, computed by this process alone.

        Weight files are read unless their hashes are in the user's cache.
        """
        return self.files.weights_digest().result()

    def build(
        self,
        summary: ScanSummary,
        stored_plan: str | None,
        *,
        phases: PhaseClock,
        progress: Progress,
    ) -> Build:
        """Load the parameters, then compile the stored plan, the given plan or a derived plan."""
        from ...compile.grids.prefix_table import NOTHING_SHARED
        from .. import session
        from ..bundles import compilation_cache
        from ..bundles.warm_start import Stores, WarmStart
        from ..engine.shared_prefixes import plan_submission
        from ..planning.target_work import work_of
        from .job_plan import better_plan
        from .plan_report import plan_table, with_waste

        def report(built: "BuildProgress") -> None:
            progress.note(str(built))

        # `spec` raises for an unknown family, which must be an error of the model, not of the plan
        config = self.files.spec.config
        can_run = [row for row in summary.rows if row.requirements is not None]
        lengths = text_lengths(summary.requirements)
        rows = [row_shape(needs, self.structures) for needs in summary.requirements]
        shared = summary.prefixes.of_rows([row.row for row in can_run])
        table = shared if self.options.shares else NOTHING_SHARED
        cache = compilation_cache.enable(progress.warn)
        forms = {row.structure for row in summary.requirements if row.structure is not None}
        make_plan = partial(self._make_plan, rows, table, forms, lengths)
        plan, target = self._resolve_plan(make_plan, stored_plan)
        check_kind(plan, lengths)
        text = plan.to_toml()
        bundle = self._agree_on_plan(plan)
        weights = self.files.weights_digest(self.peers)
        weights.start()
        stores = Stores(bundle, cache, self.options.requires_bundle)
        warm = WarmStart(stores, plan, target, self.files, progress.note, self.peers, progress.warn)
        work = work_of(config, plan.numbers, plan.layout, target, plan.buckets.adapters)
        progress.note(text.rstrip() if self.options.shows_plan else plan_table(plan, work))
        if plan.buckets.embed:
            _note_embeddings(plan, lengths, config, target, progress)
        else:
            # with --no-sharing, rows still read the prefixes of a given plan
            noted = table if plan.buckets.prefixes is None else shared
            _note_served(plan, summary, rows, noted, config, target, progress)
        options = session.LoadOptions.of_plan(plan)
        model = session.load_model(self.files, target, options, self.adapters, progress.note)
        digest = weights.result()
        phases.enter("build")
        waste = partial(with_waste, grid=plan.buckets, work=work)
        seed = self.options.seed
        with naming_rows(summary.rows):
            if plan.buckets.embed:
                embedder = session.start_embedding(model, plan, on_graph=report, warm=warm)
                return Build(embedder, text, digest, _longest_first, waste, _use_of(warm))
            generator = session.start(
                model, plan, seed=seed, on_graph=report, warm=warm, structures=self.structures
            )
        # if experts have a capacity, the other rows of a call decide which choices are dropped, so
        # a shared prefix could differ from a computed one
        is_lossless = plan.experts is None or plan.experts.prefill.kind != "capacity"
        shares = self.options.shares and is_lossless
        submission = partial(plan_submission, grid=plan.buckets, shares=shares)
        shapes = {row.row: shape for row, shape in zip(can_run, rows, strict=True)}
        better = partial(better_plan, plan, work, config.max_position, shapes, summary.prefixes)
        return Build(generator, text, digest, submission, waste, _use_of(warm), better)

    def _resolve_plan(
        self, make_plan: "Callable[[Target], Plan]", stored_plan: str | None
    ) -> "tuple[Plan, Target]":
        """The plan to run and its target, both checked; starts jax."""
        from ...compile.targets import present_target
        from ..checkpoint.published_numbers import keep_published
        from ..devices import backends
        from ..plans import plan_checks

        name = self.options.target
        try:
            backends.prepare_jax(name, self.peers.size)
            target = present_target(name)
            if stored_plan is not None:
                plan = plan_checks.read_stored(stored_plan)
            else:
                if self.plan_table is None:
                    plan_checks.check_layout(self._layout, self.files, target)
                plan = make_plan(target)
            plan = replace(plan, numbers=keep_published(plan.numbers, self.files))
            plan_checks.check_plan(plan, self.files, target, self.options.dtype)
            if self.adapters is not None:
                self.adapters.check(plan.buckets.adapters)
        except CheckpointError:
            raise
        except ValueError as error:
            raise JobError(str(error), EXIT_USAGE) from error
        return plan, target

    def _agree_on_plan(self, plan: "Plan") -> Path | None:
        """Check that all processes have the same plan; return the bundle, if one was given."""
        from ..plans.plan_facts import plan_facts

        given = self.options.bundle
        facts = {"plan": plan_facts(plan), "--no-sharing": str(not self.options.shares)}
        self.peers.agree(lambda: facts)
        return given if given is not None and given.is_dir() else None

    def _make_plan(
        self,
        rows: "Sequence[RowShape]",
        table: "PrefixTable",
        forms: Set[str],
        lengths: Sequence[int],
        target: "Target",
    ) -> "Plan":
        """The given plan, or a plan derived from the rows of this job, with the overrides."""
        from ...compile.plan import Numbers, PlannedModel
        from .. import session
        from ..checkpoint.published_numbers import keep_published, overridden_numbers
        from ..planning.embedding_plan import embedding_plan
        from .job_plan import derived_plan, given_plan

        overrides = self.options.overrides
        if self.plan_table is not None:
            return given_plan(self.plan_table, overrides)
        is_part = self.options.part.num_parts > 1
        is_open = self.options.dtype == "auto" and not _sets_dtype(overrides)
        if is_part and is_open and target.platform == "cpu":
            raise ValueError(
                f"--rows {self.options.part.option}: expected a plan or a dtype, got auto, which "
                f"depends on each machine's processor, while all parts need the same dtype. Give "
                f"all parts the same --plan, --dtype float32 or --dtype bfloat16."
            )
        dtype = session.resolve_dtype(self.options.dtype, target)
        model, numbers = PlannedModel(self.files.name, self.files.fingerprint()), Numbers(dtype)
        config, layout = self.files.spec.config, self._layout
        # the formats of weights decide how much memory is left for the cache
        numbers = keep_published(overridden_numbers(numbers, overrides), self.files)
        if lengths:
            return embedding_plan(lengths, target.name, model, numbers, config, layout, overrides)
        structured = self.structures.grid(forms)
        adapters = None if self.adapters is None else self.adapters.grid()
        sizes = table, structured, adapters
        return derived_plan(
            rows, target, model, numbers, config, layout, overrides, self.peers, *sizes
        )


def _use_of(warm: "WarmStart") -> Mapping[str, Any] | None:
    """The use of a bundle as the manifest has it."""
    return None if warm.bundle is None else warm.bundle._asdict()


def _longest_first(rows: "Sequence[RowLengths]", table: "PrefixTable") -> "Submission":
    """Rows by falling length of their longest text, so that near lengths share batches."""
    from ..engine.shared_prefixes import Submission, submission_order

    del table
    order = submission_order(rows)
    return Submission(order, [None] * len(order))


def _note_served(
    plan: "Plan",
    summary: ScanSummary,
    rows: Sequence["RowShape"],
    table: "PrefixTable",
    config: "DecoderConfig",
    target: "Target",
    progress: Progress,
) -> None:
    """Show what a plan means for the rows that it serves; `table` has what all rows share."""
    served = [
        i
        for i, need in enumerate(summary.requirements)
        if is_served(need, plan) and rows[i].fits(config.max_position)
    ]
    their_rows = [rows[i] for i in served]
    _note_plan(plan, their_rows, table.of_rows(served), config, target, progress)


def _note_embeddings(
    plan: "Plan",
    lengths: Sequence[int],
    config: "DecoderConfig",
    target: "Target",
    progress: Progress,
) -> None:
    """Show the padding of the plan, the pooling and the kernels."""
    from ..planning.embedding_plan import padding_note
    from ..plans import plan_checks

    progress.note(padding_note(lengths, plan, config))
    progress.note(str(plan_checks.attention_kernels(plan, config, target)))


def _note_plan(
    plan: "Plan",
    rows: "Sequence[RowShape]",
    table: "PrefixTable",
    config: "DecoderConfig",
    target: "Target",
    progress: Progress,
) -> None:
    """Show the padding of the plan, what rows share, rows that end early, and the kernels."""
    from ..plans import plan_checks
    from .job_plan import limit_note, padding_note, rows_after_prefixes, sharing_note

    own_rows = rows_after_prefixes(rows, table, plan.buckets)
    progress.note(padding_note(own_rows, plan, config.max_position))
    if note := sharing_note(rows, table, plan.buckets):
        progress.note(note)
    if note := limit_note(plan, rows, config.max_position):
        progress.note(note)
    progress.note(str(plan_checks.attention_kernels(plan, config, target)))


def _sets_dtype(overrides: Sequence[str]) -> bool:
    """Whether the overrides of a plan set its dtype."""
    return any(override.partition("=")[0].strip() == "numbers.dtype" for override in overrides)


def is_served(row: RowRequirements, plan: "Plan") -> bool:
    """Whether a plan has the graphs for the scores and the form that a row asks for."""
    grid = plan.buckets
    forms = () if grid.structured is None else grid.structured.schemas
    return row.structure in (None, *forms) and (grid.score or row.prompt_logprobs is None)


def target_name(target: str | None, plan_table: Mapping[str, Any] | None) -> str:
    """The name of the target: the given one, that of the plan, or this machine's."""
    return target or str((plan_table or {}).get("target") or default_target())
