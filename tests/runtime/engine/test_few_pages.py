"""Rows in few pages have every bit that they have in another plan, with enough pages.

`test_generation` compares rows with and without neighbours in one plan in every run.
"""

from dataclasses import replace

import pytest
from tiny import FEW_PAGES_CHUNK_GRID, TWO_LAYERS, TinyModel, prompts

from noria.compile.grids.bucket_grid import BucketGrid
from noria.runtime.request import Request, SamplingParams

FEW = replace(FEW_PAGES_CHUNK_GRID, score=False)
ENOUGH = replace(FEW, pages=FEW.decode_slots * 8)


def requests() -> list[Request]:
    """Return rows of one and of several samples, whose limits are above most outputs."""
    return [
        Request(
            f"row-{i}",
            prompt,
            SamplingParams(
                temperature=0.8 * (i % 3),
                max_tokens=16 + i % 9,
                logprobs=2,
                n=1 + (i % 4 == 1),
                stop_token_ids=range(3, 3 + i % 5),
            ),
        )
        for i, prompt in enumerate(prompts(20, seed=31))
    ]


def run(model: TinyModel, requests: list[Request]):
    generator, waiting, outputs = model.generator(), list(requests), {}
    while waiting or generator.unfinished:
        while waiting and generator.wants_more:
            generator.submit(waiting.pop(0))
        outputs |= {output.request_id: output.outputs for output in generator.step()}
    return outputs, generator.metrics.pages


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_rows_have_the_bits_that_they_have_in_enough_pages():
    models = (TinyModel(TWO_LAYERS, grid) for grid in (ENOUGH, FEW))
    (wanted, of_enough), (got, of_few) = (run(model, requests()) for model in models)
    assert of_enough.waits == of_enough.replays == 0
    assert of_few.waits and of_few.replays
    assert of_few.recomputed_prompt_tokens and of_few.recomputed_output_tokens
    assert got == wanted


def test_a_slot_has_all_tokens_of_a_padded_last_piece():
    """The row is not a multiple of the piece, so the last piece ends after the end of the row."""
    grid = BucketGrid(
        60, ((60, 4, 16),), 4, page=8, row_tokens=16, steps_per_call=4, chunks_per_decode=3
    )
    generator = TinyModel(grid=grid).generator()
    prompts = [[3 + (7 * i + n) % 90 for n in range(50 + i)] for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=1)
    outputs = []
    for i, prompt in enumerate(prompts):
        generator.submit(Request(f"row-{i}", prompt, params))
    while generator.unfinished:
        outputs += generator.step()
    state = generator.runner.decode_state
    got = [
        tokens[:length].tolist()
        for tokens, length in zip(state.tokens_BS, state.prompt_length_B, strict=True)
        if length
    ]
    assert len(outputs) == 3 and sorted(got) == sorted(prompts)
