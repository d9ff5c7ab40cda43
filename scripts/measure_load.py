"""Compare the host memory of each loading process with the bytes of its share of the weights.

Writes a random checkpoint of Llama's shape into a temporary folder, in several files with an index,
and loads it in several processes over one mesh that splits every matrix. On the CPU the arrays are
host memory, so a process may hold its own shards once, and little else. The measure is anonymous
memory (RssAnon), as the system can drop pages of mapped files at any time. Another process reads it
about every two milliseconds: a thread of the same process could not run while the interpreter is
locked. The share is the bytes of the process's shards, replicated shards included.

    python scripts/measure_load.py
    python scripts/measure_load.py --dtype bfloat16 --devices 2
    python scripts/measure_load.py --stored-dtype float8

Exits with 1 if a process's peak exceeds BOUND_RATIO times its share plus BOUND_BYTES.
"""

import argparse
import json
import math
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BOUND_RATIO = 1.3
BOUND_BYTES = 16 * 2**20
"""Allowance for tensor pieces during loading, and for the runtime's memory besides arrays."""
CHUNK_ELEMENTS = 2**20
STORED_AS = {"float32": "F32", "bfloat16": "BF16", "float8": "F8_E4M3"}
FLOAT8_BLOCK = 128
SAMPLE_SECONDS = 0.002
MIB = 2**20

Stored = tuple[tuple[int, ...], str]
"""Shape and dtype of a tensor in the file."""


def main() -> None:
    options = _parse()
    if options.worker is not None:
        load_in_worker(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = write_checkpoint(Path(folder), options)
        rows = measure(Path(folder), options)
    print(
        f"checkpoint of {num_bytes / MIB:.0f} MiB in {options.stored_dtype}, loaded as "
        f"{options.dtype} by {options.processes} processes of {options.devices} device(s)\n"
    )
    print(table(rows))
    if any(row.peak_bytes > row.bound_bytes for row in rows):
        sys.exit(f"expected at most {BOUND_RATIO} shares and {BOUND_BYTES // MIB} MiB, got more")


@dataclass(frozen=True)
class Row:
    """The memory, bytes read and time of one process."""

    share_bytes: int
    peak_bytes: int
    read_bytes: int
    seconds: float

    @property
    def bound_bytes(self) -> float:
        return BOUND_RATIO * self.share_bytes + BOUND_BYTES


def table(rows: list[Row]) -> str:
    """Return a Markdown table with a line for each process."""
    lines = [
        "| process | share MiB | peak MiB | peak / share | bound MiB | read MiB | seconds |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for number, row in enumerate(rows):
        sizes = (row.share_bytes, row.peak_bytes, row.bound_bytes, row.read_bytes)
        share, peak, bound, read = (f"{size / MIB:.1f}" for size in sizes)
        ratio = row.peak_bytes / row.share_bytes
        lines.append(
            f"| {number} | {share} | {peak} | {ratio:.2f} | {bound} | {read} | {row.seconds:.2f} |"
        )
    return "\n".join(lines)


def write_checkpoint(folder: Path, options: argparse.Namespace) -> int:
    """Write config.json and random tensors over several files; return the bytes of the tensors."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": options.vocab,
        "hidden_size": options.embed,
        "intermediate_size": options.mlp,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.query_heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    if options.stored_dtype == "float8":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "weight_block_size": [FLOAT8_BLOCK, FLOAT8_BLOCK],
        }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = [
        stored
        for name, shape in _tensors(options)
        for stored in _stored(name, shape, options.stored_dtype)
    ]
    per_file = math.ceil(len(tensors) / options.files)
    weight_map = {}
    for number in range(options.files):
        held = dict(tensors[number * per_file : (number + 1) * per_file])
        name = f"model-{number + 1:05}-of-{options.files:05}.safetensors"
        weight_map |= dict.fromkeys(held, name)
        _write_safetensors(folder / name, held, seed=number)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return sum(math.prod(shape) * _dtype(kind).itemsize for _, (shape, kind) in tensors)


def _tensors(options: argparse.Namespace) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes, in the order of a published checkpoint."""
    D, F, V = options.embed, options.mlp, options.vocab
    queries, keys = (n * options.head_dim for n in (options.query_heads, options.kv_heads))
    yield "model.embed_tokens.weight", (V, D)
    for i in range(options.layers):
        for name, shape in {
            "input_layernorm": (D,),
            "self_attn.q_proj": (queries, D),
            "self_attn.k_proj": (keys, D),
            "self_attn.v_proj": (keys, D),
            "self_attn.o_proj": (D, queries),
            "post_attention_layernorm": (D,),
            "mlp.gate_proj": (F, D),
            "mlp.up_proj": (F, D),
            "mlp.down_proj": (D, F),
        }.items():
            yield f"model.layers.{i}.{name}.weight", shape
    yield "model.norm.weight", (D,)
    yield "lm_head.weight", (V, D)


def _stored(name: str, shape: tuple[int, ...], dtype: str) -> Iterator[tuple[str, Stored]]:
    """Yield the stored tensors of one tensor: for float8, projections also have scales."""
    if dtype != "float8":
        yield name, (shape, dtype)
    elif "_proj" not in name:
        yield name, (shape, "float32")
    else:
        yield name, (shape, "float8")
        yield f"{name}_scale_inv", (tuple(-(-n // FLOAT8_BLOCK) for n in shape), "float32")


def _write_safetensors(path: Path, tensors: dict[str, Stored], seed: int) -> None:
    """Write one file piece by piece: the header's length, the header, the numbers."""
    header, offset = {}, 0
    for name, (shape, kind) in tensors.items():
        stop = offset + math.prod(shape) * _dtype(kind).itemsize
        header[name] = {"dtype": STORED_AS[kind], "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape, kind in tensors.values():
            size = math.prod(shape)
            for start in range(0, size, CHUNK_ELEMENTS):
                count = min(CHUNK_ELEMENTS, size - start)
                file.write(rng.random(count, np.float32).astype(_dtype(kind)).tobytes())


def measure(folder: Path, options: argparse.Namespace) -> list[Row]:
    """Load in all processes at once, and sample their memory until the last one has loaded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = [Worker(folder, options, number, port) for number in range(options.processes)]
    try:
        for worker in workers:
            worker.answer()  # everything is ready to load
        before = [worker.anonymous_bytes() for worker in workers]
        for worker in workers:
            worker.tell("load")
        rows = _watch(workers, before)
        for worker in workers:
            worker.tell("end")  # tell all before the first wait: each waits for the others, too
        for worker in workers:
            worker.process.wait()
    finally:
        for worker in workers:
            worker.process.kill()
    return rows


def _watch(workers: list["Worker"], before: list[int]) -> list[Row]:
    """Sample the memory of all processes until the last one has answered."""
    peaks, rows = list(before), dict[int, Row]()
    while len(rows) < len(workers):
        for number, worker in enumerate(workers):
            peaks[number] = max(peaks[number], worker.anonymous_bytes())
        waiting = {w.stdout: n for n, w in enumerate(workers) if n not in rows}
        for pipe in select.select(list(waiting), [], [], SAMPLE_SECONDS)[0]:
            number = waiting[pipe]
            peak = peaks[number] - before[number]
            rows[number] = Row(peak_bytes=peak, **workers[number].answer())
    return [rows[number] for number in range(len(workers))]


class Worker:
    """A process that loads, with pipes: words to its stdin, lines of JSON from its stdout."""

    def __init__(self, folder: Path, options: argparse.Namespace, number: int, port: int):
        flags = f"--xla_force_host_platform_device_count={options.devices}"
        environment = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "XLA_FLAGS": flags}
        command = [sys.executable, __file__, "--worker", str(number), "--folder", str(folder)]
        command += ["--port", str(port), "--dtype", options.dtype]
        command += ["--processes", str(options.processes)]
        self.process = subprocess.Popen(
            command,
            env=os.environ | environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def tell(self, word: str) -> None:
        self.stdin.write(f"{word}\n")
        self.stdin.flush()

    def answer(self) -> Any:
        line = self.stdout.readline()
        if not line:
            raise RuntimeError("expected an answer from each process, but one ended: see above.")
        return json.loads(line)

    def anonymous_bytes(self) -> int:
        """Return the resident memory that no file backs."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        for line in status.splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("expected RssAnon in each process's status, but one ended.")


def load_in_worker(options: argparse.Namespace) -> None:
    """Load this process's shards on a signal, and print their memory and time."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{options.port}", options.processes, options.worker)

    from noria.compile.abstract_model import AbstractModel
    from noria.modelzoo.config import Arrangement
    from noria.modelzoo.families.config_reader import ConfigReader
    from noria.modelzoo.families.quantisation import read_quantisation
    from noria.runtime.checkpoint import load_params, open_model
    from noria.runtime.checkpoint.formats.dequantised_tensors import dequantise

    n = jax.device_count()
    with open_model(options.folder) as model:
        config = model.spec.config
        arrangement = Arrangement(head_shards=n, padded_vocab=-(-config.vocab_size // n) * n)
        abstract = AbstractModel(config, arrangement).abstract_parameters(options.dtype)
        placed = shardings(abstract)
        counted = Counted(model.stored_tensors)
        tensors = dequantise(counted, read_quantisation(ConfigReader(model.published_config)))
        print(json.dumps("ready"), flush=True)
        sys.stdin.readline()

        start = time.perf_counter()
        params = load_params(model.spec.arranged(arrangement), tensors, abstract, placed)
        jax.block_until_ready(params)
        seconds = time.perf_counter() - start
    share = sum(s.data.nbytes for array in params.values() for s in array.addressable_shards)
    answer = {"share_bytes": share, "read_bytes": counted.num_bytes, "seconds": seconds}
    print(json.dumps(answer), flush=True)
    sys.stdin.readline()


def shardings(abstract: Any) -> dict[str, Any]:
    """Split heads, MLP and vocabulary over all devices of all processes; replicate norms."""
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("tensor",), (AxisType.Auto,))
    specs = {
        "table": PartitionSpec("tensor", None),
        "qkv": PartitionSpec(None, "tensor"),
        "output": PartitionSpec("tensor"),
        "gate_up": PartitionSpec(None, None, "tensor"),
        "down": PartitionSpec("tensor", None),
        "scale": PartitionSpec(),
    }
    return {name: NamedSharding(mesh, specs[name.split(".")[-1]]) for name in abstract}


class Counted:
    """A tensor source that counts the bytes it read."""

    def __init__(self, source: Any):
        self.source, self.tensors, self.num_bytes = source, source.tensors, 0

    def read(self, name: str, index: Any = None) -> np.ndarray:
        array = self.source.read(name, index)
        self.num_bytes += array.nbytes
        return array


def _dtype(name: str) -> np.dtype:
    import ml_dtypes

    kinds = {"bfloat16": ml_dtypes.bfloat16, "float8": ml_dtypes.float8_e4m3fn}
    return np.dtype(kinds.get(name, np.float32))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "processes": 4, "devices": 1, "files": 5, "layers": 8, "embed": 1024, "mlp": 2816,
        "query-heads": 16, "kv-heads": 2, "head-dim": 64, "vocab": 12007,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--stored-dtype", choices=tuple(STORED_AS), default="float32")
    for name in ("worker", "port"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
