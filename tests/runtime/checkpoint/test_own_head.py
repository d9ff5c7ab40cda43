"""A head beside a tied embedding: one of its own is used and named, and a copy is not read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import CASES, prompts, save_reference
from published_formats import FORMATS, PublishedForm
from safetensors.numpy import load_file, save_file
from tiny_llama import CONFIG, random_tensors, save
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.abstract_model import AbstractModel
from noria.runtime.checkpoint import load_params, open_model, own_head
from noria.runtime.errors import CheckpointMismatch

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TENSORS = random_tensors(CONFIG)
OWN = {HEAD: np.random.default_rng(1).standard_normal(TENSORS[EMBEDDING].shape, np.float32)}
NOTE = "tie_word_embeddings = True (lm_head.weight differs from the embedding, and is used)"

TIED = ("qwen3", "gemma2", "command-r")
"""Cases of families that tie by a key or by default."""


def load(path):
    with open_model(path) as files:
        abstract = AbstractModel(files.spec.config).abstract_parameters(jnp.float32)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        parameters = load_params(files.spec, files.tensors, abstract, device)
        # an equal copy is counted, and needs no line
        assert not files.unread.tensors
        assert files.unread.repeating in ({}, {HEAD: 1})
        return parameters, files.unread.keys


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_head_that_differs_is_used_as_if_the_model_tied_nothing(tmp_path):
    untied = CONFIG | {"tie_word_embeddings": False}
    expected, nothing = load(save(tmp_path / "untied", untied, TENSORS | OWN))
    found, unread = load(save(tmp_path / "tied", CONFIG, TENSORS | OWN))
    assert_equal(found, expected)
    assert (nothing, unread) == ((), (NOTE,))
    np.testing.assert_array_equal(found["head.table"], OWN[HEAD])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_head_in_codes_is_used(tmp_path, form: PublishedForm):
    stored, numbers = form.write(HEAD, OWN[HEAD])
    config = CONFIG | {"quantization_config": form.config}
    found, unread = load(save(tmp_path, config, TENSORS | stored))
    np.testing.assert_array_equal(found["head.table"], numbers)
    assert unread == (NOTE,)


def test_a_copy_of_the_embedding_is_not_read(tmp_path):
    expected, _ = load(save(tmp_path / "bare", CONFIG, TENSORS))
    copy = {HEAD: TENSORS[EMBEDDING].copy()}
    found, unread = load(save(tmp_path / "copy", CONFIG, TENSORS | copy))
    assert_equal(found, expected)
    assert unread == ()


@pytest.mark.parametrize("piece_bytes", [1, 300, 2**20])
def test_a_head_may_differ_in_its_last_number_alone(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(own_head, "PIECE_BYTES", piece_bytes)
    head = TENSORS[EMBEDDING].copy()
    head[-1, -1] += 1
    found, _ = load(save(tmp_path, CONFIG, TENSORS | {HEAD: head}))
    np.testing.assert_array_equal(found["head.table"], head)


def test_a_head_of_another_shape_is_refused(tmp_path):
    save(tmp_path, CONFIG, TENSORS | {HEAD: OWN[HEAD][:-1]})
    with pytest.raises(CheckpointMismatch, match=r"head\.table: expected \(32, 16\), got \(31, 16"):
        load(tmp_path)


def test_a_plan_without_weights_sees_the_head_where_they_are_present(tmp_path):
    save(tmp_path, CONFIG, TENSORS | OWN)
    with open_model(tmp_path, needs_weights=False) as files:
        assert not files.spec.config.tie_embeddings
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with open_model(tmp_path, needs_weights=False) as files:
        assert files.spec.config.tie_embeddings


@pytest.mark.reference
@pytest.mark.parametrize("name", TIED)
def test_families_answer_with_an_own_head_as_the_reference_does(tmp_path, name):
    import torch
    from transformers import AutoModelForCausalLM

    case = next(case for case in CASES if case.name == name)
    save_reference(case, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shape = tensors[EMBEDDING].shape
    tensors[HEAD] = 0.1 * np.random.default_rng(0).standard_normal(shape, np.float32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    prompt = max(prompts(case), key=len)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(torch.tensor([prompt])).logits[0]
    parameters, unread = load(tmp_path)
    assert NOTE in unread
    with open_model(tmp_path) as files:
        decoder = AbstractModel(files.spec.config).bind(parameters)

    @jax.jit
    def logprobs(tokens_BT):
        x_BTD, _ = decoder.forward(tokens_BT, jnp.array([len(prompt)]))
        return jax.nn.log_softmax(decoder.logits(x_BTD)[0])

    ours = logprobs(jnp.asarray(prompt, jnp.int32)[None])
    expected = torch.log_softmax(logits, dim=-1).numpy()
    np.testing.assert_allclose(ours, expected, rtol=0, atol=FLOAT32_MODEL_LOGPROB)
