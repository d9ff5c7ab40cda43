"""Compare a model in bfloat16, or with weights or a cache in codes, with itself in float32.

Both run the same chat prompts on the same grid, and their probabilities and greedy tokens are
compared. The log-probabilities of prompts and of float32's
answers are compared with teacher forcing: both read the same tokens. For the answers, whole
distributions are compared, too: their Kullback-Leibler divergence from float32's, and the changed
choices. The first divergence is the first step whose greedy tokens differ. After it the two texts
differ, so later steps are not compared.

    python scripts/compare_dtypes.py --rows 24 --output benchmarks/dtypes.json
    python scripts/compare_dtypes.py --rows 16 --dtype float32 --weights int8
    python scripts/compare_dtypes.py --rows 16 --dtype float32 --cache int8
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.compile.prefill_steps import last_hidden
from noria.compile.targets import find_target
from noria.modelzoo.kv_cache import allocate
from noria.modelzoo.prompt_pieces import PromptPieces
from noria.runtime import LLM, RequestOutput, SamplingParams, session
from noria.runtime.checkpoint import open_model
from noria.runtime.devices.machine import describe_machine

PROMPTS = Path(__file__).resolve().parent.parent / "benchmarks" / "workloads" / "peers64.jsonl"
NUMBERS = REFERENCE, BFLOAT16 = Numbers("float32"), Numbers("bfloat16")
LONGEST_PROMPT = 400


def main() -> None:
    options = _parse()
    started = time.perf_counter()
    lines = options.prompts.read_text(encoding="utf-8").splitlines()[: options.rows]
    conversations = [json.loads(line)["body"]["messages"] for line in lines]
    grid = grid_of(len(lines), LONGEST_PROMPT + options.max_tokens)
    names = ("weights", "group", "cache", "activations")
    asked = {name: getattr(options, name) for name in names}
    both = REFERENCE, Numbers(options.dtype, **asked)
    reference, compared = (load(options.model, numbers, grid) for numbers in both)
    figures = compare(reference, compared, conversations, options.max_tokens)
    rows = answered(reference, conversations, options.max_tokens)
    read = (answer_logits(options.model, numbers, rows) for numbers in both)
    logits, residual = zip(*read, strict=True)
    figures |= {"residual": residual[1], "answers": distributions(*logits)}
    report = {
        "command": " ".join(["python", *sys.argv]),
        "model": options.model,
        "compared": ", ".join(map(str, both[1].to_table().values())),
        "machine": describe_machine(),
        "seconds": round(time.perf_counter() - started, 1),
        **figures,
    }
    table = markdown(report)
    print(table)
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        options.output.with_suffix(".md").write_text(table, encoding="utf-8")


def load(model: str, numbers: Numbers, grid: BucketGrid) -> LLM:
    """Load the model with these numbers."""
    return LLM(model, plan=Plan("cpu", PlannedModel(model, ""), numbers, grid))


def grid_of(rows: int, longest: int) -> BucketGrid:
    """Return the grid of both models: a slot for every row, two lengths."""
    half = longest // 2
    return BucketGrid(
        max_length=longest,
        prefill=((half, 2), (longest, 1)),
        decode_slots=rows,
        decode_spans=(half, longest),
        score=True,
    )


def compare(
    reference: LLM, compared: LLM, conversations: Sequence[Any], max_tokens: int
) -> dict[str, Any]:
    """Return all figures of two models over the same conversations, for JSON."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
    answers = [llm.chat(conversations, params) for llm in (reference, compared)]
    rows = [row.prompt_token_ids + row.outputs[0].token_ids for row in answers[0]]
    scores = [llm.score(rows, num_alternatives=2) for llm in (reference, compared)]
    return {
        "rows": len(rows),
        "prompt_tokens": sum(len(row.prompt_token_ids) for row in answers[0]),
        "output_tokens_a_row": max_tokens,
        "teacher_forced": teacher_forced(scores[0], scores[1]),
        "greedy": first_divergences(answers[0], answers[1], max_tokens),
    }


def answered(
    llm: LLM, conversations: Sequence[Any], max_tokens: int
) -> list[tuple[list[int], list[int]]]:
    """Return the ids of each prompt and of its greedy answer."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    answers = llm.chat(conversations, params)
    return [(row.prompt_token_ids, row.outputs[0].token_ids) for row in answers]


def answer_logits(
    model: str, numbers: Numbers, rows: Sequence[tuple[list[int], list[int]]]
) -> tuple[np.ndarray, str]:
    """Return the logits `[M, V]` that predict the answers' tokens, and the residual's dtype.

    Prompts are prefilled, and the answers' tokens go through decode, one after the other.
    """
    target = find_target("cpu")
    with open_model(model) as files:
        loaded = session.load_model(
            files,
            target,
            numbers.dtype,
            weight_rules=numbers.weight_rules,
            cache_codes=numbers.cache_codes,
        )
    definition, placement = loaded.definition, loaded.placement
    B, longest = len(rows), max(len(prompt) for prompt, _ in rows)
    tokens_BT = np.zeros((B, longest), np.int32)
    for row, (prompt, _) in zip(tokens_BT, rows, strict=True):
        row[: len(prompt)] = prompt
    count_B = np.array([len(prompt) for prompt, _ in rows], np.int32)
    answer_BA = np.array([answer for _, answer in rows], np.int32)
    spans, dtype = [longest + answer_BA.shape[1]], placement.cache_dtype(numbers.dtype)
    residual = []

    @jax.jit
    def logits_of(parameters, tokens_BT, count_B, answer_BA):
        decoder = definition.bind(parameters)
        cache = allocate(definition.config, B, spans, dtype, arrangement=definition.arrangement)
        pieces = PromptPieces(jnp.arange(B), None, count_B)
        x_BTD, cache, _ = decoder.prefill(tokens_BT, pieces, cache, decoder.operations)
        residual.append(str(x_BTD.dtype))

        def step(carry, token_B):
            position_B, cache = carry
            logits_BV, cache, _ = decoder.decode(token_B, position_B, cache, position_B >= 0)
            return (position_B + 1, cache), logits_BV

        first_BV = decoder.logits(last_hidden(decoder, x_BTD, count_B))
        _, logits_ABV = jax.lax.scan(step, (count_B, cache), answer_BA.T[:-1])
        return jnp.concatenate([first_BV[None], logits_ABV]).swapaxes(0, 1)

    logits_BAV = logits_of(loaded.parameters, tokens_BT, count_B, answer_BA)
    return np.asarray(logits_BAV).reshape(-1, logits_BAV.shape[-1]), residual[0]


def distributions(reference_MV: np.ndarray, compared_MV: np.ndarray) -> dict[str, Any]:
    """Compare two models' distributions of the same tokens, and count the changed choices.

    Errors are standard errors over the tokens.
    """
    p_MV, q_MV = (
        np.asarray(jax.nn.log_softmax(logits_MV.astype(np.float32)), np.float64)
        for logits_MV in (reference_MV, compared_MV)
    )
    divergence_M = np.sum(np.exp(p_MV) * (p_MV - q_MV), axis=1)
    changes_M = p_MV.argmax(axis=1) != q_MV.argmax(axis=1)
    best_M2 = np.partition(p_MV, -2, axis=1)[:, -2:]
    gaps = np.sort((best_M2[:, 1] - best_M2[:, 0])[changes_M])
    return {
        "tokens": len(divergence_M),
        "mean_kl": float(divergence_M.mean()),
        "mean_kl_error": float(divergence_M.std() / math.sqrt(len(divergence_M))),
        "max_kl": float(divergence_M.max()),
        "greedy_agreement": float(1 - changes_M.mean()),
        "greedy_agreement_error": float(changes_M.std() / math.sqrt(len(changes_M))),
        "gaps_of_changed_choices": gaps.round(4).tolist(),
    }


def teacher_forced(
    reference: Sequence[RequestOutput], compared: Sequence[RequestOutput]
) -> dict[str, float]:
    """Compare the log-probabilities of the same tokens, and how often the best tokens agree."""
    pairs = [
        pair
        for a, b in zip(reference, compared, strict=True)
        for pair in zip(_scores(a), _scores(b), strict=True)
    ]
    signed = np.array([b.logprob - a.logprob for a, b in pairs])
    size = np.abs(signed)
    agrees = np.array([a.top[0][0] == b.top[0][0] for a, b in pairs])
    gaps = np.array([_gap(a) for a, _ in pairs])
    return {
        "tokens": len(pairs),
        "mean": float(size.mean()),
        "median": float(np.median(size)),
        "p99": float(np.quantile(size, 0.99)),
        "max": float(size.max()),
        "mean_signed": float(signed.mean()),
        "best_token_agreement": float(agrees.mean()),
        "widest_gap_of_a_changed_best_token": float(gaps[~agrees].max(initial=0.0)),
    }


def first_divergences(
    reference: Sequence[RequestOutput], compared: Sequence[RequestOutput], max_tokens: int
) -> dict[str, Any]:
    """Return the share of equal rows by number of steps, and the gaps at the divergences."""
    steps: list[int | None] = []
    gaps = []
    for a, b in zip(reference, compared, strict=True):
        ours, theirs = a.outputs[0], b.outputs[0]
        pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
        step = next((step for step, (x, y) in enumerate(pairs) if x != y), None)
        steps.append(step)
        if step is not None:
            assert ours.logprobs is not None
            gaps.append(_gap(ours.logprobs[step]))
    equal = {
        count: sum(step is None or step >= count for step in steps) / len(steps)
        for count in _powers_of_two(max_tokens)
    }
    compared_steps = sum(max_tokens if step is None else step + 1 for step in steps)
    return {
        "first_divergence_steps": steps,
        "rows_equal_after": equal,
        "divergences_a_step": len(gaps) / compared_steps,
        "median_gap_at_divergence": float(np.median(gaps)) if gaps else None,
        "widest_gap_at_divergence": max(gaps, default=None),
    }


def markdown(report: dict[str, Any]) -> str:
    """Return the report as two short tables."""
    forced, greedy = report["teacher_forced"], report["greedy"]
    machine = report["machine"]
    names = ("mean", "median", "p99", "max", "mean_signed")
    equal, answers = greedy["rows_equal_after"], report["answers"]
    lines = [
        f"# {report['model']}: {report['compared']} against {REFERENCE.dtype}",
        "",
        f"{report['rows']} chat prompts ({report['prompt_tokens']} tokens), "
        f"{report['output_tokens_a_row']} greedy tokens each; {machine['processor']}, "
        f"jax {machine['versions']['jax']}. Made by `{report['command']}`.",
        "",
        f"Teacher-forced log-probabilities of {forced['tokens']} tokens: absolute difference "
        "(the last column signed), and how often the best token is the same.",
        "",
        "| mean | median | p99 | max | mean, signed | same best token |",
        "|--:|--:|--:|--:|--:|--:|",
        f"| {' | '.join(f'{forced[name]:.4f}' for name in names)} "
        f"| {forced['best_token_agreement']:.2%} |",
        "",
        f"Over the {answers['tokens']} tokens of float32's answers, with a residual stream of "
        f"{report['residual']}: mean Kullback-Leibler divergence {answers['mean_kl']:.5f} ± "
        f"{answers['mean_kl_error']:.5f} (largest {answers['max_kl']:.4f}), the same choice in "
        f"{answers['greedy_agreement']:.2%} ± {answers['greedy_agreement_error']:.2%}. Where it "
        f"changes, {REFERENCE.dtype}'s best two log-probabilities differ by at most "
        f"{max(answers['gaps_of_changed_choices'], default=0):.3f}.",
        "",
        "Share of rows whose greedy tokens are still equal, by number of steps:",
        "",
        f"| {' | '.join(map(str, equal))} |",
        f"|{'--:|' * len(equal)}",
        f"| {' | '.join(f'{share:.0%}' for share in equal.values())} |",
        "",
        f"First divergences a step: {greedy['divergences_a_step']:.2%}.",
    ]
    if greedy["widest_gap_at_divergence"] is not None:
        lines[-1] += (
            f" There {REFERENCE.dtype}'s best two log-probabilities differ by "
            f"{greedy['median_gap_at_divergence']:.3f} (median) and at most "
            f"{greedy['widest_gap_at_divergence']:.3f}."
        )
    return "\n".join(lines) + "\n"


def _scores(output: RequestOutput):
    assert output.prompt_logprobs is not None, output.error
    return output.prompt_logprobs[1:]


def _gap(score) -> float:
    """Return the log-probability of the best token minus that of the second."""
    return score.top[0][1] - score.top[1][1]


def _powers_of_two(largest: int) -> list[int]:
    return [*(2**n for n in range(largest.bit_length()) if 2**n < largest), largest]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="OpenAI Batch chat lines")
    parser.add_argument("--rows", type=int, default=24, help="number of prompts (24)")
    parser.add_argument("--max-tokens", type=int, default=64, help="greedy tokens of a row (64)")
    parser.add_argument("--dtype", default=BFLOAT16.dtype, help="dtype to compare (bfloat16)")
    parser.add_argument("--weights", default="float", help="format of weights to compare (float)")
    parser.add_argument("--group", type=int, default=0, help="input features that share a scale")
    parser.add_argument("--cache", default="float", help="format of cache to compare (float)")
    parser.add_argument("--activations", default="float", help="activations to compare (float)")
    parser.add_argument("--output", type=Path, help="JSON file; a table (.md) is written, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
