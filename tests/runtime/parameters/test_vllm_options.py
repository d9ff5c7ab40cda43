"""Keyword arguments of vLLM: arguments without effect are accepted, others refused by name."""

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest

from noria.runtime import LLM, SamplingParams
from noria.runtime.parameters.vllm_options import ANY, CALL, CHAT, MODEL, SAMPLING


def test_sampling_parameters_that_change_nothing_are_accepted():
    plain = SamplingParams(temperature=0, max_tokens=4)
    brought = {name: option.values[0] for name, option in SAMPLING.items() if option is not ANY}
    same = SamplingParams(temperature=0, max_tokens=4, output_kind="final", **brought)
    assert same == plain and repr(same) == repr(plain) and hash(same.stop) == hash(plain.stop)
    assert replace(same, n=2).n == 2


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("detokenize", False, "Read token_ids"),
        ("best_of", 4, "Ask for n"),
        ("logits_processors", [print], "no such feature"),
        ("truncate_prompt_tokens", 5, "shorten the prompt"),
    ],
)
def test_sampling_parameters_that_would_change_an_answer_are_refused(name, value, remedy):
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got .*{remedy}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("trust_remote_code", True, "No code that comes with a model is run"),
        ("tensor_parallel_size", 4, "layout='weight-stationary-1d'"),
        ("quantization", "awq", "numbers"),
        ("revision", "main", "hf download --revision"),
        ("tokenizer", "other", "model's folder"),
    ],
)
def test_a_model_is_refused_before_anything_of_it_is_read(name, value, remedy):
    with pytest.raises(ValueError, match=f"^{name}: expected .*{remedy}"):
        LLM("/nonexistent/model", **{name: value})


def test_a_name_that_vllm_does_not_have_is_unexpected():
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        SamplingParams(temprature=1)


@pytest.mark.parametrize(
    ("options", "function"),
    [(MODEL, LLM.__init__), (CALL, LLM.generate), (CHAT, LLM.chat), (SAMPLING, SamplingParams)],
)
def test_no_name_hides_a_parameter_of_ours(options, function):
    """The visible signature has only parameters with an effect."""
    assert not options.keys() & inspect.signature(function).parameters.keys()


def test_the_layout_that_a_remedy_names_is_there():
    from noria.runtime.files.layout_files import named_layout_tables

    assert "weight-stationary-1d" in named_layout_tables()


def test_scoring_takes_what_generating_does():
    model = SimpleNamespace(generate=lambda prompts, params, adapter: prompts)
    assert LLM.score(model, ["text"], use_tqdm=False) == ["text"]
    with pytest.raises(ValueError, match="lora_request: expected None"):
        LLM.score(model, ["text"], lora_request="adapter")
