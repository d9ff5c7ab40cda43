"""Rows with adapters of their own: under every layout, they answer as models with merged weights.

The reference is one device with float weights that were merged in plain numpy, and a whole forward
pass over each row with its answer. The rows of one call use different adapters, or none. `slow`
tests cover further layouts and families.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laid_out import LaidOut, adapter_matrices, config_of, greedy_rows, layout_of
from quantised import dequantised
from tiny import random_parameters
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.abstract_model import DOWN, UP, AbstractModel
from noria.compile.grids.adapter_grid import AdapterGrid
from noria.compile.weight_rules import ALL_FLOAT, WeightRules
from noria.modelzoo.attention.attend import attend_dense
from noria.modelzoo.weights.weight_formats import WeightFormat

HEADS = {"attention.qkv": 6, "attention.output": 2}
MLP = {"mlp.gate_up": 3, "mlp.down": 4}
SHARED = {"mlp.shared.gate_up": 3, "mlp.shared.down": 2}
LATENTS = {"attention.latent_down": 2, "attention.key_up": 3, "attention.value_up": 3}
CODES = WeightRules(WeightFormat("int8"))
CASES = {
    "latents": ("deepseek_v2", None, LATENTS | {"attention.query": 2}, {}, 1),
    "scanned, codes": ("qwen3", None, HEADS | MLP, {"scan_layers": True, "weight_rules": CODES}),
    "tensor": ("llama", "weight-stationary-1d-kv-copies", HEADS | MLP, {}, 1),
}
SLOW_CASES = {
    "scanned chunks": ("gemma2", None, HEADS | MLP, {"scan_layers": True, "in_chunks": True}),
    "two axes, scanned": ("mistral", "weight-stationary-2d", HEADS | MLP, {"scan_layers": True}),
    "gathered": ("qwen2", "weight-gathered", HEADS | MLP, {}),
    "batch attention": ("phi3", "data-tensor-batch-attention", HEADS | MLP, {"in_chunks": True}),
    "experts": ("qwen2_moe", "expert-tensor", HEADS | SHARED, {}),
    "latents, shared experts": ("deepseek_v2", None, LATENTS | SHARED, {}),
    "ring of latents": ("deepseek_v3", "ring-tensor", LATENTS | {"attention.query_down": 3}, {}),
}
ADAPTER_OF_SLOT = (0, 1, 2, 0, 2, 1)


def rows(adapters=ADAPTER_OF_SLOT):
    return {slot: replace(row, adapter=adapters[slot]) for slot, row in greedy_rows().items()}


def merged(config, grid, number, weight_rules=ALL_FLOAT):
    """Return the parameters of a model with one adapter merged; number 0 is none."""
    definition, parameters = (
        AbstractModel(config, adapters=grid),
        random_parameters(AbstractModel(config)),
    )
    for name, form in AbstractModel(config, weight_rules=weight_rules).quantisations.items():
        parameters[name] = jnp.asarray(dequantised(np.asarray(parameters[name]), form))
    matrices = adapter_matrices(config, grid)
    for name, rank in definition.adapted.items() if number else ():
        inputs, own = definition.weights[name][1], slice(rank * (number - 1), rank * number)
        up = np.moveaxis(matrices[name + UP], inputs[-1], 0)[own]
        change = np.tensordot(matrices[name + DOWN][..., own], up, 1)
        change = np.moveaxis(change, range(len(inputs)), inputs)
        parameters[name] = parameters[name] + change
    return parameters


def check(family, layout, ranks, options, num_layers=2):
    config, grid = config_of(family).first_layers(num_layers), AdapterGrid(2, ranks)
    laid = LaidOut(config, layout and layout_of(layout), adapters=grid, **options)
    got, prompts = laid.answer(rows()), [row.prompt for row in greedy_rows().values()]
    definition, count = AbstractModel(config), len(prompts)
    answers = [[int(t) for t in row if t >= 0] for row in got.output.tokens_BQ[:count]]
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    length_R = np.array([len(text) for text in texts], np.int32)
    tokens_RT = np.zeros((count, length_R.max()), np.int32)
    for row, text in zip(tokens_RT, texts, strict=True):
        row[: len(text)] = text

    @jax.jit
    def logprobs(parameters):
        decoder = definition.bind(parameters, attend=attend_dense)
        return jax.nn.log_softmax(decoder.logits(decoder.forward(tokens_RT, length_R)[0]))

    for number in range(3):
        rules = options.get("weight_rules", ALL_FLOAT)
        expected_RTV = np.asarray(logprobs(merged(config, grid, number, rules)))
        for row in (row for row in range(count) if ADAPTER_OF_SLOT[row] == number):
            start, end = len(prompts[row]) - 1, length_R[row] - 1
            for ours, place in ((got.prompt_logprobs_BV, start), (got.logprobs_BV, end)):
                np.testing.assert_allclose(
                    ours[row], expected_RTV[row, place], rtol=0, atol=FLOAT32_MODEL_LOGPROB
                )
            assert expected_RTV[row, start:end].argmax(axis=-1).tolist() == answers[row]


@pytest.mark.parametrize("name", CASES)
def test_rows_answer_as_models_with_merged_adapters(name):
    check(*CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_rows_under_more_layouts_answer_as_models_with_merged_adapters(name):
    check(*SLOW_CASES[name])


@pytest.mark.usefixtures("optimized")
def test_the_bits_of_a_row_do_not_depend_on_the_adapters_of_others():
    config, grid = config_of("llama", num_layers=1), AdapterGrid(2, HEADS | MLP)
    mixed, others = LaidOut(config, adapters=grid), (0, 1, 1, 0, 2, 2)
    one, other = mixed.answer(rows()), mixed.answer(rows(others))
    without = LaidOut(config).answer(greedy_rows())
    same = [slot for slot in range(6) if ADAPTER_OF_SLOT[slot] == others[slot]]
    plain = [slot for slot in range(6) if not ADAPTER_OF_SLOT[slot]]
    for answer, slots in ((other, same), (without, plain)):
        for field in ("prompt_logprobs_BV", "logprobs_BV"):
            ours, theirs = (getattr(x, field)[slots] for x in (one, answer))
            np.testing.assert_array_equal(ours, theirs)
        ours, theirs = (x.output.tokens_BQ[slots] for x in (one, answer))
        np.testing.assert_array_equal(ours, theirs)
