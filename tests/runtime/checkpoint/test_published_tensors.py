"""Parameters that become published tensors and are read again are the same, bit for bit."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from alike import changed

from noria.compile.abstract_model import AbstractModel
from noria.compile.weight_rules import WeightRules
from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.families.hugging_face import NAMES
from noria.modelzoo.families.registry import FAMILIES
from noria.modelzoo.families.sources import parameter_sources
from noria.modelzoo.moe_config import MoeConfig, Routing
from noria.modelzoo.weights.weight_formats import SCALES, WeightFormat
from noria.runtime.checkpoint.loader import read_parameter
from noria.runtime.checkpoint.published_tensors import publish
from noria.runtime.checkpoint.tensor_source import TensorInfo

DENSE = DecoderConfig.alike(
    vocab_size=19,
    embed=16,
    mlp=12,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    windows=(None,),
    max_position=32,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm="head",
)
SPARSE = changed(DENSE, mlp_bias=False, moe=MoeConfig(Routing(3, 2), 12, shared_mlp=8))
NAMES_OF = {family.name: replace(NAMES, **family.hf_names) for family in FAMILIES}
CASES = {
    "llama": (DENSE, NAMES),
    "fused": (changed(DENSE, qkv_bias=False, mlp_bias=False), NAMES_OF["phi3"]),
    "interleaved": (DENSE, NAMES_OF["cohere"]),
    "experts": (SPARSE, NAMES),
}


class Arrays:
    """A tensor source in memory."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.tensors = {
            name: TensorInfo(x.shape, x.dtype, "F32", x.nbytes) for name, x in arrays.items()
        }

    def read(self, name, index=None):
        return np.array(self.arrays[name][index or ...])


@pytest.mark.parametrize("name", CASES)
def test_published_parameters_are_read_as_the_same(name):
    config, names = CASES[name]
    shapes = AbstractModel(config).abstract_parameters(jnp.float32)
    rng = np.random.default_rng(0)
    for source in parameter_sources(config, names):
        shape = shapes[source.parameter].shape
        parameter = rng.normal(size=shape).astype(np.float32)
        tensors = publish(source, parameter)
        assert set(tensors) == {n for part in source.parts for n in part.tensors}
        whole = (slice(None),) * len(shape)
        got = read_parameter(source, Arrays(tensors), whole, shape, np.float32)
        np.testing.assert_array_equal(got, parameter)


@pytest.mark.parametrize("name", CASES)
def test_scales_follow_the_rows_of_their_matrix(name):
    """Codes times scales of a published matrix are the published values of the weight."""
    config, names = CASES[name]
    definition = AbstractModel(config, weight_rules=WeightRules(WeightFormat("int4", 4)))
    shapes = definition.abstract_parameters(jnp.float32)
    rng = np.random.default_rng(0)
    sources = {source.parameter: source for source in parameter_sources(config, names)}
    assert definition.quantisations
    for path, quantisation in definition.quantisations.items():
        codes = rng.integers(-7, 8, shapes[path].shape).astype(np.float32)
        scales = rng.normal(size=shapes[path + SCALES].shape).astype(np.float32)
        axis = quantisation.inputs[-1]
        grouped = codes.reshape(quantisation.replace_inputs(codes.shape, scales.shape[axis], -1))
        values = (grouped * np.expand_dims(scales, axis)).reshape(codes.shape)
        source = sources[path]
        scales_of = publish(source, scales, is_scales=True)
        wanted = publish(source, values)
        for tensor, matrix in publish(source, codes).items():
            by_feature = np.repeat(scales_of[tensor], 4, axis=-1)
            np.testing.assert_array_equal(matrix * by_feature, wanted[tensor])
