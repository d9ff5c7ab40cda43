"""noria's own checkpoints: saved, restored with other placements, refused if incomplete."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import alike
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.layer_config import Chunk
from noria.modelzoo.rope_config import Llama3Scaling, NoRope, RopeConfig
from noria.runtime.checkpoint import (
    GenerationDefaults,
    load_params,
    open_model,
    orbax_store,
    save_orbax,
)
from noria.runtime.checkpoint.description import describe
from noria.runtime.checkpoint.orbax_store import decode_config, encode_config
from noria.runtime.errors import CheckpointMismatch, InvalidOrbax

CONFIG = DecoderConfig.alike(
    vocab_size=16,
    embed=8,
    mlp=12,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=4,
    windows=(None, 7, Chunk(9)),
    max_position=64,
    rope=NoRope(0.1, interval=8),
    local_rope=RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 32)),
)
VALUES = {
    "embedding": np.arange(128, dtype=np.float32).reshape(16, 8),
    "layers.0.mlp.gate_up": np.arange(64, dtype=np.float32).reshape(8, 2, 4) / 7,
    "final_norm": np.ones(8, np.float32),
}


def mesh():
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def save(path, **options):
    params = {name: jnp.asarray(value) for name, value in VALUES.items()}
    params["embedding"] = jax.device_put(
        params["embedding"], NamedSharding(mesh(), PartitionSpec("data"))
    )
    save_orbax(path, params, family="tiny", config=CONFIG, **options)
    return path


def abstract(dtype=jnp.float32):
    return {name: jax.ShapeDtypeStruct(value.shape, dtype) for name, value in VALUES.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("orbax") / "model", name="tiny-model")


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def test_a_config_survives_json_with_its_nested_types():
    assert decode_config(json.loads(json.dumps(encode_config(CONFIG)))) == CONFIG


@pytest.mark.parametrize("config", [{"type": "Popen"}, {"type": "dataclass"}, {}, {"type": 3}])
def test_a_config_of_a_foreign_type_is_refused(config):
    with pytest.raises(InvalidOrbax, match="expected a known type"):
        decode_config(config)


def test_a_config_with_an_unknown_field_is_refused():
    with pytest.raises(InvalidOrbax, match=r"RopeConfig: .*speed"):
        decode_config({"type": "RopeConfig", "speed": 3})
    config = json.loads(json.dumps(encode_config(CONFIG)))
    for key in ("latent", "moe"):
        with pytest.raises(InvalidOrbax, match="config: DecoderConfig: "):
            decode_config(config | {key: "x"})


def test_what_was_saved_is_restored_on_another_placement_in_another_dtype(saved):
    shardings = {
        "embedding": NamedSharding(mesh(), PartitionSpec(None, "tensor")),
        "layers.0.mlp.gate_up": NamedSharding(mesh(), PartitionSpec("data", "tensor")),
        "final_norm": SingleDeviceSharding(jax.devices()[3]),
    }
    with open_model(saved) as model:
        assert model.kind == "orbax" and model.name == "tiny-model"
        assert model.spec.family == "tiny" and model.spec.config == CONFIG
        params = load_params(model.spec, model.tensors, abstract(jnp.bfloat16), shardings)
    for name, value in VALUES.items():
        np.testing.assert_array_equal(params[name], value.astype(jnp.bfloat16))
        assert params[name].sharding == shardings[name]


def test_threads_that_read_boxes_of_a_parameter_hold_it_once(saved, monkeypatch):
    num_held = 0
    arrange = orbax_store.arrange

    def slow(*arguments):
        nonlocal num_held
        num_held += 1
        time.sleep(0.02)
        return arrange(*arguments)

    monkeypatch.setattr(orbax_store, "arrange", slow)
    name, value = "embedding", VALUES["embedding"]
    with open_model(saved) as model, ThreadPoolExecutor(4) as pool:
        boxes = [(slice(i, i + 1), slice(0, value.shape[1])) for i in range(4)]
        rows = list(pool.map(lambda box: model.tensors.read(name, box), boxes))
    np.testing.assert_array_equal(np.concatenate(rows), value[:4])
    assert num_held == 1


def test_layers_that_run_in_a_loop_are_filled_from_single_ones(tmp_path):
    values = {f"layers.{i}.mlp.down": np.full((4, 8), i, np.float32) for i in range(3)}
    params = {name: jnp.asarray(value) for name, value in values.items()}
    save_orbax(tmp_path / "three", params, family="tiny", config=CONFIG)
    stacked, wanted = "layers.0:3.mlp.down", jax.ShapeDtypeStruct((3, 4, 8), jnp.float32)
    over = NamedSharding(mesh(), PartitionSpec(None, "data"))
    with open_model(tmp_path / "three") as model:
        found = load_params(model.spec, model.tensors, {stacked: wanted}, over)
    np.testing.assert_array_equal(found[stacked], np.stack(list(values.values())))


def test_parameters_of_several_layers_are_not_saved(tmp_path):
    with pytest.raises(
        ValueError, match=r"got the stacked parameter layers\.0:2\.attention\.qkv\. Load the model"
    ):
        params = {"layers.0:2.attention.qkv": jnp.zeros((2, 8, 2, 4))}
        save_orbax(tmp_path / "new", params, family="tiny", config=CONFIG)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("embedding.table", (CONFIG.vocab_size + 3, 8), f"with {CONFIG.vocab_size} rows or heads"),
        (
            "layers.0.attention.qkv",
            (8, 2 * alike(CONFIG).num_kv_heads, 3, 4),
            "expected layers.0.attent",
        ),
    ],
)
def test_parameters_of_a_layout_are_not_saved(tmp_path, name, shape, message):
    with pytest.raises(ValueError, match=message):
        save_orbax(tmp_path / "new", {name: jnp.zeros(shape)}, family="tiny", config=CONFIG)


def test_a_folder_may_have_any_name(tmp_path):
    folder = save(tmp_path / "a %20#?b")
    with open_model(folder) as model:
        np.testing.assert_array_equal(model.tensors.read("embedding"), VALUES["embedding"])


def test_one_parameter_is_read_by_slice(saved):
    with open_model(saved) as model:
        index = (slice(2, 5), slice(0, 8))
        np.testing.assert_array_equal(
            model.tensors.read("embedding", index), VALUES["embedding"][index]
        )


def test_another_shape_in_the_model_is_a_mismatch(saved):
    wanted = abstract() | {"final_norm": jax.ShapeDtypeStruct((9,), jnp.float32)}
    device = SingleDeviceSharding(jax.devices()[0])
    with (
        open_model(saved) as model,
        pytest.raises(CheckpointMismatch, match=r"final_norm: expected \(9,\), got \(8,\)"),
    ):
        load_params(model.spec, model.tensors, wanted, device)


def test_another_tree_in_the_model_is_a_mismatch(saved):
    wanted = abstract()
    wanted["layers.1.attention.qkv"] = wanted.pop("layers.0.mlp.gate_up")
    device = SingleDeviceSharding(jax.devices()[0])
    with (
        open_model(saved) as model,
        pytest.raises(CheckpointMismatch, match=r"no tensor fills \(1\):\n    layers.1.attention"),
    ):
        load_params(model.spec, model.tensors, wanted, device)


def test_a_checkpoint_without_noria_json_was_not_finished(copy):
    (copy / "noria.json").unlink()
    with pytest.raises(InvalidOrbax, match="the save was not finished"):
        open_model(copy)


@pytest.mark.parametrize("damage", ["params", "params/_CHECKPOINT_METADATA"])
def test_parameters_that_were_not_committed_are_refused(copy, damage):
    path = copy / damage
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(InvalidOrbax, match="expected a finished orbax checkpoint"):
        open_model(copy)


def test_parameters_that_differ_from_the_list_are_refused_before_reading(copy):
    description = json.loads((copy / "noria.json").read_text())
    description["parameters"]["final_norm"]["shape"] = [4]
    (copy / "noria.json").write_text(json.dumps(description))
    wanted = abstract() | {"final_norm": jax.ShapeDtypeStruct((4,), jnp.float32)}
    device = SingleDeviceSharding(jax.devices()[0])
    with (
        open_model(copy) as model,
        pytest.raises(InvalidOrbax, match=r"final_norm: .*\(4,\).*\(8,"),
    ):
        load_params(model.spec, model.tensors, wanted, device)


@pytest.mark.parametrize("damage", ["garbage", "short"])
def test_damaged_files_are_refused(copy, damage):
    files = [path for path in (copy / "params").rglob("*") if path.parent.name == "d"]
    assert files
    for path in (*files, copy / "params" / "manifest.ocdbt"):
        content = path.read_bytes()
        path.write_bytes(b"\x00garbage" if damage == "garbage" else content[: len(content) // 2])
    with open_model(copy) as model, pytest.raises(InvalidOrbax, match="save the checkpoint again"):
        model.tensors.read("final_norm")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "expected schema 1, got 99"),
        ({"parameters": []}, "expected 'parameters', a dict"),
        ({"parameters": {"a": {"shape": [-1], "dtype": "float32"}}}, "'a': expected shape and"),
        ({"parameters": {"a": {"shape": [1], "dtype": "object!"}}}, "'a': expected shape and"),
    ],
)
def test_a_damaged_description_is_refused(copy, change, message):
    description = json.loads((copy / "noria.json").read_text()) | change
    (copy / "noria.json").write_text(json.dumps(description))
    with pytest.raises(InvalidOrbax, match=message):
        open_model(copy)


def test_saving_over_files_is_refused(saved):
    with pytest.raises(InvalidOrbax, match="expected a new or empty directory"):
        save(saved)


def test_saving_from_several_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="expected one process, got 2"):
        save(tmp_path / "ours")


def test_tokenizer_files_and_defaults_travel_with_the_parameters(tmp_path):
    source = tmp_path / "published"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"never")
    defaults = GenerationDefaults((2, 7), {"temperature": 0.5})
    path = save(tmp_path / "ours", tokenizer_files=source, generation_defaults=defaults)
    with open_model(path) as model:
        assert [p.name for p in model.tokenizer_files.iterdir()] == ["tokenizer.json"]
        assert model.generation_defaults == defaults


def test_a_gguf_vocabulary_travels_as_metadata(tmp_path):
    metadata = {"tokenizer.ggml.tokens": ["a", "ß"], "llama.block_count": 3}
    with open_model(save(tmp_path / "ours", tokenizer_files=metadata)) as model:
        assert model.tokenizer_files == {"tokenizer.ggml.tokens": ["a", "ß"]}
        assert "GGUF vocabulary (None), 2 tokens" in describe(model)
