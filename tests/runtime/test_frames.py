"""The functions between a command and the device, and between a graph's body and its softmax.

They are what a reader must go through, so their number has an upper bound that only shrinks, and
docs/architecture.md lists them.
"""

import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from model_on_disk import write_model
from tiny import CONFIG

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import plan_graphs
from noria.compile.compiled_graphs import CompiledGraphs
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.targets import find_target
from noria.runtime.cli import main

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("modelzoo", "sharding", "compile", "runtime")
MAX_FRAMES = {"From the command to the device": 10, "From a decode step to the softmax": 8}
"""Upper bounds for the number of functions, by the heading of their list in the page."""
GRID = BucketGrid(64, ((48, 1),), 4)
SIZES = "buckets.max_length=32", "buckets.decode_slots=1"


def library_frames() -> list[str]:
    """Return the functions of the library that have not returned, the outermost first."""
    frame, found = sys._getframe(), []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FLOORS:
            name = frame.f_code.co_qualname.replace(".<locals>", "")
            found.append(f"{name} {path.relative_to(ROOT).as_posix()}")
        frame = frame.f_back
    return found[::-1]


def listed(heading: str) -> list[str]:
    """Return the functions that the page lists below a heading."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    (block,) = re.findall(rf"^### {heading}\n.*?```text\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    return [" ".join(line.split()[1:]) for line in block.splitlines()]


def check(heading: str, frames: list[str]) -> None:
    """Compare the functions with the list of the page and with the upper bound."""
    width = max(len(frame.split()[0]) for frame in frames)
    rows = enumerate((frame.split() for frame in frames), start=1)
    shown = "\n".join(f"{number:2} {name:{width}} {path}" for number, (name, path) in rows)
    files = {frame.split()[1] for frame in frames}
    print(f"### {heading}: {len(frames)} functions in {len(files)} files\n{shown}")
    assert listed(heading) == frames, shown
    assert len(frames) <= MAX_FRAMES[heading], shown


def test_few_functions_lie_between_the_command_and_the_device(tmp_path, monkeypatch):
    write_model(tmp_path / "model")
    rows, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows.write_text(json.dumps({"prompt": [5, 6, 7], "max_tokens": 2}) + "\n")
    stacks, executable = [], CompiledGraphs.executable

    def recording(graphs, key):
        compiled = executable(graphs, key)

        def call(*arguments):
            if key.kind == "decode":
                stacks.append(library_frames())
            return compiled(*arguments)

        return call

    monkeypatch.setattr(CompiledGraphs, "executable", recording)
    options = [word for size in SIZES for word in ("--set", size)]
    paths = ["-i", str(rows), "-o", str(output), "--model", str(tmp_path / "model")]
    assert main(["batch", *paths, "--target", "cpu", "--quiet", *options]) == 0
    assert stacks and all(stack == stacks[0] for stack in stacks)
    check("From the command to the device", stacks[0])


def test_few_functions_lie_between_a_decode_step_and_the_softmax(monkeypatch):
    stacks, exp = [], jnp.exp

    def recording(x):
        frames = library_frames()
        if frames[-1].split()[1].startswith("modelzoo/attention/"):
            names = [frame.split()[0] for frame in frames]
            stacks.append(frames[names.index("decode_step") + 1 :])
        return exp(x)

    monkeypatch.setattr(jnp, "exp", recording)
    placement = find_target("cpu").placement()
    graphs = plan_graphs(AbstractModel(CONFIG), GRID, placement, jnp.dtype(jnp.float32))
    graph = next(graph for graph in graphs if graph.key.kind == "decode")
    jax.eval_shape(graph.body, *graph.arguments)
    check("From a decode step to the softmax", stacks[0])
