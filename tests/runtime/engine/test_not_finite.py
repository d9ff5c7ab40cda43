"""Rows with NaN do not affect the next rows in their slots."""

from dataclasses import replace

import numpy as np
import pytest
from alike import alike, changed
from tiny import EOS_ID, GRID, TWO_LAYERS, TinyModel, prompts
from unoptimized import set_optimized

from noria.runtime.engine import generation
from noria.runtime.request import Request, SamplingParams
from noria.runtime.text.detokenizer import TextCollector

SHORT_CHUNKS = replace(GRID, prefill=((64, 2, 4),), pages=14)
LONG_CHUNKS = replace(GRID, prefill=((64, 2, 16),), row_tokens=16)
IN_WINDOWS = changed(TWO_LAYERS, windows=(7, 7))
MODELS = {
    "whole": (TWO_LAYERS, GRID),
    "short chunks in few pages": (TWO_LAYERS, SHORT_CHUNKS),
    "long chunks in windows": (IN_WINDOWS, LONG_CHUNKS),
}
OPTIMIZED = {"long chunks in windows"}
"""Models with optimized programs in every run. The others have them with `--slow`;
test_generation.py has a row with NaN in optimized programs for whole prompts."""
STEPS = GRID.steps_per_call
MOST_OF_POISONED = 9


@pytest.fixture(scope="module", params=MODELS)
def model(request, optimizes: bool) -> TinyModel:
    set_optimized(optimizes or request.param in OPTIMIZED)
    return TinyModel(*MODELS[request.param])


def healthy_requests() -> list[Request]:
    """Return short rows, which overwrite little, and rows of several chunks."""
    greedy = SamplingParams(
        temperature=0, max_tokens=14, logprobs=2, prompt_logprobs=1, ignore_eos=True
    )
    rows = prompts(12, seed=3, longest=6) + prompts(6, seed=4, longest=30)
    return [Request(f"row-{i}", row, replace(greedy, n=1 + i % 2)) for i, row in enumerate(rows)]


@pytest.fixture(scope="module")
def healthy(model) -> dict:
    """The outputs of these rows when no row has NaN."""
    return outputs_of(model.generator(), healthy_requests())


def outputs_of(generator, requests: list[Request]) -> dict:
    for request in requests:
        generator.submit(request)
    return {output.request_id: output for output in generator.run()}


def met_by(healthy: dict) -> set[int]:
    """Return the tokens that the healthy rows read or choose."""
    prompted = {token for output in healthy.values() for token in output.prompt_token_ids}
    chosen = (o.token_ids for output in healthy.values() for o in output.outputs)
    return prompted.union(*chosen)


def check_others(model: TinyModel, healthy: dict, token: int, poisoned: list[Request]) -> dict:
    """Run healthy rows after rows with the token, whose embedding is NaN; return the latter's.

    Every healthy row must have the same bits as without the others.
    """
    table = model.parameters["embedding.table"].at[token].set(np.nan)
    generator = model.generator(parameters=model.parameters | {"embedding.table": table})
    outputs = outputs_of(generator, poisoned)
    for name, output in outputs_of(generator, healthy_requests()).items():
        assert output.error is None, name
        assert output.outputs == healthy[name].outputs
        assert output.prompt_logprobs == healthy[name].prompt_logprobs
    return outputs


KINDS = {
    "one sequence": SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
    "copied": SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, n=4),
    "scored": SamplingParams(max_tokens=0, prompt_logprobs=0),
}


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_prompts_leave_nothing(model, healthy, params):
    """Prompts of every length, with NaN at the first token, in the middle or at the last token."""
    token = max(set(range(3, TWO_LAYERS.vocab_size)) - met_by(healthy))
    poisoned = []
    for length in (14, 30, 40, 13, 24, 46):
        for at in (0, length // 2, length - 1):
            prompt = [5] * length
            prompt[at] = token
            poisoned.append(Request(f"poisoned-{length}-{at}", prompt, params))
    outputs = check_others(model, healthy, token, poisoned)
    errors = [output.error.code for output in outputs.values() if output.error]
    assert set(errors) == {"nonfinite_logits"}
    if None in alike(model.config).windows and params.max_tokens:
        # results after a NaN's window, or scores before the NaN, may be finite
        assert len(errors) == len(poisoned)


@pytest.fixture(scope="module")
def chooses(model, healthy) -> tuple[list[int], int]:
    """A prompt, and the token of its row in the last step of the first call."""
    met = met_by(healthy) | {EOS_ID}
    for prompt in prompts(400, seed=7, longest=11):
        *others, token = model.greedy(prompt, STEPS)
        if len(others) == STEPS - 1 and token not in met.union(prompt, others):
            return prompt, token
    raise AssertionError("no row chooses a token that no other one meets")


class StopsAfterOneCall(TextCollector):
    """Finds a stop string in the last token of the first call, in rows that meet NaN."""

    @property
    def may_stop(self) -> bool:
        return self._params.max_tokens == MOST_OF_POISONED

    def push(self, ids, *, ends_with_stop_token=False) -> bool:
        if not self.may_stop:
            return super().push(ids, ends_with_stop_token=ends_with_stop_token)
        self.num_tokens_kept, self.stop_reason = len(ids), "found"
        return True


@pytest.mark.parametrize("ending", ["NaN", "limit", "stop id", "stop string"])
@pytest.mark.parametrize("n", [1, 4])
def test_decode_leaves_nothing_however_the_row_ends(
    model, healthy, chooses, ending, n, monkeypatch
):
    """The last step of a call writes NaN; a row that continues reads it in the next call."""
    prompt, token = chooses
    params = SamplingParams(
        temperature=0,
        ignore_eos=True,
        n=n,
        max_tokens=STEPS if ending == "limit" else MOST_OF_POISONED,
        stop_token_ids=[token] if ending == "stop id" else [],
    )
    poisoned = [Request(f"poisoned-{i}", prompt, params) for i in range(8)]
    if ending == "stop string":
        monkeypatch.setattr(generation, "TextCollector", StopsAfterOneCall)
    for output in check_others(model, healthy, token, poisoned).values():
        if ending == "NaN":
            assert output.error.code == "nonfinite_logits"
            continue
        assert output.error is None
        assert {completion.token_ids[-1] for completion in output.outputs} == {token}
        assert {len(completion.token_ids) for completion in output.outputs} == {STEPS}
