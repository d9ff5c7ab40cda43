"""`noria batch`: options -> settings and a model for the batch job.

The model stays shut until the job asks for it: its files are named and fingerprinted first, its
tokenizer is opened for the scan, and jax is imported when there is something to build.
"""

import argparse
import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import pod_options
from ..checkpoint import ModelFiles, open_model
from ..counted import counted
from ..default_target import default_target
from ..feeding import feeding_order
from ..layout_files import read_layout_table
from ..plan_files import read_plan_table
from ..run_config import ConfigError, apply_overrides
from ..text.chat_template import ChatRenderer
from ..text.tokenizer import InvalidTokenizer, load_tokenizer
from .job import EXIT_MODEL, EXIT_USAGE, Build, JobError, JobSettings, JobText
from .manifest import PhaseClock, versions
from .part import Part
from .peers import ALONE, Peers
from .progress import Progress
from .prompt_encoder import PromptEncoder
from .run import run_job
from .scan import Need, ScanSummary

if TYPE_CHECKING:
    from ...compile.bucket_grid import BucketGrid
    from ...compile.build import GraphBuilt
    from ...compile.default_grid import RowNeed
    from ...compile.plan import Plan
    from ...sharding.layout import Layout

OTHER_CHUNK = 256
"""The chunk that whole prompts are compared with, in what is said of padding."""
_VERSIONS_THAT_DECIDE_ANSWERS = ("noria", "jax", "jaxlib")


def run(options: argparse.Namespace) -> int:
    """Run the job that the parsed options describe."""
    phases = PhaseClock()
    plan_table = None if options.plan is None else read_plan_table(options.plan)
    layout_table = None if options.layout is None else read_layout_table(options.layout)
    if plan_table is not None and layout_table is not None:
        raise ConfigError("--layout: the plan has its own layout. Change it there, or with --set.")
    with pod_options.peers(options, _target_name(options, plan_table)) as peers:
        return _run(options, plan_table, layout_table, peers, phases)


def _run(
    options: argparse.Namespace,
    plan_table: Mapping[str, Any] | None,
    layout_table: Mapping[str, Any] | None,
    peers: Peers,
    phases: PhaseClock,
) -> int:
    progress = Progress(is_quiet=options.quiet or not peers.leads)
    with open_model(options.model) as files:
        settings = _settings(options, files, plan_table, layout_table, peers.setup)
        if settings.sampling_defaults:
            shown = json.dumps(dict(settings.sampling_defaults))
            progress.note(f"sampling defaults {shown} ({settings.sampling_defaults_source})")
        model = BatchModel(files, options, plan_table, layout_table, peers)
        return run_job(settings, model, peers=peers, progress=progress, phases=phases)


def _settings(
    options: argparse.Namespace,
    files: ModelFiles,
    plan_table: Mapping[str, Any] | None,
    layout_table: Mapping[str, Any] | None,
    setup: str,
) -> JobSettings:
    uses_defaults = options.generation_config == "model"
    defaults = dict(files.generation_defaults.sampling) if uses_defaults else {}
    found = versions()
    configuration = {
        "model": f"{files.name} {files.fingerprint()}",
        "plan": "derived" if plan_table is None else json.dumps(plan_table, sort_keys=True),
        "layout": "" if layout_table is None else json.dumps(layout_table, sort_keys=True),
        "overrides": " ".join(options.set),
        "dtype": options.dtype,
        "target": _target_name(options, plan_table),
        "seed": str(options.seed),
        "sampling defaults": json.dumps(defaults, sort_keys=True),
        **{f"version of {name}": found.get(name, "") for name in _VERSIONS_THAT_DECIDE_ANSWERS},
    }
    return JobSettings(
        input_path=options.input,
        output_path=options.output,
        model_name=files.name,
        configuration=configuration,
        sampling_defaults=defaults,
        sampling_defaults_source="generation_config.json of the model" if defaults else "noria",
        error_file=options.error_file,
        grace_seconds=options.grace_seconds,
        on_error=options.on_error,
        restart=options.restart,
        part=Part.parse(options.rows),
        setup=setup,
        allow_other_setup=options.allow_different_numerics,
    )


def _target_name(options: argparse.Namespace, plan_table: Mapping[str, Any] | None) -> str:
    return options.target or str((plan_table or {}).get("target") or default_target())


class BatchModel:
    """A model's files as the batch job uses them."""

    def __init__(
        self,
        files: ModelFiles,
        options: argparse.Namespace,
        plan_table: Mapping[str, Any] | None,
        layout_table: Mapping[str, Any] | None,
        peers: Peers = ALONE,
    ):
        self._files = files
        self._options = options
        self._plan_table = plan_table
        self._layout_table = layout_table
        self._peers = peers

    @property
    def _layout(self) -> "Layout | None":
        from ...sharding.layout import Layout

        return None if self._layout_table is None else Layout.from_table(self._layout_table)

    def open_text(self) -> AbstractContextManager[JobText]:
        """The tokenizer, and the process that renders chat templates."""
        return open_text(self._files)

    def build(
        self,
        summary: ScanSummary,
        stored_plan: str | None,
        *,
        phases: PhaseClock,
        progress: Progress,
    ) -> Build:
        """Load the parameters, then compile the stored, the given or a derived plan."""
        from ...compile.plan import Plan
        from ...compile.targets import find_target
        from .. import compilation_cache, session
        from ..bundles.warm_start import begin

        def report(built: "GraphBuilt") -> None:
            progress.note(str(built))

        # before the plan: a model that no family knows is the model's fault
        max_position = self._files.spec.config.max_position
        compilation_cache.enable()
        name = _target_name(self._options, self._plan_table)
        try:
            session.prepare_cpu(name, self._peers.size)
            target = find_target(name)
            if stored_plan is not None:
                plan = Plan.from_table(tomllib.loads(stored_plan))
            else:
                session.check_present(target)
                if self._plan_table is None:
                    session.check_layout(self._layout, self._files, target)
                dtype = session.resolve_dtype(self._options.dtype, target)
                plan = self._make_plan(summary, name, dtype, max_position)
            session.check_plan(plan, self._files, target, self._options.dtype)
        except ValueError as error:
            raise JobError(str(error), EXIT_USAGE) from error
        text = plan.to_toml()
        given = self._options.plan
        kind = "bundle" if given is not None and given.is_dir() else "file"
        self._peers.agree(lambda: {"plan": text, "--plan": kind})
        warm = begin(self._options.plan, plan, target, self._files, progress.note, self._peers)
        progress.note(text.rstrip())
        progress.note(padding_note(summary, plan.buckets, plan.layout, max_position))
        progress.note(str(session.attention_kernels(plan, self._files.spec.config, target)))
        model = session.load_model(
            self._files, target, plan.model.dtype, plan.layout, warm, plan.model.scan_layers
        )
        phases.enter("build")
        seed = self._options.seed
        generator = session.start(model, plan, seed=seed, on_graph=report, warm=warm)
        return Build(generator, text, partial(feeding_order, grid=plan.buckets))

    def _make_plan(
        self, summary: ScanSummary, target_name: str, dtype: str, max_position: int
    ) -> "Plan":
        """The given plan, or one for the rows of this job; either with the overrides."""
        from ...compile.default_grid import GridDefaults, derive_grid, slot_use, with_chunk
        from ...compile.expert_plan import default_experts
        from ...compile.plan import Plan, PlannedModel
        from ...compile.span_slots import with_ragged_slots

        if self._plan_table is not None:
            return Plan.from_table(apply_overrides(self._plan_table, self._options.set))
        defaults = GridDefaults.for_layout(self._layout)
        asked = apply_overrides({}, self._options.set).get("buckets", {})
        if "chunk" in asked:
            # spans and batches are derived for it, then it is set like any other key
            defaults = with_chunk(defaults, asked["chunk"])
        rows = _row_needs(summary)
        grid = derive_grid(rows, max_position, defaults)
        planned = PlannedModel(self._files.name, self._files.fingerprint(), dtype)
        experts = default_experts(self._files.spec.config)
        plan = Plan(target_name, planned, grid, self._layout, experts)
        table = tomllib.loads(plan.to_toml())
        plan = Plan.from_table(apply_overrides(table, self._options.set))
        grid = plan.buckets
        use = slot_use(rows, has_chunks=bool(grid.chunks))
        if use.num_sequences > grid.decode_slots:
            # slots take one row after the other, of like length at any time, the longest first
            return plan
        return replace(plan, buckets=with_ragged_slots(grid, use, plan.layout))


@contextmanager
def open_text(files: ModelFiles) -> Iterator[JobText]:
    """The tokenizer of a model, and the process that renders its chat template."""
    try:
        tokenizer = load_tokenizer(files.tokenizer_files)
    except InvalidTokenizer as error:
        raise JobError(str(error), EXIT_MODEL) from error
    if tokenizer is None:
        yield JobText(PromptEncoder(None), None)
        return
    with ChatRenderer(tokenizer) as renderer:
        yield JobText(PromptEncoder(tokenizer, renderer.encode), tokenizer)


def row_need(need: Need) -> "RowNeed":
    """A scanned row's need in the words of grids."""
    from ...compile.default_grid import RowNeed

    is_scored = need.prompt_logprobs is not None
    return RowNeed(need.prompt_length, need.max_tokens, need.n, is_scored)


def _row_needs(summary: ScanSummary) -> "list[RowNeed]":
    return [row_need(need) for need in summary.needs]


def padding_note(
    summary: ScanSummary, grid: "BucketGrid", layout: "Layout | None", max_position: int
) -> str:
    """What prompts cost in this grid, whole or in chunks, and what they would cost otherwise."""
    from ...compile.default_grid import GridDefaults, derive_grid, with_chunk

    defaults = GridDefaults.for_layout(layout)
    if not grid.chunks:
        defaults = with_chunk(defaults, min(OTHER_CHUNK, grid.max_length))
    # whole chunks may need longer rows than the grid has
    other = derive_grid(_row_needs(summary), max_position, defaults)
    return f"prefill: {_padding(summary, grid)}; {_padding(summary, other)} otherwise"


def _padding(summary: ScanSummary, grid: "BucketGrid") -> str:
    from ...compile.default_grid import prefill_padding

    longest = grid.prefill[-1].length
    prompts = [need.prompt_length for need in summary.needs]
    lengths = [length for length in prompts if grid.computed_length(length) <= longest]
    real, computed = prefill_padding(lengths, grid.prefill)
    share = (computed - real) / computed if computed else 0.0
    chunks = " and ".join(map(str, grid.chunks))
    how = f"chunks of {chunks}" if chunks else "whole prompts"
    given = f"{counted(real, 'token')} in {counted(len(lengths), 'row')}"
    return f"{given}, {computed} computed in {how}, {share:.1%} padding"
