"""Runs the job that the options of `noria batch` describe.

Makes the settings of the job from its options, and opens the model files that it needs. Does not
know plans, grids or rows.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..adapters.adapter import Adapter
from ..adapters.adapter_set import AdapterSet
from ..adapters.merged_model import open_merged
from ..batch.batch_model import BatchModel, BuildOptions, target_name
from ..batch.job import JobSettings
from ..batch.job_files import check_files, job_outputs, side_files
from ..batch.job_identity import JobIdentity
from ..batch.job_runs import PhaseClock
from ..batch.pipes import PIPE, copy_path, write_to_stdout
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
from ..files.layout_files import layout_file, read_layout_table
from ..files.manifest import fingerprint
from ..files.remote import RemoteFile, Url
from ..files.run_config import read_instant, read_plan_table
from ..pods.peers import ALONE, Peers
from ..pods.pod_options import PodOptions
from ..process.standard_streams import is_closed
from ..progress.progress import Progress
from ..progress.progress_file import ProgressFile, path_of
from ..rows.columns import INPUT, Columns
from ..rows.form_file import read_form_file
from ..rows.lines import endpoint_of
from ..rows.part import Part
from ..rows.request_body import read_sampling
from ..rows.row_files import table_of
from ..rows.structured_body import read_form
from .shared_options import typed

_VERSIONS_THAT_DECIDE_ANSWERS = ("noria", "jax", "jaxlib")


def run_with_options(options: argparse.Namespace) -> int:
    """Run the job that the parsed options of `noria batch` describe."""
    phases = PhaseClock()
    plan_table = None if options.plan is None else read_plan_table(options.plan)
    layout_table = None if options.layout is None else read_layout_table(options.layout)
    pod = typed(PodOptions, options)
    _check_combinations(options, pod)
    target, disk = target_name(options.target, plan_table), Disk()
    with pod.peers(target) as peers, ExitStack() as opened:
        _check_places(options, peers)
        progress = Progress(is_quiet=options.quiet, is_silent=not peers.is_leader)
        files = opened.enter_context(open_merged(options.model, options.merge_adapter))
        files.unread.report(progress.warn, is_strict=options.strict_config)
        if options.generation_config == "model":
            files.generation_defaults.report(progress.warn)
        adapters = open_adapters(options, files)
        setup = f"{peers.setup} on {target}"  # as manifests name processes and devices
        settings, outputs = _settings(options, files, plan_table, layout_table, setup, adapters)
        outputs.check([("the input", settings.input_path), *settings.also_read])
        if options.progress_file is not None and peers.is_leader:
            opened.enter_context(_progress_recorded(options, settings, progress))
        opened.enter_context(outputs.mirrored(disk, progress.note, restarts=options.restart))
        opened.enter_context(input_copied(options.input, settings.input_path, disk))
        if settings.sampling_defaults:
            shown = json.dumps(dict(settings.sampling_defaults))
            progress.note(f"sampling defaults {shown} ({settings.sampling_defaults_source})")
        build = BuildOptions(
            target,
            dtype=options.dtype,
            overrides=tuple(options.set),
            bundle=options.plan,
            requires_bundle=options.require_bundle,
            part=settings.identity.part,
            seed=options.seed,
            shares=options.shares,
            is_strict=options.strict_length,
            shows_plan=options.verbose,
        )
        model = BatchModel(files, build, plan_table, layout_table, peers, adapters)
        if options.pipeline is not None:
            code = _run_stages(options, files, settings, model, progress)
        else:
            code = run_job(settings, model, peers=peers, progress=progress, phases=phases)
        progress.end(code)
        if options.output == PIPE and code in (EXIT_OK, EXIT_ROWS_FAILED):
            write_to_stdout(settings.output_path, disk)
        return code


def _check_combinations(options: argparse.Namespace, pod: PodOptions) -> None:
    """Refuse options that exclude each other."""
    if options.plan is not None and options.layout is not None:
        raise ConfigError(
            "--layout: expected no layout beside a plan, which has its own, got one. Change it in "
            "the plan, or with --set."
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
def _progress_recorded(
    options: argparse.Namespace, settings: JobSettings, progress: Progress
) -> Iterator[None]:
    """Write the progress of the job and its end to the progress file."""
    place = options.progress_file
    if (path := path_of(place)) is not None:
        files = {**side_files(settings.output_path), "the progress file": path}
        read = [("the input", settings.input_path), *settings.also_read]
        check_files(job_outputs(settings.output_path, settings.error_file), read, files)
    with closing(ProgressFile(place, progress.warn)) as progress.file:
        progress.begin()
        try:
            yield
        except BaseException as error:
            progress.end(exit_code(error))
            raise


def _run_stages(
    options: argparse.Namespace,
    files: ModelFiles,
    settings: JobSettings,
    model: BatchModel,
    progress: Progress,
) -> int:
    from ..stages.pipeline_file import read_pipeline
    from ..stages.run_stages import run_stages
    from ..stages.staged_model import StagedModel

    form = None if options.form is None else read_form_file(options.form)
    pipeline = read_pipeline(options.pipeline, form)
    configuration = {**settings.identity.configuration, "pipeline": pipeline.text}
    identity = replace(settings.identity, configuration=configuration)
    return run_stages(
        replace(settings, identity=identity),
        StagedModel(model, options.seed, lambda: files.spec.config.max_position),
        pipeline,
        keeps_stages=options.keep_stages,
        progress=progress,
    )


def _settings(
    options: argparse.Namespace,
    files: ModelFiles,
    plan_table: Mapping[str, Any] | None,
    layout_table: Mapping[str, Any] | None,
    setup: str,
    adapters: AdapterSet | None,
) -> tuple[JobSettings, Outputs]:
    defaults, source = _sampling_defaults(options, files)
    columns = _columns(options, files)
    form = None
    if options.form is not None and options.pipeline is None:
        form = read_form_file(options.form)
    configuration = {
        **_configuration(options, files, plan_table, layout_table, adapters),
        "sampling defaults": json.dumps(defaults, sort_keys=True),
        **_configuration_of_rows(columns, form),
    }
    output = options.output
    if output == PIPE:
        output = output_for_stdout(options, configuration)
    outputs = Outputs.at(output, options.error_file, options.work_folder)
    is_url, reads_stdin = isinstance(options.input, Url), options.input == PIPE
    input_path = options.input
    if reads_stdin:
        input_path = copy_path(outputs.output)
    elif is_url:
        input_path = input_copy_path(options.input, outputs.output)
    settings = JobSettings(
        input_path=input_path,
        output_path=outputs.output,
        model_name=files.name,
        identity=JobIdentity(
            configuration,
            Part.parse(options.rows),
            setup=setup,
            allow_other_setup=options.allow_different_numerics,
            updates=options.update,
        ),
        sampling_defaults=defaults,
        sampling_defaults_source=source,
        form=None if form is None else read_form(form),
        config_keys_ignored=files.unread.keys,
        tensors_not_read=files.unread.all_tensors,
        error_file=outputs.error_file,
        also_read=_also_read(options, files),
        grace_seconds=options.grace_seconds,
        on_error=options.on_error,
        restart=options.restart,
        expected_weights=options.expect_weights,
        reads_stdin=reads_stdin,
        input_url=str(options.input) if is_url else None,
        columns=columns,
        ignores_unknown=options.ignore_unknown,
        price_per_hour=_price_per_hour(options.prices, target_name(options.target, plan_table)),
        now=None if options.now is None else read_instant("--now", options.now),
        models=adapter_of_models(options, files, adapters),
    )
    return settings, outputs


def _sampling_defaults(
    options: argparse.Namespace, files: ModelFiles
) -> tuple[dict[str, Any], str]:
    """The sampling parameters of rows that do not have them, and their source."""
    uses_defaults = options.generation_config == "model"
    defaults = dict(files.generation_defaults.sampling) if uses_defaults else {}
    source = "generation_config.json of the model" if defaults else "noria"
    if options.sampling:
        source = "--sampling" if source == "noria" else f"--sampling, {source}"
        defaults |= read_sampling(options.sampling)
    return defaults, source


def _configuration(
    options: argparse.Namespace,
    files: ModelFiles,
    plan_table: Mapping[str, Any] | None,
    layout_table: Mapping[str, Any] | None,
    adapters: AdapterSet | None,
) -> dict[str, str]:
    """The facts that decide the answers of a job besides its rows and their defaults."""
    package_versions = versions()
    configuration = {
        "model": files.fingerprint(),
        "plan": "derived" if plan_table is None else _given_plan(plan_table, options.set),
        "layout": "" if layout_table is None else json.dumps(layout_table, sort_keys=True),
        # a given plan has them already
        "overrides": " ".join(options.set) if plan_table is None else "",
        "dtype": options.dtype,
        "target": target_name(options.target, plan_table),
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


def _given_plan(plan_table: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """The facts of a given plan, which are those of a bundle that was compiled from it."""
    from ..batch.job_plan import given_plan
    from ..plans.plan_facts import plan_facts

    plan = given_plan(plan_table, overrides)
    # a bundle has the published formats of the model, which is part of the configuration
    return plan_facts(replace(plan, numbers=replace(plan.numbers, published={})))


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


def open_adapters(options: argparse.Namespace, files: ModelFiles) -> AdapterSet | None:
    """The adapters that rows may name; None without any."""
    paths: dict[str, Path] = {}
    for given in options.adapters:
        name, _, path = given.partition("=")
        if not name or not path or name in (*paths, files.name, str(options.model)):
            raise ConfigError(
                f"--adapters: expected NAME=DIR, with a name that neither the model nor another "
                f"adapter has, got {given!r}."
            )
        paths[name] = Path(path)
    return AdapterSet.open(files, paths) if paths else None


def adapter_of_models(
    options: argparse.Namespace, files: ModelFiles, adapters: AdapterSet | None
) -> dict[str, str | None] | None:
    """Map each `model` that a row may name to its adapter, as `JobSettings.models` does.

    None if the job has no adapters.
    """
    if adapters is None:
        return None
    own = dict.fromkeys((files.name, str(options.model)))
    return own | {name: name for name in adapters.names}


def output_for_stdout(options: argparse.Namespace, configuration: Mapping[str, str]) -> Path:
    """The output of a job that writes to standard output, in the current folder.

    The name is a hash of the job's configuration, and of the names of its input, rows and pipeline.
    So the same command finds its journal again. Jobs that differ in none of these have one name.
    """
    source = options.input
    names = {
        "input": str(source) if isinstance(source, Url) else os.path.abspath(source),
        "rows": str(Part.parse(options.rows)),
        "pipeline": os.path.abspath(options.pipeline or ""),
    }
    return Path(f"noria-stdout-{fingerprint({**configuration, **names})[7:19]}.jsonl")


def _also_read(options: argparse.Namespace, files: ModelFiles) -> list[tuple[str, Path]]:
    source = options.input
    inputs = {
        "the input": RemoteFile(source).local_path if isinstance(source, Url) else None,
        "the model": files.path,
        "the plan": options.plan,
        "the layout": layout_file(options.layout or ""),
        "the pipeline": options.pipeline,
        "the form": options.form,
        "the merged adapter": options.merge_adapter,
    }
    given = [(description, path) for description, path in inputs.items() if path is not None]
    paths = (Path(adapter.partition("=")[2]) for adapter in options.adapters)
    return given + [("an adapter", path) for path in paths]


def _price_per_hour(prices: Path | None, target: str) -> float | None:
    """The price of all devices of a target, by the user's hardware tables."""
    if prices is None:
        return None
    from ...compile.hardware.hardware import hardware_of
    from ...compile.target_names import TargetName
    from ..files.hardware_files import known_hardware

    hardware = hardware_of(target, known_hardware(prices))
    if hardware.price_per_hour is None:
        raise ConfigError(
            f"--prices {prices}: expected a table [{hardware.name}] with price_per_hour, as the "
            f"job runs on {target}, got none. Add the key."
        )
    # the devices of a CPU target are parts of one machine
    name = TargetName.parse(target)
    return hardware.price_per_hour * (1 if name.platform == "cpu" else name.num_devices)
