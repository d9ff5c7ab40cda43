"""Scores of prompts whose tokens lie in stripes come in the order of the tokens."""

import jax
import numpy as np
import pytest
from laid_out import PROMPT_LENGTHS, LaidOut, greedy_rows, laid_out
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.modelzoo.sampling import TokenScores
from noria.runtime.padding import pack_prompts


def scores(model: LaidOut) -> TokenScores:
    """Of every token but the first of each prompt."""
    (bucket,) = model.grid.prefill
    prompts = [row.prompt for row in greedy_rows().values()]
    prompts += [(0,)] * (bucket.batch - len(prompts))
    num_logprobs_B = np.full(bucket.batch, 3, np.int32)
    arguments = model.put((*pack_prompts(prompts, bucket), num_logprobs_B))
    _, made = model.compile("score").score(model.parameters, bucket, *arguments)
    return jax.device_get(made)


@pytest.mark.parametrize(
    "layout", ["ring", pytest.param("ring-contiguous", marks=pytest.mark.slow)]
)
def test_tokens_are_scored_as_on_one_device(layout):
    one, ring = (scores(laid_out("gpt_oss", name)) for name in (None, layout))
    for row, length in enumerate(PROMPT_LENGTHS):
        assert (ring.top_ids_BR[row, : length - 1] == one.top_ids_BR[row, : length - 1]).all()
        np.testing.assert_allclose(
            ring.logprob_B[row, : length - 1],
            one.logprob_B[row, : length - 1],
            rtol=0,
            atol=FLOAT32_MODEL_LOGPROB,
        )
