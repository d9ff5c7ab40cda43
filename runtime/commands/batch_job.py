"""Runs the job that the options of `noria batch` describe.

Makes the settings of the job from its options, and opens the model files that it needs. Does not
know grids or rows.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..adapters.adapter import Adapter
from ..adapters.adapter_set import AdapterSet
from ..adapters.merged_model import open_merged
from ..batch.batch_model import BatchModel, PlanSource, target_name
from ..batch.job import JobIdentity, JobSettings, ModelFacts
from ..batch.job_files import JobFiles
from ..batch.job_runs import PhaseClock
from ..batch.pipes import PIPE, copy_path, output_for_stdout, write_to_stdout
from ..batch.remote_files import Outputs, input_copied, input_copy_path
from ..batch.run import run_job
from ..checkpoint import ModelFiles
from ..devices.machine import versions
from ..errors import (
    EXIT_OK,
    EXIT_ROWS_FAILED,
    ConfigError,
    RowError,
    exit_code,
)
from ..files.disk import Disk
from ..files.file_checks import check_files
from ..files.layout_files import has_layout, is_fitted, layout_file, read_layout_table
from ..files.remote import RemoteFile, Url
from ..files.run_config import read_instant, read_plan_table
from ..pods.peers import ALONE, Peers
from ..pods.pod_options import PodOptions
from ..process.standard_streams import is_closed
from ..progress.progress import Progress, ProgressFile, path_of
from ..rows.columns import INPUT, Columns
from ..rows.lines import RequestRules, endpoint_of
from ..rows.part import Part
from ..rows.request_body import read_sampling
from ..rows.row_files import table_of
from ..rows.structured_body import read_form, read_form_file
from ..stages.pipeline_file import Pipeline, read_pipeline
from .shared_options import open_adapters, typed

_VERSIONS_THAT_DECIDE_ANSWERS = ("noria", "jax", "jaxlib")


def run_with_options(options: argparse.Namespace) -> int:
    """Run the job that the parsed options of `noria batch` describe."""
    phases = PhaseClock()
    plan_table = None if options.plan is None else read_plan_table(options.plan)
    layout_table = None if options.layout is None else read_layout_table(options.layout)
    pod = typed(PodOptions, options)
    _check_combinations(options, pod, plan_table)
    target, disk = target_name(options.target, plan_table), Disk()
    with pod.peers(target) as peers, ExitStack() as opened:
        _check_places(options, peers)
        progress = Progress(
            is_quiet=options.quiet, is_verbose=options.verbose, is_silent=not peers.is_leader
        )
        files = opened.enter_context(open_merged(options.model, options.merge_adapter))
        files.unread.report(progress.warn, is_strict=options.strict_config)
        if options.generation_config == "model":
            files.generation_defaults.report(progress.warn)
        adapters, models = open_adapters(options.adapters, options.model, files)
        source = PlanSource(
            target,
            dtype=options.dtype,
            overrides=tuple(options.set),
            table=plan_table,
            layout_table=layout_table,
            fits_layout=options.layout is not None and is_fitted(options.layout),
            path=options.plan,
            requires_bundle=options.require_bundle,
        )
        setup = _setup(peers, target)
        settings, outputs = _settings(options, files, source, setup, adapters, models)
        outputs.check(settings.files.read)
        if options.progress_file is not None and peers.is_leader:
            recorded = _progress_recorded(options.progress_file, settings.files, progress)
            opened.enter_context(recorded)
        opened.enter_context(outputs.mirrored(disk, progress.note, restarts=options.restart))
        opened.enter_context(input_copied(options.input, settings.files.input, disk))
        if defaults := settings.facts.sampling_defaults:
            shown = f"{json.dumps(dict(defaults))} ({settings.facts.sampling_defaults_source})"
            progress.note(f"sampling defaults {shown}")
        model = BatchModel(
            files,
            source,
            peers,
            adapters,
            settings.identity.part,
            seed=options.seed,
            shares=options.shares,
            is_strict=options.strict_length,
        )
        if options.pipeline is not None:
            form = None if options.form is None else read_form_file(options.form)
            pipeline = read_pipeline(options.pipeline, form)
            code = _run_stages(pipeline, settings, model, progress, keeps=options.keep_stages)
        else:
            code = run_job(settings, model, peers=peers, progress=progress, phases=phases)
        progress.end(code)
        if options.output == PIPE and code in (EXIT_OK, EXIT_ROWS_FAILED):
            write_to_stdout(settings.files.output, disk)
        return code


def _check_combinations(
    options: argparse.Namespace, pod: PodOptions, plan_table: Mapping[str, Any] | None
) -> None:
    """Refuse options that exclude each other."""
    if options.layout is not None and plan_table is not None and has_layout(plan_table):
        raise ConfigError(
            "--layout: expected no layout beside a plan that has its own, got one. Change it in "
            "the plan, or with --set."
        )
    if options.layout is not None and options.plan is not None and options.plan.is_dir():
        raise ConfigError(
            "--layout: expected no layout beside a bundle, whose graphs are compiled, got one. "
            "Make a bundle for the layout with noria compile."
        )
    if options.pipeline is not None and pod.are_given:
        raise ConfigError(
            "--pipeline: expected one process, as the requests of later stages are on the disk of "
            "one host, got the options of several. Run parts of the rows with --rows i/n."
        )
    if options.pipeline is not None and options.input == PIPE:
        raise ConfigError(
            "--pipeline: expected a file as input, which every stage reads, got a pipe. Save the "
            "input to a file."
        )
    if options.pipeline is not None and options.update:
        raise ConfigError(
            "--update: expected no --pipeline beside it, as only single jobs keep the answers of "
            "equal rows, got one. Choose another output, or replace it with --restart."
        )
    if options.pipeline is not None and (options.prompt_column or options.url):
        raise ConfigError(
            "--pipeline: expected neither --prompt-column nor --url beside it, as templates read "
            "every column of a table, got one. Leave it out."
        )
    if options.require_bundle and not (options.plan is not None and options.plan.is_dir()):
        raise ConfigError(
            f"--require-bundle: expected the folder of a bundle as --plan, got "
            f"{options.plan or 'none'}. Make a bundle with noria compile."
        )
    if options.keep_stages and options.pipeline is None:
        raise ConfigError("--keep-stages: expected --pipeline beside it, got none.")


@contextmanager
def _progress_recorded(place: str, files: JobFiles, progress: Progress) -> Iterator[None]:
    """Write the progress of the job and its end to the progress file."""
    if (path := path_of(place)) is not None:
        written = {**files.side_files, "the progress file": path}
        check_files(files.named_outputs, files.read, written)
    with closing(ProgressFile(place, progress.warn)) as progress.file:
        progress.begin()
        try:
            yield
        except BaseException as error:
            progress.end(exit_code(error))
            raise


def _run_stages(
    pipeline: Pipeline,
    settings: JobSettings,
    model: BatchModel,
    progress: Progress,
    *,
    keeps: bool,
) -> int:
    """Run the stages of a pipeline; `keeps` says that their files stay."""
    from ..stages.run_stages import run_stages
    from ..stages.staged_model import StagedModel

    configuration = {**settings.identity.configuration, "pipeline": pipeline.text}
    identity = replace(settings.identity, configuration=configuration)
    return run_stages(
        replace(settings, identity=identity),
        StagedModel(model, model.seed, lambda: model.files.spec.config.max_position),
        pipeline,
        keeps_stages=keeps,
        progress=progress,
    )


def _setup(peers: Peers, target: str) -> str:
    """The processes and devices as manifests name them; the order of sums depends on all of it."""
    from ..bundles.cpu_kernels import kernels_of

    return f"{peers.setup} on {target}{kernels_of(target)}"


def _settings(
    options: argparse.Namespace,
    files: ModelFiles,
    source: PlanSource,
    setup: str,
    adapters: AdapterSet | None,
    models: Mapping[str, str | None] | None,
) -> tuple[JobSettings, Outputs]:
    """The settings of the job, and its outputs with their URLs."""
    defaults, defaults_source = _sampling_defaults(
        files, options.sampling, uses_config=options.generation_config == "model"
    )
    columns = _columns(options, files)
    form = None
    if options.form is not None and options.pipeline is None:
        form = read_form_file(options.form)
    configuration = {
        **_configuration(options, files, source, adapters),
        "sampling defaults": json.dumps(defaults, sort_keys=True),
        **_configuration_of_rows(columns, form),
    }
    price = None
    if options.prices is not None:
        from ..files.hardware_files import price_per_hour

        price = price_per_hour(source.target, options.prices)
    job_files, outputs = _job_files(options, files, columns, configuration)
    settings = JobSettings(
        job_files,
        JobIdentity(
            configuration,
            Part.parse(options.rows),
            setup=setup,
            allow_other_setup=options.allow_different_numerics,
            updates=options.update,
            now=None if options.now is None else read_instant("--now", options.now),
        ),
        ModelFacts(
            files.name,
            defaults,
            defaults_source,
            config_keys_ignored=files.unread.keys,
            tensors_not_read=files.unread.all_tensors,
            expected_weights=options.expect_weights,
        ),
        RequestRules(
            defaults if form is None else {**defaults, "structured_outputs": read_form(form)},
            options.ignore_unknown,
            models,
            options.on_error,
        ),
        grace_seconds=options.grace_seconds,
        price_per_hour=price,
    )
    return settings, outputs


def _job_files(
    options: argparse.Namespace,
    model: ModelFiles,
    columns: Columns,
    configuration: Mapping[str, str],
) -> tuple[JobFiles, Outputs]:
    """The files of the job, and their URLs."""
    place, output = options.input, options.output
    if output == PIPE:
        output = output_for_stdout(place, options.rows, options.pipeline, configuration)
    outputs = Outputs.at(output, options.error_file, options.work_folder)
    input_path, url, url_path = place, None, None
    if place == PIPE:
        input_path = copy_path(outputs.output)
    elif isinstance(place, Url):
        input_path, url = input_copy_path(place, outputs.output), str(place)
        url_path = RemoteFile(place).local_path
    read = {
        "the input": url_path,
        "the model": model.path,
        "the plan": options.plan,
        "the layout": layout_file(options.layout or ""),
        "the pipeline": options.pipeline,
        "the form": options.form,
        "the merged adapter": options.merge_adapter,
    }
    also_read = [(description, path) for description, path in read.items() if path is not None]
    adapters = (Path(adapter.partition("=")[2]) for adapter in options.adapters)
    files = JobFiles(
        outputs.output,
        outputs.error_file,
        input=input_path,
        reads_stdin=place == PIPE,
        input_url=url,
        columns=columns,
        also_read=[*also_read, *(("an adapter", path) for path in adapters)],
        restart=options.restart,
    )
    return files, outputs


def _sampling_defaults(
    files: ModelFiles, given: Sequence[str], *, uses_config: bool
) -> tuple[dict[str, Any], str]:
    """The sampling parameters of rows that do not have them, and their source."""
    defaults = dict(files.generation_defaults.sampling) if uses_config else {}
    source = "generation_config.json of the model" if defaults else "noria"
    if given:
        source = "--sampling" if source == "noria" else f"--sampling, {source}"
        defaults |= read_sampling(given)
    return defaults, source


def _configuration(
    options: argparse.Namespace, files: ModelFiles, source: PlanSource, adapters: AdapterSet | None
) -> dict[str, str]:
    """The facts that decide the answers of a job besides its rows and their defaults."""
    package_versions = versions()
    configuration = {
        "model": files.fingerprint(),
        **source.facts(),
        "seed": str(options.seed),
        **{
            f"version of {name}": package_versions.get(name, "")
            for name in _VERSIONS_THAT_DECIDE_ANSWERS
        },
    }
    # a key is there only if its option is given
    if options.merge_adapter is not None:
        configuration["merged adapter"] = Adapter(options.merge_adapter).fingerprint()
    if adapters is not None:
        # which rows are in error depends on the names
        base = sorted({files.name, str(options.model)})
        configuration["adapters"] = json.dumps([adapters.fingerprints(), base])
    if options.ignore_unknown:
        configuration["unknown keys"] = "ignored"
    if options.strict_length:
        configuration["long texts"] = "refused"
    return configuration


def _configuration_of_rows(columns: Columns, form: Mapping[str, Any] | None) -> dict[str, str]:
    """The facts that decide how the rows of an input are read."""
    configuration = {}
    if columns.contents or columns.id or columns.url:
        configuration["columns"] = json.dumps([columns.contents, columns.id, columns.url])
    if columns.carried:
        configuration["carried"] = json.dumps(columns.carried)
    if form is not None:
        configuration["form"] = json.dumps(form)
    return configuration


def _columns(options: argparse.Namespace, files: ModelFiles) -> Columns:
    """The columns of a table that the options name, or that the model suggests."""
    carried: dict[str, str] = {}
    for given in options.carry:
        column, equals, name = given.rpartition("=")
        if name in ("", *carried):
            raise ConfigError(
                f"--carry {given}: expected COLUMN or COLUMN=NAME, with a name that no other "
                f"carried column has, got {name or 'no name'!r}. Write --carry COLUMN=NAME."
            )
        carried[name] = column if equals else name
    try:
        url = None if options.url is None else endpoint_of(options.url)
    except RowError as error:
        raise ConfigError(f"--{error.message}") from None
    contents = tuple(options.prompt_column)
    generates = True
    if url is None and contents in ((), INPUT):
        is_table = table_of(Path(str(options.input))) != "lines"
        generates = not is_table or files.spec.config.lacks_generation is None
    return Columns(contents, options.id_column, url, carried, generates=generates)


def _check_places(options: argparse.Namespace, peers: Peers) -> None:
    """Refuse pipes and URLs where files are needed."""
    places = [options.input, options.output, options.error_file]
    if peers.setup != ALONE.setup and any(p == PIPE or isinstance(p, Url) for p in places):
        raise ConfigError(
            "-i, -o, --error-file: expected files for a job of several processes, got a pipe or a "
            "URL. Save the input to a file, and name an output on this machine."
        )
    if isinstance(options.input, Url) and options.input in places[1:]:
        raise ConfigError(
            f"{options.input}: expected two URLs, got the input as an output. Choose another "
            "output; a file that is read is never written."
        )
    if options.output == PIPE and is_closed(sys.stdout):
        raise ConfigError(
            "-o -: expected standard output, got none, as it is closed (>&-). Name an output."
        )
    if options.output == PIPE and isinstance(options.error_file, Url):
        raise ConfigError(
            "--error-file: expected a path on this machine beside -o -, got a URL. Name an output."
        )
