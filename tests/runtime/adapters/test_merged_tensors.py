"""Threads that read merged tensors at once share what is computed from a whole tensor."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from memory_tensors import Arrays

from noria.modelzoo.families.mapping import ParameterSource, TensorPart
from noria.runtime.adapters import merged_model
from noria.runtime.adapters.adapter import AdapterWeights, LoraPair
from noria.runtime.adapters.merged_model import MergedTensors, PublishedTensors
from noria.runtime.checkpoint.loader import read_parameter


def test_threads_that_read_boxes_of_a_tensor_hold_its_parameter_once(monkeypatch):
    num_read = 0

    def slow(*arguments):
        nonlocal num_read
        num_read += 1
        time.sleep(0.02)
        return read_parameter(*arguments)

    monkeypatch.setattr(merged_model, "read_parameter", slow)
    array = np.arange(32, dtype=np.float32).reshape(8, 4)
    own = [ParameterSource("up", (TensorPart("own", "f d -> d f"),))]
    published = [ParameterSource("up", (TensorPart("published", "f d -> d f"),))]
    tensors = PublishedTensors(Arrays({"own": array}), own, published)
    with ThreadPoolExecutor(4) as pool:
        boxes = [(slice(i, i + 1), slice(0, 4)) for i in range(8)]
        rows = list(pool.map(lambda box: tensors.read("published", box), boxes))
    np.testing.assert_array_equal(np.concatenate(rows), array)
    assert num_read == 1


def test_threads_that_read_boxes_of_a_tensor_compute_its_lengths_once(tmp_path):
    """DoRA gives rows lengths of their own, which depend on the whole tensor."""

    class Slow(Arrays):
        num_whole = 0

        def read(self, name, index=None):
            if index is None:
                self.num_whole += 1
                time.sleep(0.02)
            return super().read(name, index)

    rng = np.random.default_rng(0)
    up, down = rng.random((8, 2), np.float32), rng.random((2, 4), np.float32)
    pair = LoraPair(down, up, 1.0, rng.random(8, np.float32))
    source = Slow({"w": rng.random((8, 4), np.float32)})
    tensors = MergedTensors(source, AdapterWeights({"w": pair}, {}), tmp_path)
    with ThreadPoolExecutor(4) as pool:
        boxes = [(slice(i, i + 1), slice(0, 4)) for i in range(8)]
        rows = list(pool.map(lambda box: tensors.read("w", box), boxes))
    assert source.num_whole == 1
    np.testing.assert_array_equal(np.concatenate(rows), tensors.read("w"))
