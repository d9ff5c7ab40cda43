"""Sessions that embed: every text has the vector of its own, whatever runs beside it."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TWO_LAYERS, random_parameters

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import build, plan_graphs
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.targets import find_target
from noria.modelzoo.pooling_config import Pooling
from noria.runtime.devices.host_arrays import HostArrays
from noria.runtime.embedding.texts import pack, whole_text
from noria.runtime.engine.embedding import EmbeddingSession
from noria.runtime.engine.model_runner import ModelRunner
from noria.runtime.errors import RowError
from noria.runtime.request import Request, SamplingParams

CONFIG = replace(TWO_LAYERS, has_head=False, pooling=Pooling("last", normalises=True))
GRID = BucketGrid(24, ((6, 4), (24, 2)), 0, embed=True)
PARAMS = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=0)


@pytest.fixture(scope="module")
def model():
    placement = find_target("cpu").placement()
    definition = AbstractModel(CONFIG)
    graphs = build(GRID, plan_graphs(definition, GRID, placement, jnp.dtype(jnp.float32)))
    assert set(map(str, graphs.executables)) == {"embed 6x4", "embed 24x2"}
    return graphs, random_parameters(definition), HostArrays(placement.replicated)


def session(model, parameters=None, **options) -> EmbeddingSession:
    graphs, own, host = model
    sizes = {"vocab_size": CONFIG.vocab_size, "max_position": CONFIG.max_position}
    return EmbeddingSession(runner=ModelRunner(graphs, parameters or own, host), **sizes, **options)


def request(name: str, *texts: list[int]) -> Request:
    return Request(name, pack(list(map(whole_text, texts))), PARAMS)


def random_texts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in rng.integers(1, 25, count)]


def vectors_of(session: EmbeddingSession, requests: list[Request]) -> dict[str, np.ndarray]:
    for each in requests:
        session.submit(each)
    outputs = session.run()
    assert len(outputs) == len(requests) and not session.unfinished
    assert all(output.vectors is not None for output in outputs)
    return {output.request_id: output.vectors for output in outputs}  # pyright: ignore


def test_a_token_that_stands_for_an_image_is_refused_by_its_key(model):
    reader = session(model, other_tokens={"image_token_id": 9})
    reader.submit(request("text", [5, 8]))
    with pytest.raises(RowError, match=r"input: .* the id 9, the image_token_id of config\.json"):
        reader.submit(request("image", [5, 9, 8]))


def test_vectors_are_the_same_bits_alone_in_any_order_and_in_lists(model):
    texts = random_texts(13)
    requests = [request(str(i), text) for i, text in enumerate(texts)]
    together = vectors_of(session(model), requests)
    backwards = vectors_of(session(model), requests[::-1])
    alone = {r.request_id: vectors_of(session(model), [r])[r.request_id] for r in requests[:4]}
    (in_a_list,) = vectors_of(session(model), [request("all", *texts)]).values()
    for name, vector in together.items():
        np.testing.assert_array_equal(vector, backwards[name])
        np.testing.assert_array_equal(vector[0], in_a_list[int(name)])
        np.testing.assert_allclose(np.linalg.norm(vector), 1, atol=1e-6)
    for name, vector in alone.items():
        np.testing.assert_array_equal(vector, together[name])
    assert len({tuple(vector[0]) for vector in together.values()}) == len(texts)


def test_full_batches_run_first_and_the_rest_at_the_end(model):
    own = session(model)
    texts = [[1] * 9] + [[1, 2]] * 4
    for i, text in enumerate(texts):
        assert own.wants_more
        own.submit(request(str(i), text))
    assert not own.wants_more
    assert own.dispatch().bucket == (6, 4, None)
    assert own.wants_more and not own.collect()
    assert len(own.receive()) == 4 * CONFIG.embed * 4
    assert [output.request_id for output in own.collect()] == ["1", "2", "3", "4"]
    assert own.dispatch().bucket == (24, 2, None) and own.unfinished == 1
    own.receive()
    assert [output.request_id for output in own.collect()] == ["0"]
    assert own.dispatch() is None and own.receive() == b""
    found = own.statistics()
    assert found["padding"]["real_tokens"] == 17 and found["padding"]["computed_tokens"] == 72
    assert found["compiles_during_run"] == 0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ([], "empty_prompt"),
        ([1, 151], "invalid_token_id"),
        ([1] * 25, "context_length_exceeded"),
        ([1] * 200, "context_length_exceeded"),
    ],
)
def test_a_text_that_cannot_run_is_refused_before_any_of_its_request_is_queued(model, text, code):
    own = session(model)
    with pytest.raises(RowError) as refusal:
        own.submit(request("r", [1, 2], text))
    assert refusal.value.code == code and "input[1]" in (refusal.value.param or "")
    assert not own.unfinished and own.dispatch() is None


def test_a_drain_drops_requests_of_which_nothing_has_run(model):
    own = session(model)
    own.submit(request("begun", *[[1, 2]] * 6))
    own.submit(request("waiting", [1] * 9))
    own.dispatch()
    assert own.drain() == ["waiting"]
    assert [output.request_id for output in own.run()] == ["begun"]


def test_vectors_that_are_not_finite_are_an_error_of_their_row_alone(model):
    _, parameters, _ = model
    table = parameters["embedding.table"].at[7].set(jnp.nan)
    own = session(model, parameters | {"embedding.table": table})
    own.submit(request("good", [1, 2]))
    own.submit(request("bad", [1, 7], [1, 2]))
    outputs = {output.request_id: output for output in own.run()}
    assert outputs["good"].error is None
    assert outputs["bad"].error is not None and outputs["bad"].error.code == "nonfinite_logits"
    assert outputs["bad"].vectors is None


def test_an_abandoned_session_can_be_used_again(model):
    own = session(model)
    own.submit(request("lost", [1, 2], [3] * 9))
    own.dispatch()
    own.abandon()
    assert not own.unfinished
    assert list(vectors_of(own, [request("next", [1, 2])])) == ["next"]


def test_an_abandoned_session_returns_no_request_that_ended_before(model):
    own = session(model)
    own.submit(request("lost", [1, 2]))
    own.dispatch()
    own.receive()
    own.abandon()
    assert not own.unfinished and not own.collect()
