"""Time decode and prefill of a random Llama in transformers, compiled, with a static cache.

Runs in its own process and imports nothing from noria. It reads the options of `bench_device.py` as
JSON from stdin, and writes rows as JSON on stdout's last line. A stopping criterion that never
stops is called once a token and records the times.
"""

import json
import statistics
import sys
import time
from itertools import pairwise

import torch
import transformers


class Clock(transformers.StoppingCriteria):
    """Records the time of each token."""

    def __init__(self):
        self.times: list[float] = [_now()]

    def __call__(self, input_ids, scores, **_):
        self.times.append(_now())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def main() -> None:
    options = json.load(sys.stdin)
    model = _random_model(options, _device(options["target"]))
    rows = []
    for batch in options["batches"]:
        result = {"phase": "decode", "rows": batch, "tokens": batch}
        rows.append(result | _or_error(_decode_seconds, model, batch, options))
    result = {"phase": "prefill", "rows": 1, "tokens": options["prompt"]}
    rows.append(result | _or_error(_prefill_seconds, model, options))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"versions": versions, "rows": rows}))


def _device(target: str | None) -> str:
    if target == "tpu":
        sys.exit("torch does not run on TPU here.")
    if target == "gpu" and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device.")
    return "cuda" if target != "cpu" and torch.cuda.is_available() else "cpu"


def _random_model(options: dict, device: str):
    """Return a random Llama whose parameters are made on the device."""
    config = transformers.LlamaConfig(
        vocab_size=options["vocab"],
        hidden_size=options["embed"],
        intermediate_size=options["mlp"],
        num_hidden_layers=options["layers"],
        num_attention_heads=options["query_heads"],
        num_key_value_heads=options["kv_heads"],
        head_dim=options["head_dim"],
        max_position_embeddings=max(options["context"], options["prompt"]) + 1,
        tie_word_embeddings=False,
        dtype=options["dtype"],
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.set_default_dtype(getattr(torch, options["dtype"]))
    with torch.device(device):
        return transformers.LlamaForCausalLM(config).eval()


def _decode_seconds(model, batch: int, options: dict) -> float:
    """Return the median step near the context's end; the first two steps compile and capture."""
    steps = 8 * (1 + options["repeats"])
    _times(model, batch, options["context"] - steps, steps)
    times = _times(model, batch, options["context"] - steps, steps)
    between = [later - earlier for earlier, later in pairwise(times[1:])]
    return statistics.median(between[2:])


def _prefill_seconds(model, options: dict) -> float:
    seconds = []
    for _ in range(1 + options["repeats"]):
        times = _times(model, 1, options["prompt"], 1)
        seconds.append(times[1] - times[0])
    return statistics.median(seconds[1:])


def _times(model, batch: int, prompt: int, steps: int) -> list[float]:
    """Return the time of the start, and then of each of `steps` tokens."""
    tokens = torch.ones((batch, prompt), dtype=torch.long, device=model.device)
    clock = Clock()
    with torch.inference_mode():
        model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=steps,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation="static",
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
    return clock.times


def _or_error(measure, *arguments) -> dict:
    try:
        return {"seconds": measure(*arguments)}
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
