"""Arranged weights: published tensors fill other shapes, and the model's answers stay the same."""

from dataclasses import replace

import numpy as np
import pytest

from noria.modelzoo.config import AS_PUBLISHED, Arrangement, DecoderConfig
from noria.modelzoo.families import gguf, hugging_face
from noria.modelzoo.families.family import ModelSpec
from noria.modelzoo.families.sources import parameter_sources
from noria.runtime.checkpoint.loader import read_parameter
from noria.runtime.checkpoint.tensor_source import TensorInfo

K, G, H, D, V = 3, 4, 8, 6, 11
CONFIG = DecoderConfig.alike(
    vocab_size=V,
    embed=D,
    mlp=5,
    num_query_heads=K * G,
    num_kv_heads=K,
    head_dim=H,
    windows=(None,),
    max_position=64,
    qkv_bias=True,
    sinks=True,
)
INTERLEAVED = replace(gguf.NAMES, is_interleaved=True)


class Arrays:
    """A tensor source over random arrays of the published shapes."""

    def __init__(self, names):
        layer = {"query": K * G * H, "key": K * H, "value": K * H}
        shapes = {f"{names.embedding}.weight": (V, D), f"{names.head}.weight": (V, D)}
        for field, rows in layer.items():
            shapes[f"{getattr(names, field).format(i=0)}.weight"] = (rows, D)
            shapes[f"{getattr(names, field).format(i=0)}.bias"] = (rows,)
        shapes[f"{names.output.format(i=0)}.weight"] = (D, K * G * H)
        shapes[names.sinks.format(i=0)] = (K * G,)
        rng = np.random.default_rng(0)
        self.arrays = {k: rng.standard_normal(s, np.float32) for k, s in shapes.items()}
        self.tensors = {
            k: TensorInfo(a.shape, a.dtype, "F32", a.nbytes) for k, a in self.arrays.items()
        }

    def read(self, name, index=None):
        return self.arrays[name] if index is None else self.arrays[name][index]


def filled(names, arrangement, parameter, shape, index=None):
    """Return a parameter, or a box of it, filled from an arrangement's sources."""
    sources = {s.parameter: s for s in parameter_sources(CONFIG, names, arrangement)}
    index = index or (slice(None),) * len(shape)
    return read_parameter(sources[parameter], Arrays(names), index, shape, np.dtype("f4"))


def reference(joined, copies, kv_axis):
    """Return the canonical `qkv` or `qkv_bias` with copies, head by head."""
    heads = []
    for k in range(K):
        queries, key_value = np.split(np.take(joined, k, kv_axis), [G], axis=kv_axis)
        for share in np.split(queries, copies, axis=kv_axis):
            heads.append(np.concatenate([share, key_value], axis=kv_axis))
    return np.stack(heads, axis=kv_axis)


@pytest.mark.parametrize("names", [hugging_face.NAMES, INTERLEAVED], ids=["hf", "interleaved"])
@pytest.mark.parametrize("copies", [1, 2, 4])
def test_each_copy_of_a_head_holds_its_share_of_the_queries_and_the_key_and_value(names, copies):
    arranged = Arrangement(head_shards=K * copies)
    Kr, Jr = K * copies, G // copies + 2
    qkv = filled(names, AS_PUBLISHED, "layers.0.attention.qkv", (D, K, G + 2, H))
    got = filled(names, arranged, "layers.0.attention.qkv", (D, Kr, Jr, H))
    np.testing.assert_array_equal(got, reference(qkv, copies, kv_axis=1))

    bias = filled(names, AS_PUBLISHED, "layers.0.attention.qkv_bias", (K, G + 2, H))
    got = filled(names, arranged, "layers.0.attention.qkv_bias", (Kr, Jr, H))
    np.testing.assert_array_equal(got, reference(bias, copies, kv_axis=0))

    output = filled(names, AS_PUBLISHED, "layers.0.attention.output", (K, G, H, D))
    got = filled(names, arranged, "layers.0.attention.output", (Kr, G // copies, H, D))
    np.testing.assert_array_equal(got, output.reshape(Kr, G // copies, H, D))

    sinks = filled(names, AS_PUBLISHED, "layers.0.attention.sinks", (K, G))
    got = filled(names, arranged, "layers.0.attention.sinks", (Kr, G // copies))
    np.testing.assert_array_equal(got, sinks.reshape(Kr, G // copies))


@pytest.mark.parametrize("names", [hugging_face.NAMES, INTERLEAVED], ids=["hf", "interleaved"])
def test_any_box_of_arranged_weights_equals_the_box_of_the_whole(names):
    shape = (D, 2 * K, G // 2 + 2, H)
    arranged = Arrangement(head_shards=2 * K)
    whole = filled(names, arranged, "layers.0.attention.qkv", shape)
    rng = np.random.default_rng(1)
    for _ in range(50):
        ends = [sorted(rng.integers(0, size + 1, 2)) for size in shape]
        index = tuple(slice(int(a), int(b)) for a, b in ends)
        box = filled(names, arranged, "layers.0.attention.qkv", shape, index)
        np.testing.assert_array_equal(box, whole[index])


@pytest.mark.parametrize("parameter", ["embedding.table", "head.table"])
def test_rows_past_the_vocabulary_are_zero(parameter):
    table = filled(hugging_face.NAMES, AS_PUBLISHED, parameter, (V, D))
    padded = filled(hugging_face.NAMES, Arrangement(padded_vocab=16), parameter, (16, D))
    np.testing.assert_array_equal(padded[:V], table)
    assert not padded[V:].any()


@pytest.mark.parametrize("copies", [3, 8])
def test_copies_that_cannot_share_the_queries_are_refused(copies):
    with pytest.raises(ValueError, match=f"divide its 4 query heads, got {copies}"):
        parameter_sources(CONFIG, hugging_face.NAMES, Arrangement(head_shards=K * copies))


def test_a_padded_vocabulary_that_drops_tokens_is_refused():
    with pytest.raises(ValueError, match="at least the 11 tokens of the vocabulary, got 8"):
        parameter_sources(CONFIG, hugging_face.NAMES, Arrangement(padded_vocab=8))


@pytest.mark.parametrize("field", ["head_shards", "padded_vocab"])
@pytest.mark.parametrize("size", [0, -1, 2.0])
def test_an_arrangement_of_no_sensible_size_is_refused(field, size):
    with pytest.raises(ValueError, match=f"{field}: expected a positive integer, got {size}"):
        Arrangement(**{field: size})


def test_a_spec_arranged_and_back_is_the_spec():
    names = hugging_face.NAMES
    spec = ModelSpec("llama", CONFIG, parameter_sources(CONFIG, names), (), names)
    arranged = spec.arranged(Arrangement(2, 16))
    assert arranged.sources == parameter_sources(CONFIG, names, Arrangement(2, 16))
    assert arranged != spec
    assert arranged.arranged(AS_PUBLISHED) == spec
