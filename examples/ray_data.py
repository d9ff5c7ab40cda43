"""Answer the rows of a Ray dataset with noria, one engine in each actor.

    pip install 'ray[data]'
    python examples/ray_data.py in.parquet answers --model smollm2 --actors 2

The table has the columns `id` and `prompt`. Ray gives each batch to one of the actors. If an actor
dies, Ray starts another one and gives it the batches that were not finished, so every row is in the
result once. The seed of a row is a hash of its id, so a row that runs again has the same answer.
"""

import argparse
import hashlib
from typing import Any

from noria.runtime import LLM, SamplingParams


class Answerer:
    """An actor with an engine of its own, which is built once.

    Args:
        model: The model, as in `LLM`.
        max_tokens: The largest number of tokens of an answer.
        temperature: The temperature of all rows; 0 is greedy.
        options: Keyword arguments of `LLM`. Give the dtype: the default is the faster one, which
            differs by machine.
    """

    def __init__(
        self, model: str, *, max_tokens: int = 64, temperature: float = 0.0, **options: Any
    ):
        self._llm = LLM(model, **options)
        self._sampling = {"max_tokens": max_tokens, "temperature": temperature}

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answer a batch of rows; all of them are one submission."""
        ids = [str(name) for name in batch["id"]]
        params = [SamplingParams(seed=seed_of(name), **self._sampling) for name in ids]
        outputs = self._llm.generate([str(prompt) for prompt in batch["prompt"]], params)
        return {
            "id": ids,
            "answer": [output.outputs[0].text for output in outputs],
            "finish_reason": [output.outputs[0].finish_reason for output in outputs],
        }


def seed_of(name: str) -> int:
    """The seed of a row, whichever actor runs it."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1


def answered(
    rows: Any, actors: int, rows_of_call: int, cls: type = Answerer, **options: Any
) -> Any:
    """The dataset of the answers to a dataset of rows.

    Large calls keep the slots of an engine busy; a call ends when its last row has ended.
    """
    import ray.data

    return rows.map_batches(
        cls,
        fn_constructor_kwargs=options,
        batch_size=rows_of_call,
        compute=ray.data.ActorPoolStrategy(size=actors),
        # an actor that dies is started again, and its calls too
        max_restarts=-1,
        max_task_retries=-1,
    )


def main() -> None:
    """Answer a Parquet table."""
    import ray.data

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="Parquet table with the columns id and prompt")
    parser.add_argument("output", help="folder for the answers, as Parquet files")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--rows-of-call", type=int, default=256)
    options = parser.parse_args()
    rows = ray.data.read_parquet(options.source)
    answers = answered(
        rows, options.actors, options.rows_of_call, model=options.model, dtype="float32"
    )
    answers.write_parquet(options.output)


if __name__ == "__main__":
    main()
