"""Checkpoints with experts: both forms load, errors name their cause, shards read little."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from alike import changed
from gguf_writer import build, f32
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import save_file

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.moe_config import ClampedUnit, ExpertGroups
from noria.runtime.checkpoint import load_params, open_model, save_orbax
from noria.runtime.checkpoint.formats import gguf
from noria.runtime.checkpoint.formats.gguf import GGUFFile
from noria.runtime.checkpoint.formats.safetensors import SafetensorsDirectory
from noria.runtime.checkpoint.loader import read_parameter
from noria.runtime.errors import CheckpointMismatch

E, D, F = 4, 16, 24
CONFIG = {
    "model_type": "qwen2_moe",
    "vocab_size": 32,
    "hidden_size": D,
    "intermediate_size": 40,
    "moe_intermediate_size": F,
    "shared_expert_intermediate_size": 8,
    "num_hidden_layers": 2,
    "mlp_only_layers": [0],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": E,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
MLP = "model.layers.1.mlp"
GATE_UP, DOWN = f"{MLP}.experts.gate_up_proj", f"{MLP}.experts.down_proj"


def one(expert: int, side: str) -> str:
    return f"{MLP}.experts.{expert}.{side}_proj.weight"


def attention_and_norms(i: int) -> dict[str, tuple[int, ...]]:
    layer = f"model.layers.{i}"
    shapes = {f"{layer}.{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
    for side, rows in {"q": D, "k": D // 2, "v": D // 2}.items():
        shapes[f"{layer}.self_attn.{side}_proj.weight"] = (rows, D)
        shapes[f"{layer}.self_attn.{side}_proj.bias"] = (rows,)
    return shapes | {f"{layer}.self_attn.o_proj.weight": (D, D)}


def split() -> dict[str, np.ndarray]:
    """Return published tensors of a model whose first layer is dense."""
    shapes = {"model.embed_tokens.weight": (32, D), "model.norm.weight": (D,)}
    shapes |= attention_and_norms(0) | attention_and_norms(1)
    mlps = {"model.layers.0.mlp": 40, f"{MLP}.shared_expert": 8}
    mlps |= {f"{MLP}.experts.{e}": F for e in range(E)}
    for name, width in mlps.items():
        shapes |= {f"{name}.{side}_proj.weight": (width, D) for side in ("gate", "up")}
        shapes[f"{name}.down_proj.weight"] = (D, width)
    shapes |= {f"{MLP}.gate.weight": (E, D), f"{MLP}.shared_expert_gate.weight": (1, D)}
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def fused() -> dict[str, np.ndarray]:
    """Return the same model, with experts in transformers' form in memory."""
    tensors = split()
    experts = [{s: tensors.pop(one(e, s)) for s in ("gate", "up", "down")} for e in range(E)]
    tensors[GATE_UP] = np.stack([np.concatenate([e["gate"], e["up"]]) for e in experts])
    tensors[DOWN] = np.stack([e["down"] for e in experts])
    return tensors


def save(path, tensors, **changes):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors, path / "model.safetensors")
    return path


def load(path, dtype=jnp.float32):
    with open_model(path) as model:
        abstract = AbstractModel(model.spec.config).abstract_parameters(dtype)
        device = SingleDeviceSharding(jax.devices()[0])
        return load_params(model.spec, model.tensors, abstract, device)


def expected_gate_up() -> np.ndarray:
    tensors = split()
    sides = [[tensors[one(e, side)].T for side in ("gate", "up")] for e in range(E)]
    return np.array(sides)


@pytest.mark.parametrize("form", [split, fused])
def test_both_forms_fill_the_same_parameters(tmp_path, form):
    params = load(save(tmp_path / "model", form()))
    np.testing.assert_array_equal(params["layers.1.mlp.gate_up"], expected_gate_up())
    down = np.array([split()[one(e, "down")].T for e in range(E)])
    np.testing.assert_array_equal(params["layers.1.mlp.down"], down)
    shared_gate = split()[f"{MLP}.shared_expert_gate.weight"][0]
    np.testing.assert_array_equal(params["layers.1.mlp.shared_gate"], shared_gate)
    assert params["layers.0.mlp.down"].shape == (40, D)


def without(tensors, *names):
    return {name: array for name, array in tensors.items() if name not in names}


def halves() -> dict[str, np.ndarray]:
    """Return gate and up in the fused form, and down in the split form."""
    return without(fused(), DOWN) | {one(e, "down"): split()[one(e, "down")] for e in range(E)}


WRONG = {
    "a split one missing": (
        without(split(), one(2, "up")),
        rf"missing from the checkpoint \(1\):\n    {one(2, 'up')}",
    ),
    "the first one missing": (
        without(split(), one(0, "down")),
        rf"missing from the checkpoint \(1\):\n    {one(0, 'down')}",
    ),
    "a fused one missing": (
        without(fused(), DOWN),
        rf"missing from the checkpoint \(1\):\n    {DOWN}",
    ),
    "one left over": (
        split() | {one(E, "gate"): np.zeros((F, D), "f4")},
        rf"tensors that no parameter uses \(1\):\n    {one(E, 'gate')}",
    ),
    "both forms at once": (
        split() | {DOWN: fused()[DOWN]},
        rf"tensors that no parameter uses \(1\):\n    {DOWN}",
    ),
    "half of each form": (
        halves(),
        rf"missing from the checkpoint \(1\):\n    {DOWN}\n"
        rf"  tensors that no parameter uses \(4\):\n    {one(0, 'down')}",
    ),
    "one of another shape": (
        split() | {one(2, "up"): np.zeros((F + 1, D), "f4")},
        rf"expected \({F}, {D}\) of each to stack, got {one(2, 'up')} \({F + 1}, {D}\)",
    ),
    "all of another shape": (
        split() | {one(e, "down"): np.zeros((D, F + 1), "f4") for e in range(E)},
        rf"layers.1.mlp.down: expected \({E}, {F}, {D}\), got \({E}, {F + 1}, {D}\)",
    ),
    "too few in a fused one": (
        fused() | {DOWN: fused()[DOWN][1:]},
        rf"layers.1.mlp.down: expected \({E}, {F}, {D}\), got \({E - 1}, {F}, {D}\) from {DOWN}",
    ),
    "gate without up in a fused one": (
        fused() | {GATE_UP: fused()[GATE_UP][:, :F]},
        rf"layers.1.mlp.gate_up: expected \({E}, 2, {D}, {F}\), got \({E}, 2, {D}, {F // 2}\)",
    ),
    "an odd number of rows": (
        fused() | {GATE_UP: fused()[GATE_UP][:, 1:]},
        rf"{GATE_UP} -> layers.1.mlp.gate_up: .* expected axis \(p f\) of a multiple of 2",
    ),
    "one of integers": (
        split() | {one(3, "gate"): np.zeros((F, D), "i4")},
        rf"{one(3, 'gate')}: expected floating numbers, got I32",
    ),
}


@pytest.mark.parametrize(("tensors", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_with_experts_is_named(tmp_path, tensors, message):
    with pytest.raises(CheckpointMismatch, match=message):
        load(save(tmp_path / "model", tensors))


def test_experts_of_several_dtypes_load_without_rounding(tmp_path):
    tensors = split()
    # 1/3 has other digits in each of the three types
    third = {"f4": one(0, "gate"), "f2": one(1, "gate"), ml_dtypes.bfloat16: one(2, "gate")}
    for dtype, name in third.items():
        tensors[name] = np.full((F, D), 1 / 3, dtype)
    params = load(save(tmp_path / "model", tensors))
    for e, name in enumerate(third.values()):
        got = np.asarray(params["layers.1.mlp.gate_up"][e, 0])
        np.testing.assert_array_equal(got, tensors[name].astype("f4").T)
    assert len(np.unique(params["layers.1.mlp.gate_up"][:3, 0])) == 3


class Noting:
    """A tensor source that counts the elements read from each tensor."""

    def __init__(self, source):
        self.source, self.tensors, self.elements = source, source.tensors, {}

    def read(self, name, index=None):
        array = self.source.read(name, index)
        self.elements[name] = self.elements.get(name, 0) + array.size
        return array


def source_of(path, parameter: str):
    with open_model(path) as model:
        (source,) = (each for each in model.spec.sources if each.parameter == parameter)
    return source


@pytest.mark.parametrize("form", [split, fused])
def test_a_shard_of_experts_reads_their_elements_alone(tmp_path, form):
    path = save(tmp_path / "model", form())
    tensors = Noting(SafetensorsDirectory(path))
    shape, index = (E, 2, D, F), (slice(1, 3), *(slice(None),) * 3)
    source = source_of(path, "layers.1.mlp.gate_up")
    box = read_parameter(source, tensors, index, shape, np.dtype("f4"))
    np.testing.assert_array_equal(box, expected_gate_up()[1:3])
    each = {one(e, side): F * D for e in (1, 2) for side in ("gate", "up")}
    assert tensors.elements == (each if form is split else {GATE_UP: 2 * 2 * F * D})


@pytest.mark.parametrize("rows", [slice(0, F), slice(4, 10)], ids=["whole", "a part of each"])
def test_a_shard_of_experts_in_gguf_reads_their_bytes_alone(tmp_path, monkeypatch, rows):
    up = np.arange(E * F * D, dtype=np.float32).reshape(E, F, D)
    path = tmp_path / "model.gguf"
    path.write_bytes(build([], [f32("before", [1.0]), f32("up", up), f32("after", [2.0])]).data)
    file, counts = GGUFFile(path), []
    pread = gguf._pread
    monkeypatch.setattr(gguf, "_pread", lambda of, at, n: counts.append(n) or pread(of, at, n))
    got = file.read("up", (slice(1, 3), rows, slice(2, 5)))
    np.testing.assert_array_equal(got, up[1:3, rows, 2:5])
    assert sum(counts) == 4 * 2 * len(range(F)[rows]) * D


def test_experts_survive_the_way_through_our_checkpoint(tmp_path):
    """Weights are bfloat16, except the bias of the choice, which keeps its dtype."""
    with open_model(save(tmp_path / "model", split())) as model:
        moe = replace(model.spec.config.moe, clamped=ClampedUnit(1.7, 7.0))
    routing = replace(moe.routing, has_choice_bias=True, groups=ExpertGroups(2, 1, 2))
    config = changed(model.spec.config, moe=replace(moe, routing=routing))
    abstract = AbstractModel(config).abstract_parameters(jnp.bfloat16)
    rng = np.random.default_rng(0)
    params = {
        name: jnp.asarray(rng.standard_normal(leaf.shape, np.float32).astype(leaf.dtype))
        for name, leaf in abstract.items()
    }
    save_orbax(tmp_path / "ours", params, family="qwen2_moe", config=config)
    with open_model(tmp_path / "ours") as ours:
        assert ours.spec.config == config
        device = SingleDeviceSharding(jax.devices()[0])
        restored = load_params(ours.spec, ours.tensors, abstract, device)
    for name, value in params.items():
        np.testing.assert_array_equal(restored[name], value)
        assert restored[name].dtype == value.dtype
    assert restored["layers.1.mlp.choice_bias"].dtype == jnp.float32
    assert restored["layers.1.mlp.gate_up"].dtype == jnp.bfloat16
