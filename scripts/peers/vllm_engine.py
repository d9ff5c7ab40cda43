"""Run the benchmark's prompts through vLLM's CPU build: one `LLM.generate` call with all of them.

Runs in its own process (see engine_protocol.py) and imports nothing from noria. vLLM compiles while
it loads, so `load_seconds` include compilation. The job's options go to `vllm.LLM`, except
`cache_gib`: the memory of the cache.
"""

import os
import time

from engine_protocol import finish, read_job


def main() -> None:
    job = read_job()
    options = {"max_model_len": 1024, "max_num_seqs": len(job.prompts), **job.options}
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(options.pop("cache_gib", 4))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{job.num_threads - 1}"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    import torch
    import vllm

    started = time.perf_counter()
    llm = vllm.LLM(model=job.model, **options)
    load_seconds = time.perf_counter() - started

    # ids that differ from the benchmark's, so that the prefix cache has no useful entry afterwards
    warm_up = [[1000 + token for token in range(64)] for _ in range(4)]
    started = time.perf_counter()
    _generate(llm, warm_up, [4] * len(warm_up))
    warm_up_seconds = time.perf_counter() - started

    started = time.perf_counter()
    outputs = _generate(llm, job.prompts, job.max_tokens)
    finish(
        [list(output.outputs[0].token_ids) for output in outputs],
        load_seconds=load_seconds,
        warm_up_seconds=warm_up_seconds,
        generation_seconds=time.perf_counter() - started,
        versions={"vllm": vllm.__version__, "torch": torch.__version__},
        cached_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
    )


def _generate(llm, prompts: list[list[int]], max_tokens: list[int]) -> list:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = [
        SamplingParams(temperature=0, max_tokens=number, ignore_eos=True, detokenize=False)
        for number in max_tokens
    ]
    tokens = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
    return llm.generate(tokens, params, use_tqdm=False)


if __name__ == "__main__":
    main()
