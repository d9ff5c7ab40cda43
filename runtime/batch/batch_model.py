"""The model of a batch job, and the source of its plan.

Work is delayed until the job needs it: the model's files are named and fingerprinted first, its
tokenizer is opened for the scan, and jax is imported only if there is something to build.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..adapters.adapter_set import AdapterSet
from ..checkpoint import ModelFiles
from ..console import plural
from ..devices.default_target import default_target
from ..errors import (
    EXIT_BUILD,
    EXIT_USAGE,
    CheckpointError,
    JobError,
    UserError,
)
from ..pods.peers import ALONE, Peers
from ..progress.progress import Progress
from ..rows.job_text import JobText, open_text, row_shape
from ..rows.part import WHOLE, Part
from ..rows.row_kinds import check_kind, text_lengths
from ..rows.scan import RowRequirements, ScannedRow, ScanSummary
from ..structured.structures import Structures
from .job import Build
from .job_runs import PhaseClock

if TYPE_CHECKING:
    from ...compile.graphs.graph_kinds import GraphKey
    from ...compile.grids.bucket_grid import BucketGrid
    from ...compile.grids.prefix_table import PrefixTable
    from ...compile.grids.row_shape import RowShape
    from ...compile.plan import Plan
    from ...compile.targets import Target
    from ...modelzoo.pooling_config import Pooling
    from ...sharding.layout import Layout
    from ..engine.shared_prefixes import RowLengths, Submission
    from ..session import OpenedModel


NUM_NAMED = 3
"""The number of rows that the error of a graph names."""


@dataclass(frozen=True)
class PlanSource:
    """The plan that the user gave, or the facts from which a plan is derived for the rows."""

    target: str
    dtype: str = "auto"
    """The dtype of a plan that is derived, and the one that a given plan must have; or `auto`."""
    overrides: tuple[str, ...] = ()
    """Keys of the plan, as `A.B=V`."""
    table: Mapping[str, Any] | None = None
    """The given plan."""
    layout_table: Mapping[str, Any] | None = None
    """The layout of a plan that has none itself; None for the default one."""
    fits_layout: bool = False
    """Whether the mesh of this layout is fitted to the target."""
    path: Path | None = None
    """The file or the bundle of the given plan."""
    requires_bundle: bool = False
    """Whether the job ends unless every executable of the bundle can be used."""

    @property
    def layout(self) -> "Layout | None":
        """The layout of a plan that has none itself."""
        from ...compile.target_names import TargetName
        from ...sharding.layout import Layout

        if self.layout_table is None:
            return None
        layout = Layout.from_table(self.layout_table)
        num_devices = TargetName.parse(self.target).num_devices
        return layout.fitted(num_devices) if self.fits_layout else layout

    @property
    def bundle(self) -> Path | None:
        """The bundle of the given plan; None without one."""
        return self.path if self.path is not None and self.path.is_dir() else None

    def facts(self) -> dict[str, str]:
        """The facts that decide the plan, besides the model and the rows."""
        layout, overrides = self.layout_table, " ".join(self.overrides)
        facts = "derived"
        if self.table is not None:
            from ..plans.plan_facts import plan_facts
            from .job_plan import given_plan

            # a given plan has the overrides already
            plan, overrides = given_plan(self.table, self.overrides), ""
            # a bundle has the published formats of the model, which is part of the configuration
            facts = plan_facts(replace(plan, numbers=replace(plan.numbers, published={})))
        return {
            "plan": facts,
            "layout": "" if layout is None else json.dumps(layout, sort_keys=True),
            "overrides": overrides,
            "dtype": self.dtype,
            "target": self.target,
        }


@dataclass(frozen=True)
class BatchModel:
    """The files of a model, and how a job plans and builds it; implements `JobModel`."""

    files: ModelFiles
    source: PlanSource
    peers: Peers = ALONE
    adapters: AdapterSet | None = None
    """The adapters that rows may name."""
    part: Part = WHOLE
    """The part of the rows that the job runs; the other parts need the same dtype."""
    seed: int = 0
    shares: bool = True
    """Whether prompts that begin alike share what they have in common."""
    is_strict: bool = False
    """Whether texts to embed that are too long are refused instead of cut."""
    structures: Structures = field(default_factory=Structures)
    """The forms of answers that rows ask for, which the scan compiles."""

    def open_text(self, now: datetime) -> AbstractContextManager[JobText]:
        """Open the tokenizer, and the process that renders chat templates."""
        adapters = () if self.adapters is None else self.adapters.names
        return open_text(self.files, now, self.structures, adapters, is_strict=self.is_strict)

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
        from ...modelzoo.cpu.objects import is_loaded
        from .. import session
        from ..bundles import compilation_cache
        from ..bundles.warm_start import Stores, WarmStart
        from ..planning.target_work import work_of
        from ..plans.plan_facts import plan_facts
        from .plan_report import better_plan, plan_table, with_waste

        # `spec` raises for an unknown family, which must be an error of the model, not of the plan
        config = self.files.spec.config
        rows = _JobRows.of(summary, self.structures)
        cache = compilation_cache.enable(progress.warn)
        opened = self._open(rows, stored_plan, progress.note)
        plan = opened.plan
        check_kind(plan, rows.text_lengths)
        facts = {
            "plan": plan_facts(plan),
            "--no-sharing": str(not self.shares),
            "kernels for the CPU": str(is_loaded()),
        }
        self.peers.agree(lambda: facts)
        weights = self.files.weights_digest(self.peers)
        weights.start()
        stores = Stores(self.source.bundle, cache, self.source.requires_bundle)
        warm = WarmStart(
            stores, plan, opened.target, self.files, progress.note, self.peers, progress.warn
        )
        work = work_of(config, plan.numbers, plan.layout, opened.target, plan.buckets.adapters)
        progress.note(plan.to_toml().rstrip() if progress.is_verbose else plan_table(plan, work))
        self._note_rows(rows, opened, progress)
        model = opened.load(progress.note)
        digest = weights.result()
        phases.enter("build")
        with naming_rows(summary.rows):
            generator = session.start(
                model,
                plan,
                seed=self.seed,
                on_graph=lambda built: progress.note(str(built)),
                warm=warm,
                structures=self.structures,
            )
        waste = partial(with_waste, grid=plan.buckets, work=work)
        use = None if warm.bundle is None else warm.bundle._asdict()
        built = Build(generator, plan.to_toml(), digest, self._submission(plan), waste, use)
        if plan.buckets.embed:
            return built
        better = partial(better_plan, plan, work, config.max_position, rows.shapes, rows.prefixes)
        return replace(built, better_plan=better)

    def _submission(
        self, plan: "Plan"
    ) -> "Callable[[Sequence[RowLengths], PrefixTable], Submission]":
        """The order in which rows are submitted, and what they share."""
        from ..engine.shared_prefixes import plan_submission

        # if experts have a capacity, the other rows of a call decide which choices are dropped, so
        # a shared prefix could differ from a computed one
        is_lossless = plan.experts is None or plan.experts.prefill.kind != "capacity"
        shares = self.shares and is_lossless
        # texts to embed share nothing
        grid = None if plan.buckets.embed else plan.buckets
        return partial(plan_submission, grid=grid, shares=shares)

    def _note_rows(self, rows: "_JobRows", opened: "OpenedModel", progress: Progress) -> None:
        """Show what the plan means for the rows that it serves."""
        from ..planning.embedding_plan import padding_note
        from ..plans import plan_checks
        from .plan_report import notes_on_rows

        plan, config = opened.plan, self.files.spec.config
        if plan.buckets.embed:
            notes = [padding_note(rows.text_lengths, plan, config)]
        else:
            shapes = list(rows.shapes.values())
            served = [
                i
                for i, need in enumerate(rows.requirements)
                if is_served(need, plan) and shapes[i].fits(config.max_position)
            ]
            # with --no-sharing, rows still read the prefixes of a given plan
            reads = self.shares or plan.buckets.prefixes is not None
            table = rows.shared(reads).of_rows(served)
            notes = notes_on_rows(plan, [shapes[i] for i in served], table, config.max_position)
        for note in notes:
            progress.note(note)
        progress.note(str(plan_checks.attention_kernels(plan, config, opened.target)))

    def _open(
        self,
        rows: "_JobRows",
        stored_plan: str | None,
        on_note: Callable[[str], object] = lambda note: None,
    ) -> "OpenedModel":
        """The model with the plan to run, both checked; starts jax."""
        from ...compile.targets import present_target
        from ..bundles.cpu_kernels import load_kernels
        from ..devices import backends
        from ..plans import plan_checks
        from ..session import OpenedModel

        name = self.source.target
        try:
            backends.prepare_jax(name, self.peers.size)
            load_kernels(name, on_note)
            target = present_target(name)
            if stored_plan is not None:
                plan = plan_checks.read_stored(stored_plan)
            else:
                source = self.source
                if source.table is None or source.layout is not None:
                    plan_checks.check_layout(source.layout, self.files, target)
                plan = self._make_plan(rows, target)
            return OpenedModel.of(self.files, target, plan, self.adapters, self.source.dtype)
        except CheckpointError:
            raise
        except ValueError as error:
            raise JobError(str(error), EXIT_USAGE) from error

    def _make_plan(self, rows: "_JobRows", target: "Target") -> "Plan":
        """The given plan, or a plan derived from the rows of this job, with the overrides."""
        from ...compile.plan import Numbers, PlannedModel
        from .. import session
        from ..checkpoint.published_numbers import keep_published, overridden_numbers
        from ..planning.embedding_plan import embedding_plan
        from .job_plan import PlanBasis, derived_plan, given_plan, with_layout

        source, overrides = self.source, self.source.overrides
        if source.table is not None:
            plan = given_plan(source.table, overrides)
            return plan if source.layout is None else with_layout(plan, source.layout, target)
        is_part = self.part.num_parts > 1
        keys = {override.partition("=")[0].strip() for override in overrides}
        is_open = source.dtype == "auto" and "numbers.dtype" not in keys
        if is_part and is_open and target.platform == "cpu":
            raise UserError(
                f"--rows {self.part.option}: expected a plan or a dtype, got auto, which "
                f"depends on each machine's processor, while all parts need the same dtype. Give "
                f"all parts the same --plan, --dtype float32 or --dtype bfloat16."
            )
        dtype = session.resolve_dtype(source.dtype, target)
        model, numbers = PlannedModel(self.files.name, self.files.fingerprint()), Numbers(dtype)
        config, layout = self.files.spec.config, source.layout
        # the formats of weights decide how much memory is left for the cache
        numbers = keep_published(overridden_numbers(numbers, overrides), self.files)
        if lengths := rows.text_lengths:
            return embedding_plan(lengths, target.name, model, numbers, config, layout, overrides)
        structured = self.structures.grid(rows.forms)
        adapters = None if self.adapters is None else self.adapters.grid()
        basis = PlanBasis(target, model, numbers, config, layout, overrides, structured, adapters)
        shapes = list(rows.shapes.values())
        return derived_plan(shapes, rows.shared(self.shares), basis, self.peers)


@dataclass(frozen=True)
class _JobRows:
    """The rows of a job that can run, as its plan depends on them."""

    requirements: Sequence[RowRequirements]
    shapes: "Mapping[int, RowShape]"
    """The shapes of the rows in order, by their numbers."""
    prefixes: "PrefixTable"
    """The beginnings that the prompts of all rows share."""

    @classmethod
    def of(cls, summary: ScanSummary, structures: Structures) -> "_JobRows":
        """The rows of a scan that can run."""
        needs = {row.row: row.requirements for row in summary.rows if row.requirements is not None}
        shapes = {row: row_shape(need, structures) for row, need in needs.items()}
        return cls(list(needs.values()), shapes, summary.prefixes)

    @property
    def text_lengths(self) -> Sequence[int]:
        """The lengths of the texts to embed; empty for rows that generate."""
        return text_lengths(self.requirements)

    @property
    def forms(self) -> Set[str]:
        """The forms of answers that rows ask for."""
        return {row.structure for row in self.requirements if row.structure is not None}

    def shared(self, shares: bool) -> "PrefixTable":
        """The beginnings that the prompts of these rows share; none without sharing."""
        from ...compile.grids.prefix_table import NOTHING_SHARED

        return self.prefixes.of_rows(list(self.shapes)) if shares else NOTHING_SHARED


def is_served(row: RowRequirements, plan: "Plan") -> bool:
    """Whether a plan has the graphs for the scores and the form that a row asks for."""
    grid = plan.buckets
    forms = () if grid.structured is None else grid.structured.schemas
    return row.structure in (None, *forms) and (grid.score or row.prompt_logprobs is None)


def target_name(target: str | None, plan_table: Mapping[str, Any] | None) -> str:
    """The name of the target: the given one, that of the plan, or this machine's."""
    return target or str((plan_table or {}).get("target") or default_target())


@contextmanager
def naming_rows(rows: Sequence[ScannedRow]) -> Iterator[None]:
    """Turn the failure of a graph into a JobError that names the rows that need the graph."""
    from ...compile.graph_failures import GraphFailed

    try:
        yield
    except GraphFailed as error:
        described = describe_rows(error.key, error.grid, rows)
        raise JobError(f"{error} {described}", EXIT_BUILD) from error


def describe_rows(key: "GraphKey", grid: "BucketGrid", rows: Sequence[ScannedRow]) -> str:
    """A sentence with the number of rows that need the graph, and the first of them."""
    affected = [
        row
        for row in rows
        if row.requirements is not None and needs_graph(key, grid, row.requirements)
    ]
    named = [f"{row.custom_id!r} ({row.place})" for row in affected[:NUM_NAMED]]
    listed = f": {', '.join(named)}{', ...' * (len(affected) > NUM_NAMED)}" if named else ""
    return f"{len(affected)} of {plural(len(rows), 'row')} need it{listed}; none has run."


def needs_graph(key: "GraphKey", grid: "BucketGrid", row: RowRequirements) -> bool:
    """Whether a row needs the graph, judged by its own requirements alone."""
    from ...compile.graphs.graph_kinds import GRAPH_KINDS
    from ...compile.grids.bucket_grid import NoBucketFits
    from ...compile.grids.row_shape import RowShape

    shapes = [RowShape(length, 0) for length in row.text_lengths]
    if bool(shapes) != grid.embed:
        return False
    is_scored = row.prompt_logprobs is not None
    for shape in shapes or [RowShape(row.prompt_length, row.max_tokens, row.n, is_scored)]:
        with suppress(NoBucketFits):
            grid.fit(shape.prompt_length, shape.max_tokens)
            if GRAPH_KINDS[key.kind].serves(grid, key.shape, shape):
                return True
    return False
