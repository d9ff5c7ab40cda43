"""`noria batch`: options -> settings and a model for the batch job.

The model stays shut until the job asks for it: its files are named and fingerprinted first, its
tokenizer is opened for the scan, and jax is imported when there is something to build.
"""

import argparse
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint import ModelFiles, open_model
from ..devices.default_target import default_target
from ..engine.submission_order import submission_order
from ..errors import EXIT_MODEL, EXIT_USAGE, ConfigError, InvalidTokenizer, JobError
from ..files.layout_files import layout_file, read_layout_table
from ..files.run_config import read_instant, read_plan_table
from ..pods import pod_options
from ..pods.peers import ALONE, Peers
from ..text.chat_template import ChatRenderer
from ..text.load_tokenizer import load_tokenizer
from .graph_rows import naming_rows
from .job import Build, JobSettings, JobText
from .manifest import PhaseClock, versions
from .part import Part
from .progress import Progress
from .prompt_encoder import PromptEncoder
from .run import run_job
from .scan import RowRequirements, ScanSummary

if TYPE_CHECKING:
    from ...compile.build import BuildProgress
    from ...compile.grids.default_grid import RowShape
    from ...compile.plan import Plan
    from ...compile.targets import Target
    from ...sharding.layout import Layout

_VERSIONS_THAT_DECIDE_ANSWERS = ("noria", "jax", "jaxlib")


def run_with_options(options: argparse.Namespace) -> int:
    """Run the job that the parsed options of `noria batch` describe."""
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
    progress = Progress(is_quiet=options.quiet or not peers.is_leader)
    with open_model(options.model) as files:
        files.unread.report(progress.note, is_strict=options.strict_config)
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
        "model": files.fingerprint(),
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
        config_keys_ignored=files.unread.keys,
        error_file=options.error_file,
        also_read=_also_read(options, files),
        grace_seconds=options.grace_seconds,
        on_error=options.on_error,
        restart=options.restart,
        part=Part.parse(options.rows),
        setup=setup,
        allow_other_setup=options.allow_different_numerics,
        expected_weights=options.expect_weights,
        now=None if options.now is None else read_instant("--now", options.now),
    )


def _also_read(options: argparse.Namespace, files: ModelFiles) -> list[tuple[str, Path]]:
    found = {
        "the model": files.path,
        "the plan": options.plan,
        "the layout": layout_file(options.layout or ""),
    }
    return [(what, path) for what, path in found.items() if path is not None]


def _target_name(options: argparse.Namespace, plan_table: Mapping[str, Any] | None) -> str:
    return options.target or str((plan_table or {}).get("target") or default_target())


@dataclass(frozen=True)
class BatchModel:
    """A model's files as the batch job uses them."""

    files: ModelFiles
    options: argparse.Namespace
    plan_table: Mapping[str, Any] | None
    layout_table: Mapping[str, Any] | None
    peers: Peers = ALONE

    @property
    def _layout(self) -> "Layout | None":
        from ...sharding.layout import Layout

        return None if self.layout_table is None else Layout.from_table(self.layout_table)

    def open_text(self, now: datetime) -> AbstractContextManager[JobText]:
        """The tokenizer, and the process that renders chat templates."""
        return open_text(self.files, now)

    def weights(self) -> str:
        """The digest of the weights, by this process alone; reads files without a remembered
        root."""
        return self.files.weights_digest().result()

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
        from .. import session
        from ..bundles import compilation_cache
        from ..bundles.warm_start import WarmStart
        from .job_plan import limit_note, padding_note

        def report(built: "BuildProgress") -> None:
            progress.note(str(built))

        # before the plan: a model that no family knows is the model's fault
        config = self.files.spec.config
        rows = [row_shape(need) for need in summary.requirements]
        cache = compilation_cache.enable(progress.note)
        name = _target_name(self.options, self.plan_table)
        try:
            session.prepare_jax(name, self.peers.size)
            target = find_target(name)
            if stored_plan is not None:
                plan = Plan.from_table(tomllib.loads(stored_plan))
            else:
                session.check_present(target)
                if self.plan_table is None:
                    session.check_layout(self._layout, self.files, target)
                plan = self._make_plan(rows, target)
            session.check_plan(plan, self.files, target, self.options.dtype)
        except ValueError as error:
            raise JobError(str(error), EXIT_USAGE) from error
        text = plan.to_toml()
        given = self.options.plan
        kind = "bundle" if given is not None and given.is_dir() else "file"
        self.peers.agree(lambda: {"plan": text, "--plan": kind})
        weights = self.files.weights_digest(self.peers)
        weights.start()
        bundle = given if kind == "bundle" else None
        warm = WarmStart(bundle, cache, plan, target, self.files, progress.note, self.peers)
        progress.note(text.rstrip())
        progress.note(padding_note(rows, plan.buckets, plan.layout, config.max_position))
        if said := limit_note(plan, rows, config.max_position):
            progress.note(said)
        progress.note(str(session.attention_kernels(plan, config, target)))
        dtype, scan_layers = plan.numbers.dtype, plan.model.scan_layers
        model = session.load_model(
            self.files, target, dtype, plan.layout, scan_layers, progress.note
        )
        digest = weights.result()
        phases.enter("build")
        seed = self.options.seed
        with naming_rows(summary.rows):
            generator = session.start(model, plan, seed=seed, on_graph=report, warm=warm)
        return Build(generator, text, digest, partial(submission_order, grid=plan.buckets))

    def _make_plan(self, rows: "Sequence[RowShape]", target: "Target") -> "Plan":
        """The given plan, or one for the rows of this job; either with the overrides."""
        from ...compile.plan import Numbers, PlannedModel
        from .. import session
        from .job_plan import derived_plan, given_plan

        overrides = self.options.set
        if self.plan_table is not None:
            return given_plan(self.plan_table, overrides)
        is_part = Part.parse(self.options.rows).of > 1
        is_open = self.options.dtype == "auto" and not _sets_dtype(overrides)
        if is_part and is_open and target.platform == "cpu":
            raise ValueError(
                f"--rows {self.options.rows}: expected a plan or a dtype, as auto takes the faster "
                f"one of each machine's processor and parts must not differ, got auto. Give all "
                f"parts the same --plan, --dtype float32 or --dtype bfloat16."
            )
        dtype = session.resolve_dtype(self.options.dtype, target)
        model, numbers = PlannedModel(self.files.name, self.files.fingerprint()), Numbers(dtype)
        config, layout = self.files.spec.config, self._layout
        return derived_plan(rows, target, model, numbers, config, layout, overrides, self.peers)


@contextmanager
def open_text(files: ModelFiles, now: datetime | None = None) -> Iterator[JobText]:
    """The tokenizer of a model, and the process that renders its chat template.

    The template sees `now`, or the moment of this call, whenever it asks for the time.
    """
    try:
        tokenizer = load_tokenizer(files.tokenizer_files)
    except InvalidTokenizer as error:
        raise JobError(str(error), EXIT_MODEL) from error
    if tokenizer is None:
        yield JobText(PromptEncoder(None), None)
        return
    with ChatRenderer(tokenizer, now=now) as chat:
        yield JobText(
            PromptEncoder(tokenizer, chat.encode_all),
            tokenizer,
            reads_clock=lambda: chat.reads_clock,
            gave_up=lambda: chat.gave_up,
        )


def _sets_dtype(overrides: Sequence[str]) -> bool:
    """Whether overrides of a plan give its dtype."""
    return any(one.partition("=")[0].strip() == "numbers.dtype" for one in overrides)


def row_shape(need: RowRequirements) -> "RowShape":
    """A scanned row's need in the words of grids."""
    from ...compile.grids.default_grid import RowShape

    is_scored = need.prompt_logprobs is not None
    return RowShape(need.prompt_length, need.max_tokens, need.n, is_scored)
