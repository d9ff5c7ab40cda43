"""Models that embed give the vectors of their published implementation.

Transformers saves each model; noria opens and loads it like a user's model. A vector depends on its
own text alone, bit for bit: other rows, another order and other padding change nothing.
"""

from collections import Counter
from dataclasses import replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from embedder_cases import CASES, LENGTHS, EmbedderCase, save_reference, texts
from tolerances import FLOAT32_ELEMENTWISE

from noria.compile.abstract_model import AbstractModel
from noria.compile.graphs.embed_step import embed_step
from noria.modelzoo.config import AS_PUBLISHED, Arrangement
from noria.modelzoo.families.registry import ENCODERS
from noria.runtime.checkpoint import open_model
from noria.runtime.checkpoint.loader import load_params

pytestmark = pytest.mark.reference

BUCKET_LENGTH, BATCH = 24, 6


class LoadedCase:
    """A case as noria reads it, with the vectors of transformers."""

    def __init__(self, case: EmbedderCase, directory, arrangement: Arrangement = AS_PUBLISHED):
        self.reference = save_reference(case, directory)
        self.texts = texts(case)
        with open_model(str(directory)) as files:
            self.definition = AbstractModel(files.spec.config, arrangement)
            abstract = self.definition.abstract_parameters(jnp.float32)
            sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            self.parameters = load_params(files.spec, files.tensors, abstract, sharding)

    def vectors(self, rows: list[int | None], padding: int = 7) -> np.ndarray:
        """Return the vectors of some texts in this order; None is a row without a text."""
        tokens_BT = np.full((BATCH, BUCKET_LENGTH), padding, np.int32)
        count_B = np.zeros(BATCH, np.int32)
        for row, index in enumerate(rows):
            if index is not None:
                ids = self.texts[index]
                tokens_BT[row, : len(ids)], count_B[row] = ids, len(ids)
        return np.asarray(self._embed(self.parameters, tokens_BT, count_B).vectors_BD)

    @cached_property
    def _embed(self):
        @jax.jit
        def embed(parameters, tokens_BT, count_B):
            return embed_step(self.definition.bind(parameters), tokens_BT, count_B, count_B)

        return embed


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def loaded(request, tmp_path_factory) -> LoadedCase:
    return LoadedCase(request.param, tmp_path_factory.mktemp(request.param.name))


def assert_close(loaded: LoadedCase) -> None:
    ours = loaded.vectors(list(range(len(LENGTHS))))[: len(LENGTHS)]
    assert np.abs(loaded.reference).max() > 0.1
    np.testing.assert_allclose(ours, loaded.reference, rtol=0, atol=FLOAT32_ELEMENTWISE)


def test_vectors_are_those_of_transformers(loaded: LoadedCase):
    assert_close(loaded)


def test_a_vector_does_not_depend_on_other_rows_their_order_or_padding(loaded: LoadedCase):
    whole = loaded.vectors([0, 1, 2, 3, 0, 1])
    other = loaded.vectors([None, 3, 1, None, 0, 2], padding=80)
    for row, index in ((1, 3), (2, 1), (4, 0), (5, 2)):
        np.testing.assert_array_equal(other[row], whole[index])


@pytest.mark.parametrize(("name", "num_layers"), [("minilm", 6), ("modernbert", 8)])
def test_scanned_layers_give_the_vectors_of_transformers(name, num_layers, tmp_path):
    """The first layer of ModernBERT has no norm, so the scan begins after it."""
    (case,) = (case for case in CASES if case.name == name)
    case = replace(case, options={**case.options, "num_hidden_layers": num_layers})
    loaded = LoadedCase(case, tmp_path, Arrangement(scan_layers=True))
    assert any(":" in name for name in loaded.parameters)
    assert_close(loaded)


def test_every_family_of_encoders_has_at_least_two_cases():
    counts = Counter(case.family for case in CASES)
    assert all(counts[family.name] >= 2 for family in ENCODERS)
