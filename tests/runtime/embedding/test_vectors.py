"""Shorter vectors, similarities and probabilities, against plain formulas."""

import json

import numpy as np
import pytest
from tolerances import FLOAT32_ELEMENTWISE

from noria.modelzoo.pooling_config import Pooling, Projection
from noria.runtime.embedding.vectors import as_numbers, cosines, probabilities, shortened
from noria.runtime.errors import RowError

VECTORS = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


def test_shorter_vectors_have_length_one_only_if_the_model_normalises():
    plain = shortened(VECTORS, 3, normalises=False)
    np.testing.assert_array_equal(plain, VECTORS[:, :3])
    normed = shortened(VECTORS, 3, normalises=True)
    expected = VECTORS[:, :3] / np.linalg.norm(VECTORS[:, :3], axis=1, keepdims=True)
    np.testing.assert_allclose(normed, expected, atol=FLOAT32_ELEMENTWISE)
    assert normed.dtype == np.float32
    for dimensions in (None, 6):
        np.testing.assert_array_equal(shortened(VECTORS, dimensions, normalises=True), VECTORS)
    with pytest.raises(RowError, match="expected at most 6"):
        shortened(VECTORS, 7, normalises=True)


def test_cosines_pair_one_text_with_all_others_or_each_with_its_own():
    def cosine(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    expected = [cosine(VECTORS[0], other) for other in VECTORS[1:]]
    np.testing.assert_allclose(cosines(VECTORS, 1), expected, atol=FLOAT32_ELEMENTWISE)
    expected = [cosine(VECTORS[i], VECTORS[2 + i]) for i in range(2)]
    np.testing.assert_allclose(cosines(VECTORS, 2), expected, atol=FLOAT32_ELEMENTWISE)


def test_rounding_makes_no_cosine_larger_than_1():
    vectors = np.random.default_rng(0).normal(size=(200, 384)).astype(np.float32)
    found = cosines(np.concatenate([vectors, vectors]), 200)
    assert found.max() == 1 and found.min() > 1 - FLOAT32_ELEMENTWISE
    assert cosines(np.concatenate([vectors, -vectors]), 200).min() == -1
    assert np.isnan(cosines(np.full((2, 3), np.nan, np.float32), 1)).all()


def test_probabilities_follow_the_model():
    def of(scores, **options):
        pooling = Pooling("first", (Projection(6),), labels=tuple("abcdef"), scores=scores)
        return probabilities(VECTORS, pooling, **{"use_activation": True, **options})

    exponentials = np.exp(VECTORS)
    softmax = exponentials / exponentials.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(of("softmax"), softmax, atol=FLOAT32_ELEMENTWISE)
    np.testing.assert_allclose(of("sigmoid"), 1 / (1 + np.exp(-VECTORS)), atol=FLOAT32_ELEMENTWISE)
    np.testing.assert_array_equal(of("none"), VECTORS)
    np.testing.assert_array_equal(of("softmax", use_activation=False), VECTORS)


def test_an_output_far_from_0_has_a_score_without_a_warning():
    pooling = Pooling("first", (Projection(2),), labels=("a", "b"), scores="sigmoid")
    outputs = np.array([[-200, 200]], np.float32)
    np.testing.assert_array_equal(probabilities(outputs, pooling, use_activation=True), [[0, 1]])


def test_numbers_in_json_are_read_as_the_same_float32():
    numbers = np.frombuffer(np.random.default_rng(1).bytes(4000), np.float32)
    numbers = np.concatenate([numbers[np.isfinite(numbers)], np.float32([0, -0.0, 1e-45, 3.4e38])])
    text = json.dumps(as_numbers(numbers))
    np.testing.assert_array_equal(np.array(json.loads(text), np.float32), numbers)
    assert len(text) < 0.7 * len(json.dumps(numbers.tolist()))
