"""The arrays of adapters are those of merged weights, for every arrangement of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import CASES, save_reference
from peft_adapters import write_adapter
from tolerances import FLOAT32_ELEMENTWISE

from noria.compile.abstract_model import DOWN, UP, AbstractModel
from noria.compile.plan import Numbers
from noria.compile.targets import find_target
from noria.modelzoo.config import AS_PUBLISHED, Arrangement
from noria.runtime.adapters.adapter_set import AdapterSet, load_arrays
from noria.runtime.adapters.merged_model import open_merged
from noria.runtime.batch.job_plan import work_of
from noria.runtime.checkpoint import load_params, open_model, save_orbax

pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]

TARGETS = {
    "smollm2": [["q_proj", "v_proj"], ["k_proj", "o_proj", "up_proj", "down_proj"]],
    "phi3-partial": [["qkv_proj", "o_proj"], ["gate_up_proj"]],
    "deepseek-v2": [["q_b_proj", "kv_a_proj_with_mqa", "o_proj"], ["kv_b_proj", "q_a_proj"]],
}
SHARDS = {"smollm2": 6}


def sharding():
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def load(files, arrangement):
    abstract = AbstractModel(files.spec.config, arrangement).abstract_parameters(jnp.float32)
    return load_params(files.spec.arranged(arrangement), files.tensors, abstract, sharding())


def change(down, up, inputs):
    """Return the product of the matrices of one layer, as a weight."""
    product = np.tensordot(down, np.moveaxis(up, inputs[-1], 0), 1)
    return np.moveaxis(product, range(len(inputs)), inputs)


@pytest.mark.parametrize("name", TARGETS)
def test_arrays_have_the_products_of_merged_adapters(name, tmp_path):
    (case,) = (case for case in CASES if case.name == name)
    save_reference(case, tmp_path / "base")
    paths = {}
    for number, targets in enumerate(TARGETS[name]):
        path = paths[f"a{number}"] = tmp_path / f"a{number}"
        write_adapter(tmp_path / "base", path, r=2 + number, lora_alpha=3, target_modules=targets)
    scanned = Arrangement(scan_layers=True, head_shards=SHARDS.get(name, 1))
    for arrangement in (AS_PUBLISHED, scanned):
        with open_model(tmp_path / "base") as files:
            adapters, base = AdapterSet.open(files, paths), load(files, arrangement)
            grid = adapters.grid()
            definition = AbstractModel(files.spec.config, arrangement, adapters=grid)
            shardings = dict.fromkeys(definition.abstract_parameters("float32"), sharding())
            arrays = load_arrays(definition, adapters, jnp.float32, shardings)
            assert "_weights" not in vars(adapters), "the host keeps no numbers during a job"
        merged = []
        for path in paths.values():
            with open_merged(tmp_path / "base", path) as files:
                merged.append(load(files, arrangement))
        for parameter, rank in definition.adapted.items():
            down, up = (np.asarray(arrays[parameter + end]) for end in (DOWN, UP))
            inputs = definition.weights[parameter][1]
            layers = range(len(down)) if ":" in parameter else [...]
            for number, parameters in enumerate(merged):
                own = slice(rank * number, rank * (number + 1))
                ours = [
                    change(
                        down[layer][..., own],
                        np.take(up[layer], range(own.start, own.stop), inputs[-1]),
                        inputs,
                    )
                    for layer in layers
                ]
                expected = np.asarray(parameters[parameter] - base[parameter])
                np.testing.assert_allclose(
                    np.stack(ours).reshape(expected.shape),
                    expected,
                    rtol=0,
                    atol=FLOAT32_ELEMENTWISE,
                )


def test_models_of_every_format_have_the_same_arrays(tmp_path):
    (case,) = (case for case in CASES if case.name == "smollm2")
    save_reference(case, tmp_path / "base")
    write_adapter(tmp_path / "base", tmp_path / "a", r=2, target_modules=["k_proj", "o_proj"])
    with open_model(tmp_path / "base") as files:
        config = files.spec.config
        save_orbax(tmp_path / "orbax", load(files, AS_PUBLISHED), family="llama", config=config)
    found = []
    for kind in ("base", "orbax"):
        with open_model(tmp_path / kind) as files:
            adapters = AdapterSet.open(files, {"a": tmp_path / "a"})
            definition = AbstractModel(files.spec.config, adapters=adapters.grid())
            shardings = dict.fromkeys(definition.abstract_parameters("float32"), sharding())
            found.append(load_arrays(definition, adapters, jnp.float32, shardings))
    assert found[0].keys() == found[1].keys()
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name])
    target, numbers, grid = find_target("cpu"), Numbers("float32"), definition.adapters
    sizes = [work_of(config, numbers, None, target, x).parameter_bytes for x in (None, grid)]
    assert sizes[1] - sizes[0] == sum(array.nbytes for array in found[0].values())
