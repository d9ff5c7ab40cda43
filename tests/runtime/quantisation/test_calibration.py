"""Hessians and the residual stream of calibration rows are those of transformers."""

import jax.numpy as jnp
import numpy as np
import pytest
from conformance import CASES, save_reference
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.abstract_model import AbstractModel
from noria.runtime.checkpoint import open_model
from noria.runtime.checkpoint.loader import read_parameter
from noria.runtime.quantisation import calibration
from noria.runtime.quantisation.calibration import Calibration

(CASE,) = (case for case in CASES if case.name == "smollm2")
ROWS = [np.random.default_rng(n).integers(3, 101, n).tolist() for n in (5, 9, 12, 30)]
MATRICES = {
    "attention.qkv": "self_attn.q_proj",
    "attention.output": "self_attn.o_proj",
    "mlp.gate_up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
"""A published matrix with the input of each product, in the order of the layer."""


def published_sums(folder, rows) -> list[dict[str, np.ndarray]]:
    """Return the sums of outer products of the inputs of matrices, for each layer."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    sums = [{} for _ in model.model.layers]

    def watch(layer: int, name: str, product: str):
        def add(module, inputs):
            x_MA = inputs[0][0].double().numpy()
            sums[layer][product] = sums[layer].get(product, 0) + x_MA.T @ x_MA

        model.model.layers[layer].get_submodule(name).register_forward_pre_hook(add)

    for layer in range(len(sums)):
        for product, name in MATRICES.items():
            watch(layer, name, product)
    with torch.no_grad():
        for row in rows:
            model(torch.tensor([row]))
    return sums


@pytest.mark.reference
def test_sums_of_each_layer_are_those_of_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "BATCH_TOKENS", 40)
    monkeypatch.setattr(calibration, "MAX_LENGTH", 16)
    save_reference(CASE, tmp_path)
    wanted = published_sums(tmp_path, [row[:16] for row in ROWS])
    with open_model(tmp_path) as files:
        definition = AbstractModel(files.spec.config)
        sources = {source.parameter: source for source in files.spec.sources}
        parameters = {
            name: read_parameter(
                sources[name], files.tensors, (slice(None),) * leaf.ndim, leaf.shape, np.float32
            )
            for name, leaf in definition.abstract_parameters(jnp.float32).items()
        }
        rows = Calibration(files.spec.config, ROWS, parameters["embedding.table"])
    assert rows.num_tokens == sum(min(len(row), 16) for row in ROWS)
    for layer, of_layer in enumerate(wanted):
        prefix = f"layers.{layer}."
        own = {n.removeprefix(prefix): x for n, x in parameters.items() if n.startswith(prefix)}
        assert [products[0] for products in rows.layer(layer).products] == list(MATRICES)
        for product, sum_AA in of_layer.items():
            got_AA = rows.hessian(layer, own, product)
            scale = np.abs(sum_AA).max()
            np.testing.assert_allclose(got_AA, sum_AA, atol=FLOAT32_MODEL_LOGPROB * scale, rtol=0)
            squares_A = rows.mean_square(layer, own, product) * rows.num_tokens
            np.testing.assert_allclose(squares_A, got_AA.diagonal(), rtol=1e-5)
        rows.advance(layer, own)


def test_layers_of_one_kind_share_their_programs():
    from tiny import CONFIG

    rows = Calibration(CONFIG, [[1, 2]], np.zeros((CONFIG.vocab_size, CONFIG.embed), np.float32))
    first, second, third = map(rows.layer, range(3))
    assert first is third and first is not second
