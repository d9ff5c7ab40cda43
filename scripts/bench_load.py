"""Measure how fast weights load onto the CPU, beside a plain read and another commit's loader.

Writes a random checkpoint of Llama's shape in several files, and then alternates: a plain read of
its bytes, and a load by each checkout in a process of its own, from a cold and from a warm page
cache. A cold run begins with files whose pages were dropped. The median of each kind counts. Each
process first uses as much memory as the parameters need, so that no run pays for what the host of a
virtual machine took back. The peak is the highest resident memory during the load (VmHWM, mapped
pages of files included), less that before it and less the parameters. All loads must give the same
bits.

    git worktree add build/before COMMIT
    python scripts/bench_load.py --before build/before --work-dir build --output benchmarks/load

The shape is that of nine layers of Llama 3 8B, 4 GB in bfloat16; see `measure_load.py` for the
memory of several processes.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("modelzoo", "sharding", "compile", "runtime")
READ_BYTES = 4 * 2**20
GB, MIB = 1e9, 2**20


def main() -> None:
    options = _parse()
    if options.worker:
        print(json.dumps(load(options.work_dir)))
        return
    from measure_load import write_checkpoint

    from noria.runtime.devices.machine import describe_machine

    checkouts = {"after": ROOT} | ({"before": options.before} if options.before else {})
    options.work_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work_dir) as folder:
        num_bytes = write_checkpoint(Path(folder), options)
        runs = measure(Path(folder), checkouts, options.repeat)
    if len({run["digest"] for name, found in runs.items() if "read" not in name
            for run in found}) != 1:  # fmt: skip
        sys.exit("expected the same bits of every load, got others")
    found = {"machine": describe_machine(), "bytes": num_bytes, "runs": runs}
    options.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(table(found))
    print(table(found))


def measure(folder: Path, checkouts: dict[str, Path], repeat: int) -> dict[str, list[Any]]:
    """Alternate all kinds of runs; returns the runs of each kind."""
    runs: dict[str, list[Any]] = {}
    for _ in range(repeat):
        for cache in ("cold", "warm"):
            for name in ("plain read", *checkouts):
                if cache == "cold":
                    _drop_pages(folder)
                if name == "plain read":
                    run = {"seconds": _read(folder)}
                else:
                    run = _load_in_process(folder, checkouts[name])
                print(f"{name}, {cache}: {run}", file=sys.stderr)
                runs.setdefault(f"{name}, {cache}", []).append(run)
    return runs


def table(found: dict[str, Any]) -> str:
    """Return the page of the benchmark, with a line for each kind of run."""
    machine, num_bytes = found["machine"], found["bytes"]
    lines = [
        "# Loading weights",
        "",
        f"{num_bytes / GB:.2f} GB of random weights in bfloat16, nine layers of Llama 3 8B's shape "
        f"in several files, loaded onto the CPU; {machine['processor']}, {machine['cores']} cores, "
        f"{machine['system']}, jax {machine['versions']['jax']}; load average "
        f"{machine['load_average']} at the end. Medians, all runs in turns. `cold` begins without "
        "the files in the page cache. The peak is VmHWM during the load, less the memory before it "
        "and the parameters; mapped pages of files count. Made by `scripts/bench_load.py`.",
        "",
        "| run | s | GB/s | times a plain read | processor s | peak MiB |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, of_kind in found["runs"].items():
        seconds = _median(of_kind, "seconds")
        plain = _median(found["runs"][f"plain read, {name.split(', ')[1]}"], "seconds")
        own = ["", ""]
        if "peak_bytes" in of_kind[0]:
            own = [f"{_median(of_kind, 'processor_seconds'):.1f}",
                   f"{_median(of_kind, 'peak_bytes') / MIB:.0f}"]  # fmt: skip
        cells = [name, f"{seconds:.2f}", f"{num_bytes / seconds / GB:.2f}",
                 f"{seconds / plain:.2f}", *own]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def _drop_pages(folder: Path) -> None:
    """Write the files to the disk, and drop their pages from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(folder: Path) -> float:
    """Read all weights one after the other as `cat` does; returns the seconds."""
    buffer = bytearray(READ_BYTES)
    start = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def _load_in_process(folder: Path, checkout: Path) -> dict[str, Any]:
    with _importable(checkout) as path:
        environment = {**os.environ, "PYTHONPATH": str(path), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, __file__, "--worker", "--work-dir", str(folder)]
        said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    return json.loads(said)


@contextmanager
def _importable(checkout: Path) -> Iterator[Path]:
    """Yield a folder from which Python imports the library of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "noria"
        library.mkdir()
        for room in ROOMS:
            (library / room).symlink_to((checkout / room).resolve())
        yield Path(folder)


def load(folder: Path) -> dict[str, Any]:
    """Load in this process; returns the time, the peak and the digest of all bits."""
    import jax
    import numpy as np

    from noria.compile.abstract_model import AbstractModel
    from noria.modelzoo.config import Arrangement
    from noria.runtime.checkpoint import load_params, open_model

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with open_model(folder) as model:
        abstract = AbstractModel(model.spec.config, Arrangement()).abstract_parameters("bfloat16")
        tensors = model.tensors
        _touch_memory(
            sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in abstract.values())
        )
        before = _status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # begin a new peak
        start, processor = time.perf_counter(), time.process_time()
        params = load_params(model.spec, tensors, abstract, device)
        jax.block_until_ready(params)
        seconds = time.perf_counter() - start
        processor = time.process_time() - processor
    size = sum(array.nbytes for array in params.values())
    peak = _status_bytes("VmHWM") - before - size
    digest = hashlib.sha256()
    for name in sorted(params):
        digest.update(np.asarray(params[name]).reshape(-1).view(np.uint8).data)
    return {
        "seconds": seconds,
        "processor_seconds": processor,
        "peak_bytes": peak,
        "digest": digest.hexdigest(),
    }


def _touch_memory(num_bytes: int) -> None:
    """Use as much memory as the parameters need, and free it.

    The host of a virtual machine takes back what its guest does not use. To get it again costs a
    multiple of the load, at a rate that no loader can change.
    """
    import numpy as np

    np.zeros(num_bytes, np.uint8)[:: 2**12] = 1


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"expected {key} in /proc/self/status, got none")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work-dir", type=Path, required=True, help="folder for the checkpoint, on the disk")
    add("--before", type=Path, help="checkout of a commit to compare with")
    add("--output", type=Path, help="path without suffix of .json and .md")
    add("--repeat", type=int, default=3, help="runs of each kind")
    for name, default in {
        "files": 4, "layers": 9, "embed": 4096, "mlp": 14336, "query-heads": 32, "kv-heads": 8,
        "head-dim": 128, "vocab": 4096,
    }.items():  # fmt: skip
        add(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.set_defaults(stored_dtype="bfloat16")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.worker and options.output is None:
        parser.error("--output: expected where to write, got none.")
    return options


if __name__ == "__main__":
    main()
