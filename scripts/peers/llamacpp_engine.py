"""Run the benchmark's prompts through llama.cpp: parallel sequences over its batch interface.

Runs in its own process (see engine_protocol.py) and imports nothing from noria. The high-level
Python class serves one sequence, so this script calls `llama_decode` like llama.cpp's own parallel
example. All rows make the same number of tokens, so slots that start together end together, and no
slot is idle. Prompts of several rows share a call without padding.
"""

import ctypes
import time

from engine_protocol import Job, finish, read_job

TOKENS_PER_CALL = 2048


def main() -> None:
    job = read_job()
    import llama_cpp
    import numpy as np

    slots = job.options["slots"]
    started = time.perf_counter()
    context, vocab_size = _open(llama_cpp, job, slots)
    load_seconds = time.perf_counter() - started

    started = time.perf_counter()
    _generate_together(llama_cpp, np, context, vocab_size, [p[:16] for p in job.prompts[:2]], 2)
    warm_up_seconds = time.perf_counter() - started

    max_tokens = job.common_max_tokens
    order = sorted(range(len(job.prompts)), key=lambda row: len(job.prompts[row]))
    token_ids: list[list[int]] = [[] for _ in job.prompts]
    started = time.perf_counter()
    for start in range(0, len(order), slots):
        rows = order[start : start + slots]
        prompts = [job.prompts[row] for row in rows]
        generated = _generate_together(llama_cpp, np, context, vocab_size, prompts, max_tokens)
        for row, ids in zip(rows, generated, strict=True):
            token_ids[row] = ids
    finish(
        token_ids,
        load_seconds=load_seconds,
        warm_up_seconds=warm_up_seconds,
        generation_seconds=time.perf_counter() - started,
        versions={"llama-cpp-python": llama_cpp.__version__},
    )


def _open(llama_cpp, job: Job, slots: int):
    """Return a context for `slots` sequences of the longest length, and the vocabulary size."""
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(job.model.encode(), model_params)
    params = llama_cpp.llama_context_default_params()
    longest = max(len(prompt) for prompt in job.prompts) + max(job.max_tokens)
    per_slot = -(-longest // 256) * 256
    params.n_ctx = per_slot * slots
    params.n_batch = TOKENS_PER_CALL
    params.n_ubatch = job.options.get("micro_batch", 512)
    params.n_seq_max = slots
    params.n_threads = params.n_threads_batch = job.num_threads
    params.kv_unified = job.options.get("unified_cache", False)
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp could not open {job.model} with {slots} slots.")
    vocab = llama_cpp.llama_model_get_vocab(model)
    return context, llama_cpp.llama_vocab_n_tokens(vocab)


def _generate_together(llama_cpp, np, context, vocab_size, prompts, max_tokens):
    """Return the greedy ids of at most `slots` prompts that run in parallel."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
    generated: list[list[int]] = [[] for _ in prompts]
    entries = [
        (token, position, slot, position == len(prompt) - 1)
        for slot, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    for start in range(0, len(entries), TOKENS_PER_CALL):
        call = entries[start : start + TOKENS_PER_CALL]
        for slot, token in _decode(llama_cpp, np, context, vocab_size, call):
            generated[slot].append(token)
    for step in range(max_tokens - 1):
        call = [
            (generated[slot][-1], len(prompt) + step, slot, True)
            for slot, prompt in enumerate(prompts)
        ]
        for slot, token in _decode(llama_cpp, np, context, vocab_size, call):
            generated[slot].append(token)
    return generated


def _decode(llama_cpp, np, context, vocab_size, entries) -> list[tuple[int, int]]:
    """Run one call: (token, position, slot, wants output) entries in, (slot, best id) out."""
    batch = llama_cpp.llama_batch_init(len(entries), 0, 1)
    batch.n_tokens = len(entries)
    for index, (token, position, slot, wants_output) in enumerate(entries):
        batch.token[index] = token
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = slot
        batch.logits[index] = wants_output
    status = llama_cpp.llama_decode(context, batch)
    llama_cpp.llama_batch_free(batch)
    if status != 0:
        raise SystemExit(f"llama_decode: expected status 0, got {status}.")
    # the requested rows of logits are contiguous
    slots = [slot for _, _, slot, wants_output in entries if wants_output]
    if not slots:
        return []
    pointer = llama_cpp.llama_get_logits(context)
    address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
    logits = np.ctypeslib.as_array(address, shape=(len(slots), vocab_size))
    return list(zip(slots, logits.argmax(axis=-1).tolist(), strict=True))


if __name__ == "__main__":
    main()
