"""Layers of different sizes, one without attention and one without feed-forward, answer alike.

The model is compared with plain numpy, and under layouts with one device. What is predicted from
its shapes is compared with its arrays.
"""

from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from laid_out import LaidOut, expected, greedy_rows, layout_of
from tiny import random_parameters
from tolerances import FLOAT32_MODEL_LOGPROB
from unlike_layers import UNLIKE, reference_logits

from noria.compile.abstract_model import AbstractModel, model_sizes
from noria.modelzoo.cache.pages import PageCounts, allocate_pages
from noria.modelzoo.layer_config import Attention, Layer, Mlp
from noria.sharding.call import Call
from noria.sharding.communication import predict_collectives
from noria.sharding.device_bytes import entry_bytes_per_device
from noria.sharding.legality import check

LAYOUTS = [None, "weight-stationary-1d@tensor=4", "data-tensor-batch-attention", "ring"]


def test_the_forward_pass_is_that_of_numpy():
    definition = AbstractModel(UNLIKE)
    parameters = random_parameters(definition)
    tokens = np.random.default_rng(1).integers(0, UNLIKE.vocab_size, 13)

    @jax.jit
    def forward(parameters):
        decoder = definition.bind(parameters)
        x_1TD, report = decoder.forward(jnp.asarray(tokens)[None], jnp.array([len(tokens)]))
        return jax.nn.log_softmax(decoder.logits(x_1TD[0])), report

    got_TV, report = forward(parameters)
    weights = {name: np.asarray(x) for name, x in parameters.items()}
    logits_TV = reference_logits(weights, tokens.tolist())
    expected_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    np.testing.assert_allclose(got_TV, expected_TV, rtol=0, atol=FLOAT32_MODEL_LOGPROB)
    assert report is None


@pytest.mark.parametrize(
    ("layout", "options"),
    covering(LAYOUTS, [{}, {"in_chunks": True}, {"cache_codes": "int8"}]),
    ids=str,
)
def test_rows_answer_as_with_whole_forward_passes(layout, options):
    laid = LaidOut(UNLIKE, layout and layout_of(layout), **options)
    answers = laid.answer(greedy_rows())
    if "cache_codes" in options:
        # codes round entries, so only their own result under each layout is compared
        alone = LaidOut(UNLIKE, **options).answer(greedy_rows())
        count = len(greedy_rows())
        assert (answers.output.tokens_BQ[:count] == alone.output.tokens_BQ[:count]).all()
    else:
        expected(UNLIKE).assert_equals(answers, greedy_rows())
    assert answers.state.cache[2] is None


@pytest.mark.parametrize("shards", [1, 4])
def test_the_bytes_of_the_cache_are_predicted(shards):
    layout = layout_of(f"weight-stationary-1d@tensor={shards}")
    allocate = partial(allocate_pages, UNLIKE, PageCounts(15, 16), jnp.float32, shards)
    arrays = jax.tree.leaves(jax.eval_shape(allocate))
    entry_bytes = sum(entry_bytes_per_device(x, layout, jnp.float32) for x in UNLIKE.attentions)
    assert 15 * 16 * entry_bytes == sum(x.size * x.dtype.itemsize for x in arrays) // shards


def test_what_layers_send_is_the_sum_over_layers():
    """A layer with a part sends what it sends in a model in which all layers have both parts."""
    layout, call = layout_of("weight-stationary-1d@tensor=4"), Call("prefill", 4, 8, 8)

    def sent(*layers: Layer) -> Counter:
        config, total = replace(UNLIKE, layers=layers), Counter()
        for found in predict_collectives(config, layout, call, 4):
            total[found.kind, found.mesh_axes, found.num_bytes] += found.times
        return total

    first, second, third, *_ = UNLIKE.layers
    one = sent(first)
    assert sent(first, second) - one and sent(first, third) - one
    assert sent(first, second, third) == sent(first, second) + sent(first, third) - one


def test_what_does_not_divide_is_found_in_any_layer():
    layers = (*UNLIKE.layers[:2], Layer(Attention(6, 6, 4), Mlp(30)))
    config = replace(UNLIKE, layers=layers)
    findings = " ".join(check(layout_of("weight-stationary-1d@tensor=4"), model_sizes(config, 4)))
    assert "the number of query heads is 6" in findings and "mlp is 30" in findings


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((Layer(None, Mlp(8)),), "expected a layer with attention, got none"),
        ((), "num_layers: expected a positive integer, got 0"),
    ],
)
def test_models_without_attention_are_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        replace(UNLIKE, layers=layers)


def test_an_empty_layer_is_refused():
    with pytest.raises(ValueError, match="expected attention, a feed-forward part, or both"):
        Layer(None, None)
    with pytest.raises(ValueError, match="both if they are parallel"):
        Layer(Attention(2, 2, 4), None, is_parallel=True)
