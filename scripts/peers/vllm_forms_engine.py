"""Run rows that ask for answers of a form through vLLM's CPU build, in one `LLM.generate` call.

Runs in its own process and imports nothing from noria:

    python vllm_forms_engine.py JOB.json RESULT.json

The job has the keys `model`, `prompts` (lists of ids), `forms` (the fields of vLLM's
`StructuredOutputsParams`, or null), `temperatures`, `max_tokens` (one number), `num_threads` and
`options` of `vllm.LLM`. An end token ends an answer, and row i has seed i.
"""

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "4"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{job['num_threads'] - 1}"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    import vllm
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams

    started = time.perf_counter()
    llm = vllm.LLM(model=job["model"], **job["options"])
    load_seconds = time.perf_counter() - started
    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=job["max_tokens"],
            structured_outputs=StructuredOutputsParams(**form) if form else None,
        )
        for seed, (form, temperature) in enumerate(
            zip(job["forms"], job["temperatures"], strict=True)
        )
    ]
    warm_up = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate([TokensPrompt(prompt_token_ids=list(range(1000, 1064)))], warm_up, use_tqdm=False)

    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in job["prompts"]]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    result = {
        "load_seconds": round(load_seconds, 3),
        "generation_seconds": round(time.perf_counter() - started, 3),
        "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "texts": [output.outputs[0].text for output in outputs],
        "finish_reasons": [output.outputs[0].finish_reason for output in outputs],
        "versions": {"vllm": vllm.__version__},
    }
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
