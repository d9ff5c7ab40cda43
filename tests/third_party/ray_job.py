"""Run the actors of `examples/ray_data.py` on a local cluster, and kill one of them.

`ray_job.py MODEL OUTPUT MARKS` writes the answers of 500 rows to `out.jsonl` in the folder OUTPUT,
and the answers of a single engine to `expected.jsonl`. The folder MARKS gets one file for each
actor, and one for the kill. This is a program because Ray pickles the classes of a program by
value.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import ray
import ray.data
from ray_data import Answerer, answered

NUM_ROWS = 500
WORDS = ["wheel", "water", "turns", "bucket", "stream"]


class MortalAnswerer(Answerer):
    """An actor; the first one that comes to its third call sends itself SIGKILL."""

    def __init__(self, model: str, folder: str, **options):
        super().__init__(model, **options)
        self._folder, self._num_calls = Path(folder), 0
        (self._folder / f"engine-{os.getpid()}").touch()

    def __call__(self, batch):
        self._num_calls += 1
        if self._num_calls == 3:
            try:
                (self._folder / "killed").open("x").close()
            except FileExistsError:
                return super().__call__(batch)
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return super().__call__(batch)


def main(model: str, output: str, folder: str) -> None:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=2**28)
    rows = [
        {"id": f"row-{i}", "prompt": f"{WORDS[i % 5]} {i} {WORDS[i % 3]}"} for i in range(NUM_ROWS)
    ]
    dataset = ray.data.from_items(rows, override_num_blocks=20)
    options = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 8, "max_tokens": 8}
    options |= {"temperature": 0.8}
    answers = answered(dataset, 2, 25, MortalAnswerer, model=model, folder=folder, **options)
    write(Path(output, "out.jsonl"), answers.take_all())
    ray.shutdown()
    columns = {key: [row[key] for row in rows] for key in ("id", "prompt")}
    expected = Answerer(model, **options)(columns)
    answers = zip(expected["id"], expected["answer"], strict=True)
    write(Path(output, "expected.jsonl"), [{"id": name, "answer": text} for name, text in answers])


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
