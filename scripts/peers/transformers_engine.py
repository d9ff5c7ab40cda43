"""Run the benchmark's prompts through transformers: batched greedy `generate`, sorted by length.

Runs in its own process (see engine_protocol.py) and imports nothing from noria.
"""

import time

from engine_protocol import Job, finish, read_job


def main() -> None:
    job = read_job()
    import torch
    import transformers

    torch.set_num_threads(job.num_threads)
    started = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=job.options["dtype"])
    model.eval()
    load_seconds = time.perf_counter() - started

    warm_up = Job(job.model, job.prompts[:2], [4, 4], job.num_threads, {"batch_size": 2})
    started = time.perf_counter()
    _generate(model, warm_up)
    warm_up_seconds = time.perf_counter() - started

    started = time.perf_counter()
    token_ids = _generate(model, job)
    finish(
        token_ids,
        load_seconds=load_seconds,
        warm_up_seconds=warm_up_seconds,
        generation_seconds=time.perf_counter() - started,
        versions={"transformers": transformers.__version__, "torch": torch.__version__},
    )


def _generate(model, job: Job) -> list[list[int]]:
    """Return the greedy ids of every prompt in order; batches have prompts of similar length."""
    import torch

    order = sorted(range(len(job.prompts)), key=lambda row: len(job.prompts[row]))
    token_ids: list[list[int]] = [[] for _ in job.prompts]
    batch_size = job.options["batch_size"]
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        longest = max(len(job.prompts[row]) for row in rows)
        padding = [longest - len(job.prompts[row]) for row in rows]
        ids = [[0] * pad + job.prompts[row] for pad, row in zip(padding, rows, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        with torch.inference_mode():
            output = model.generate(
                torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=job.common_max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        for row, generated in zip(rows, output[:, longest:].tolist(), strict=True):
            token_ids[row] = generated
    return token_ids


if __name__ == "__main__":
    main()
