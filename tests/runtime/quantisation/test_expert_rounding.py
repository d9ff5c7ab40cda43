"""Experts are rounded by GPTQ for the tokens that their router sends to them, as by plain numpy."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from alike import changed
from compressed_folder import dequantised_tensors
from model_on_disk import EMBED, MLP, write_model
from safetensors.numpy import load_file, save_file
from tiny import CONFIG

from noria.compile.graphs import layer_steps
from noria.compile.graphs.layer_steps import CalibrationLayer
from noria.modelzoo.moe_config import MoeConfig, Routing
from noria.modelzoo.weights.weight_formats import Quantisation, WeightFormat
from noria.runtime.checkpoint.quantiser import dequantise
from noria.runtime.cli import main
from noria.runtime.quantisation.calibration import ExpertTokens
from noria.runtime.quantisation.rounding import MIN_TOKENS, round_weight

E, Z = 3, 2
ROWS = [np.random.default_rng(n).integers(3, 250, 20).tolist() for n in range(8)]
FEW_ROWS = [[3, 17, 5, 60, 41]]
QUANTISATION = Quantisation(WeightFormat("int4", 8), (-2,))
BLOCK = "model.layers.0.block_sparse_moe"


class Expert(NamedTuple):
    """An expert of the first layer, with input features first, and the inputs of its products."""

    gate_up_PDF: np.ndarray
    down_FD: np.ndarray
    x_UD: np.ndarray

    def hidden(self, gate_up_PDF: np.ndarray) -> np.ndarray:
        gate_UF, up_UF = self.x_UD @ gate_up_PDF[0], self.x_UD @ gate_up_PDF[1]
        return gate_UF / (1 + np.exp(-gate_UF)) * up_UF


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A Mixtral whose attention writes nothing, so that experts read the normed embeddings."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    write_model(folder, num_experts=E)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("o_proj.weight"):
            tensors[name] = np.zeros_like(tensors[name])
    save_file(tensors, folder / "model.safetensors")
    return folder


def quantize(model: Path, folder: Path, method: str, rows: list[list[int]] | None = None) -> None:
    options = ["--numbers", "int4:8", "--method", method]
    if rows is not None:
        calibration = folder.with_suffix(".jsonl")
        calibration.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
        options += ["--calibration", str(calibration)]
    assert main(["quantize", "--model", str(model), "-o", str(folder), *options]) == 0


def experts_of(tensors: dict[str, np.ndarray], rows: list[list[int]], router_ED) -> list[Expert]:
    """Return the experts of the first layer, each with the inputs of its tokens."""
    x_MD = tensors["model.embed_tokens.weight"][np.concatenate(rows)]
    x_MD = x_MD / np.sqrt(np.square(x_MD).mean(axis=1, keepdims=True) + 1e-5)
    expert_MZ = np.argsort(-(x_MD @ router_ED.T), axis=1)[:, :Z]
    experts = []
    for e in range(E):
        w1, w2, w3 = (tensors[f"{BLOCK}.experts.{e}.w{n}.weight"].T for n in (1, 2, 3))
        experts.append(Expert(np.stack([w1, w3]), w2, x_MD[(expert_MZ == e).any(axis=1)]))
    return experts


def rounded(weight: np.ndarray, inputs_UA: np.ndarray) -> np.ndarray:
    """Return the values of a weight that is rounded for some inputs, or `clip` for too few."""
    is_enough = len(inputs_UA) >= MIN_TOKENS * inputs_UA.shape[1]
    hessian_AA = inputs_UA.T @ inputs_UA if is_enough else None
    return dequantise(
        *round_weight(weight, QUANTISATION, np.dtype(np.float32), "gptq", hessian_AA), QUANTISATION
    )


@pytest.mark.parametrize("rows", [ROWS, FEW_ROWS], ids=["many", "few"])
def test_each_expert_is_rounded_for_its_own_tokens(model, rows, tmp_path, capsys, monkeypatch):
    # experts with many tokens run in several calls
    monkeypatch.setattr(layer_steps, "_TILE", 32)
    quantize(model, tmp_path / "q", "gptq", rows)
    floats, values = load_file(model / "model.safetensors"), dequantised_tensors(tmp_path / "q")
    router_ED = floats[f"{BLOCK}.gate.weight"]
    got = experts_of(floats | values, rows, router_ED)
    num_few = 0
    for expert, written in zip(experts_of(floats, rows, router_ED), got, strict=True):
        gate_up_PDF = rounded(expert.gate_up_PDF, expert.x_UD)
        down_FD = rounded(expert.down_FD, expert.hidden(gate_up_PDF))
        for weight, wanted in ((written.gate_up_PDF, gate_up_PDF), (written.down_FD, down_FD)):
            # sums in another order may change a code between two values
            assert (np.abs(weight - wanted) < 1e-6).mean() > 0.99
        num_few += sum(len(expert.x_UD) < MIN_TOKENS * size for size in (EMBED, MLP))
    error = capsys.readouterr().err
    if rows is ROWS:
        assert num_few == 0 and "fewer calibration tokens" not in error
        return
    # the second layer has experts of its own, and the other inputs have all five tokens
    ((count, total),) = re.findall(r"(\d+) of (\d+) inputs of products", error)
    assert num_few and num_few <= int(count) <= num_few + 2 * E and int(total) == 2 * (2 + 2 * E)


def test_the_error_of_experts_is_far_below_that_of_rounding(model, tmp_path):
    floats = load_file(model / "model.safetensors")
    router_ED = floats[f"{BLOCK}.gate.weight"]
    experts, errors = experts_of(floats, ROWS, router_ED), {}
    for method in ("nearest", "clip", "gptq"):
        quantize(model, tmp_path / method, method, ROWS if method == "gptq" else None)
        values = dequantised_tensors(tmp_path / method)
        written = experts_of(floats | values, ROWS, router_ED)
        errors[method] = sum(
            np.square(
                old.hidden(old.gate_up_PDF) @ old.down_FD
                - new.hidden(new.gate_up_PDF) @ new.down_FD
            ).sum()
            for old, new in zip(experts, written, strict=True)
        )
    assert errors["gptq"] < 0.8 * min(errors["nearest"], errors["clip"])


def test_routing_weights_may_multiply_the_inputs_of_experts():
    x_MD = np.arange(8, dtype=np.float32).reshape(4, 2)
    expert_MZ, weight_MZ = np.array([[1, 0], [2, 1], [0, 2], [2, 2]]), np.full((4, 2), 0.5)
    weight_MZ[1] = 0.25
    arrays = x_MD, expert_MZ, weight_MZ
    plain, weighed = (ExpertTokens(*arrays, weighs_input=x).inputs(1) for x in (False, True))
    np.testing.assert_array_equal(plain, x_MD[:2])
    np.testing.assert_array_equal(weighed, x_MD[:2] * [[0.5], [0.25]])
    np.testing.assert_array_equal(x_MD.ravel(), np.arange(8))


def test_hidden_activations_have_the_biases_of_their_expert():
    moe = MoeConfig(Routing(E, Z), 16, has_bias=True)
    layer = CalibrationLayer(changed(CONFIG, windows=(None,), moe=moe), 0)
    rng = np.random.default_rng(0)
    x_UD, gate_up_PDF, bias_PF = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((5, CONFIG.embed), (2, CONFIG.embed, 16), (2, 16))
    )
    gate_UF, up_UF = (x_UD @ gate_up_PDF[side] + bias_PF[side] for side in (0, 1))
    got_UF = layer.expert_hidden(x_UD, gate_up_PDF, bias_PF)
    np.testing.assert_allclose(got_UF, gate_UF / (1 + np.exp(-gate_UF)) * up_UF, rtol=1e-4)
