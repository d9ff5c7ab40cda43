"""A merged adapter gives the weights that peft's `merge_and_unload` gives, for many families."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import CASES, save_reference
from memory_tensors import Arrays
from peft_adapters import write_adapter
from tolerances import FLOAT32_ELEMENTWISE

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.config import AS_PUBLISHED, Arrangement
from noria.modelzoo.families.hugging_face import NAMES
from noria.modelzoo.families.sources import parameter_sources
from noria.runtime.adapters.merged_model import PublishedTensors, open_merged
from noria.runtime.checkpoint import load_params, open_model, save_orbax
from noria.runtime.checkpoint.coverage import filled_shape
from noria.runtime.checkpoint.loader import read_parameter
from noria.runtime.checkpoint.published_tensors import publish

pytestmark = [
    pytest.mark.reference,
    # peft calls parts of transformers that will be removed, and advises about embeddings
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
OPTIONS = {
    "plain": ("llama-2", {"r": 4, "lora_alpha": 12, "target_modules": [*ATTENTION, *MLP]}),
    "rslora": ("smollm2", {"r": 4, "use_rslora": True, "target_modules": "all-linear"}),
    "dora": ("llama-3.2-new", {"r": 3, "use_dora": True, "target_modules": [*ATTENTION, *MLP]}),
    "fused": ("phi3-partial", {"r": 4, "target_modules": ["qkv_proj", "gate_up_proj"]}),
    "fused dora": ("phi3-partial", {"r": 4, "use_dora": True, "target_modules": r".*_proj"}),
    "latent": (
        "deepseek-v2",
        {"r": 4, "target_modules": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]},
    ),
    "embeddings": ("llama-2", {"r": 4, "target_modules": ["embed_tokens", "v_proj", "lm_head"]}),
    "saved": ("llama-2", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}),
    "patterns": (
        "llama-2",
        {
            "r": 4,
            "target_modules": ["q_proj", "v_proj"],
            "layers_to_transform": [1],
            "rank_pattern": {"layers.1.self_attn.v_proj": 2},
            "alpha_pattern": {"q_proj": 5},
        },
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_weights_are_those_that_peft_merges(name, tmp_path):
    case_name, options = OPTIONS[name]
    (case,) = (case for case in CASES if case.name == case_name)
    save_reference(case, tmp_path / "base")
    write_adapter(tmp_path / "base", tmp_path / "adapter", **options).save_pretrained(
        tmp_path / "merged", save_original_format=not case.is_fused
    )
    changed = 0
    with (
        open_model(tmp_path / "base") as base,
        open_model(tmp_path / "merged") as expected,
        open_merged(tmp_path / "base", tmp_path / "adapter") as merged,
    ):
        assert merged.fingerprint() == base.fingerprint()
        assert merged.weights_digest().result() != base.weights_digest().result()
        assert merged.tensors.tensors.keys() == expected.tensors.tensors.keys()
        for tensor in expected.tensors.tensors:
            whole = merged.tensors.read(tensor)
            np.testing.assert_allclose(
                whole, expected.tensors.read(tensor), rtol=0, atol=FLOAT32_ELEMENTWISE
            )
            box = (slice(3, 7),) * whole.ndim
            np.testing.assert_allclose(
                merged.tensors.read(tensor, box), whole[box], rtol=0, atol=FLOAT32_ELEMENTWISE
            )
            changed += not np.array_equal(whole, base.tensors.read(tensor))
    assert changed


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "down_proj", "embed_tokens"]},
        {"target_modules": r"layers\.0\..*_proj"},
        {"target_modules": ATTENTION, "layers_to_transform": [1], "layers_pattern": "layers"},
    ],
)
def test_an_adapter_of_a_model_without_its_head_is_merged(options, tmp_path):
    (case,) = (case for case in CASES if case.name == "llama-2")
    save_reference(case, tmp_path / "base")
    merged = write_adapter(tmp_path / "base", tmp_path / "adapter", kind="AutoModel", **options)
    merged.save_pretrained(tmp_path / "bare")
    changed = 0
    with (
        open_model(tmp_path / "base") as base,
        open_model(tmp_path / "bare") as expected,
        open_merged(tmp_path / "base", tmp_path / "adapter") as whole,
        open_merged(tmp_path / "bare", tmp_path / "adapter") as bare,
    ):
        assert whole.tensors.tensors.keys() - bare.tensors.tensors.keys() >= {"lm_head.weight"}
        for tensor in expected.tensors.tensors:
            before, array = (x.tensors.read(f"model.{tensor}") for x in (base, whole))
            once = expected.tensors.read(tensor)
            np.testing.assert_allclose(array, once, rtol=0, atol=FLOAT32_ELEMENTWISE)
            # the bare model has been changed once already; peft saves the table of tokens whole
            change = 0 if tensor == "embed_tokens.weight" else once - before
            twice = bare.tensors.read(tensor)
            np.testing.assert_allclose(twice, once + change, rtol=0, atol=FLOAT32_ELEMENTWISE)
            changed += not np.array_equal(array, before)
    assert changed


def test_an_adapter_is_merged_into_every_format(tmp_path):
    (case,) = (case for case in CASES if case.name == "smollm2")
    save_reference(case, tmp_path / "hf")
    write_adapter(tmp_path / "hf", tmp_path / "adapter", r=3, use_dora=True, target_modules=MLP)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def load(files, arrangement=AS_PUBLISHED):
        definition = AbstractModel(files.spec.config, arrangement)
        abstract = definition.abstract_parameters(jnp.float32)
        return load_params(files.spec.arranged(arrangement), files.tensors, abstract, sharding)

    with open_model(tmp_path / "hf") as files:
        save_orbax(tmp_path / "orbax", load(files), family="llama", config=files.spec.config)
    for arrangement in (AS_PUBLISHED, Arrangement(scan_layers=True, head_shards=6)):
        loaded = []
        for kind in ("hf", "orbax"):
            with open_merged(tmp_path / kind, tmp_path / "adapter") as files:
                loaded.append(load(files, arrangement))
        assert loaded[0].keys() == loaded[1].keys()
        for name, array in loaded[0].items():
            np.testing.assert_allclose(loaded[1][name], array, rtol=0, atol=FLOAT32_ELEMENTWISE)


@pytest.mark.parametrize("name", ["smollm2", "phi3-partial", "command-r"])
def test_tensors_of_another_order_are_those_of_hugging_face(name, tmp_path):
    case = next(case for case in CASES if case.name.startswith(name))
    save_reference(case, tmp_path)
    with open_model(tmp_path) as files:
        published, names = files.spec.sources, files.spec.names
        assert names is not None
        # as in GGUF files: one tensor for each of query, key and value, with pairs side by side
        other = replace(NAMES, is_interleaved=not names.is_interleaved)
        own = parameter_sources(files.spec.config, other)
        arrays = {}
        for source in published:
            shape = filled_shape(source, files.tensors)
            whole = (slice(None),) * len(shape)
            array = read_parameter(source, files.tensors, whole, shape, np.float32)
            (other_source,) = (s for s in own if s.parameter == source.parameter)
            arrays |= publish(other_source, array)
        tensors = PublishedTensors(Arrays(arrays), own, published)
        for tensor, info in tensors.tensors.items():
            np.testing.assert_array_equal(tensors.read(tensor), files.tensors.read(tensor))
            assert info.shape == files.tensors.tensors[tensor].shape
