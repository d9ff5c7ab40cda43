"""Measure decode steps of the embedded model with adapters for each row, and without.

    python scripts/adapter_speed.py --adapters 4 --rank 16 --slots 16

The adapters are random, for all linear modules. A model without adapters decodes some rows. Then a
model with adapters decodes the same rows twice: once no row uses an adapter, and once the rows use
all of them. The three runs are repeated several times in turn, and the median milliseconds of a
step are printed.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.modelzoo.families.registry import hugging_face_form
from noria.runtime import LLM, SamplingParams
from noria.runtime.adapters.merged_model import PublishedTensors
from noria.runtime.checkpoint import open_model

MODEL = "smollm2"
IDS = (10, 40_000)
"""Range of the ids of prompts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = [f"a{i}" for i in range(options.adapters)]
        adapters = {name: write_adapter(Path(folder) / name, options.rank) for name in names}
        grid = BucketGrid(128, ((16, 4),), options.slots)
        plan = Plan("cpu", PlannedModel(MODEL, ""), Numbers(options.dtype), grid)
        with LLM(MODEL, plan=plan) as without, LLM(MODEL, plan=plan, adapters=adapters) as mixed:
            owners = [[None, *names][i % (len(names) + 1)] for i in range(options.slots)]
            runs = {"none": (without, None), "no row uses one": (mixed, None)}
            runs["rows use all of them"] = mixed, owners
            measure(runs, options)


def measure(runs: dict, options: argparse.Namespace) -> None:
    """Print the milliseconds of a decode step of each run."""
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    prompts = np.random.default_rng(0).integers(*IDS, (options.slots, 16)).tolist()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 + options.repeats):
        for name, (llm, adapter) in runs.items():
            before = decode_use(llm)
            llm.generate(prompts, params, adapter=adapter)
            seconds, steps = np.subtract(decode_use(llm), before)
            taken[name].append(1000 * seconds / steps)
    for name, milliseconds in taken.items():
        # the first run of each warms up
        print(f"{name}: {statistics.median(milliseconds[1:]):.1f} ms a step")


def decode_use(llm: LLM) -> tuple[float, int]:
    """Return the seconds and the steps of all decode calls so far."""
    use = llm._generator.metrics.decode
    return use.seconds, use.steps


def write_adapter(folder: Path, rank: int) -> Path:
    """Write a random adapter for all linear modules of the layers; return its folder."""
    rng, tensors = np.random.default_rng(rank), {}
    with open_model(MODEL) as files:
        published = hugging_face_form(files.spec).sources
        shapes = PublishedTensors(files.tensors, files.spec.sources, published).tensors
        for name, info in shapes.items():
            if len(info.shape) == 1 or "layers" not in name:
                continue
            beginning = f"base_model.model.{name.removesuffix('.weight')}.lora"
            rows, columns = info.shape
            for end, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                random = rng.standard_normal(shape, np.float32)
                tensors[f"{beginning}_{end}.weight"] = 0.02 * random
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    main()
