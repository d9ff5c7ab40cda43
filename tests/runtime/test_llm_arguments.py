"""Arguments of `LLM` and of its calls: wrong ones are refused by name, before a model is read."""

from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny import CONFIG

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.structured_grid import StructuredGrid
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.compile.targets import find_target
from noria.runtime import LLM, SamplingParams
from noria.runtime.devices.graph_memory import MEMORY_SHARE
from noria.runtime.errors import ConfigError
from noria.runtime.planning import plan_arguments
from noria.runtime.planning.plan_arguments import DEFAULT_SLOTS, PlanArguments
from noria.runtime.planning.target_work import work_of
from noria.runtime.structured.params import StructuredOutputsParams
from noria.runtime.text.chat_messages import read_messages
from noria.runtime.text.prompts import PromptReader, as_conversations, as_list, one_each

FORM = StructuredOutputsParams(choice=["yes"])
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("adapters", ["ad1"], "a mapping from names to folders, got"),
        ("merge_adapter", 5, "the folder of an adapter, got 5"),
        ("plan", 5, "a Plan, or the path"),
        ("dtype", None, "float32, bfloat16 or auto"),
        ("target", 5, "the name of a target"),
        ("layout", 5, "the name or the path of a layout"),
        ("experts", "drop", "an ExpertPlan"),
        ("numbers", "int8", "a mapping such as"),
        ("numbers", {"dtype": "float32"}, "no key dtype, got one. Give the argument dtype"),
        ("structured_outputs", FORM, "a list of forms, got"),
        ("structured_outputs[0]", ["yes"], "StructuredOutputsParams or AllowedTokens, got 'yes'"),
        ("max_num_seqs", "4", "a positive integer, got '4'"),
        ("max_num_seqs", 0, "a positive integer, got 0"),
        ("max_model_len", -5, "a positive integer, got -5"),
        ("max_model_len", 0, "a positive integer, got 0"),
        ("seed", "x", "an integer, got 'x'"),
        ("seed", True, "an integer, got True"),
        ("strict_config", "no", "True or False, got 'no'"),
        ("now", datetime(2026, 1, 31), "a local date and time such as 2026-01-31T12:00:00, got"),
    ],
)
def test_a_wrong_argument_of_a_model_is_refused(name, value, expected):
    with pytest.raises(ValueError) as caught:
        LLM("/nonexistent/model", **{name.partition("[")[0]: value})
    assert str(caught.value).startswith(f"{name}: expected {expected}")


def test_a_model_is_a_name_or_a_path():
    with pytest.raises(
        ValueError, match=r"^model: expected the name or the path of a model, got 5"
    ):
        LLM(5)


def test_a_layout_is_a_name_or_a_path(tmp_path):
    config = SimpleNamespace(lacks_generation=None)
    files: Any = SimpleNamespace(spec=SimpleNamespace(config=config), fingerprint=lambda: "")
    arguments = PlanArguments("auto", None, tmp_path / "no.toml", None, None, None, ())
    with pytest.raises(ConfigError, match=r"no\.toml: cannot be read"):
        arguments.plan("model", files, find_target("cpu"), "float32")


def test_stops_beside_a_form_have_no_effect():
    params = SamplingParams(structured_outputs=FORM, stop=["y", "\n\n"], stop_token_ids=[7])
    assert params == SamplingParams(structured_outputs=FORM)
    for name, value in (("min_tokens", 2), ("ignore_eos", True)):
        with pytest.raises(ValueError, match=f"^{name}: expected none beside structured_outputs"):
            SamplingParams(structured_outputs=FORM, **{name: value})


def test_an_accelerator_has_slots_for_512_rows_or_as_many_as_fit(monkeypatch):
    files: Any = SimpleNamespace(spec=SimpleNamespace(config=CONFIG), fingerprint=lambda: "")
    gpu = replace(find_target("cpu"), name="gpu", platform="gpu")
    arguments = PlanArguments("generate", None, None, None, 64, None, ())

    def planned(target, arguments=arguments):
        return arguments.plan("model", files, target, "float32").buckets

    assert planned(find_target("cpu")).decode_slots == DEFAULT_SLOTS == 16
    assert planned(gpu).decode_slots == 512
    largest = max(bucket.batch * bucket.length for bucket in planned(gpu).prefill)
    assert largest == 2048
    work = work_of(CONFIG, Numbers("float32"), None, gpu)
    held = (work.parameter_bytes + 100 * work.page_bytes(64)) / MEMORY_SHARE + 1
    monkeypatch.setattr(plan_arguments, "device_bytes", lambda target: held)
    assert planned(gpu).decode_slots == 100
    # a number that the user gives is taken as it is
    assert planned(gpu, replace(arguments, max_num_seqs=300)).decode_slots == 300


@pytest.mark.parametrize(
    "given", [{"max_model_len": 32}, {"max_num_seqs": 2}, {"numbers": {}}, {"layout": "tensor"}]
)
def test_what_a_plan_decides_is_refused_beside_it(given):
    grid = BucketGrid(max_length=64, prefill=((16, 2),), decode_slots=2)
    plan = Plan("cpu", PlannedModel("m", ""), Numbers("float32"), grid)
    names = ("numbers", "layout", "experts", "max_model_len", "max_num_seqs")
    absent = dict.fromkeys(names) | {"runner": "auto", "structured_outputs": ()}
    PlanArguments(**absent).check_beside(plan)
    with pytest.raises(ValueError, match=f"^{next(iter(given))}: expected none beside a plan"):
        PlanArguments(**(absent | given)).check_beside(plan)


def test_forms_that_a_given_plan_lacks_are_refused():
    arguments = PlanArguments("auto", None, None, None, None, None, [FORM])
    grid = BucketGrid(max_length=64, prefill=((16, 2),), decode_slots=2)
    plan = Plan("cpu", PlannedModel("m", ""), Numbers("float32"), grid)
    for schemas in (None, [f"sha256:{64 * '0'}"]):
        tables = schemas and StructuredGrid(2, 2, 2, 2, 2, tuple(schemas))
        with pytest.raises(ValueError, match=r"^structured_outputs\[0\]: expected a form"):
            arguments.check_forms(replace(plan, buckets=replace(grid, structured=tables)))
    known = StructuredGrid(2, 2, 2, 2, 2, (FORM.fingerprint,))
    arguments.check_forms(replace(plan, buckets=replace(grid, structured=known)))


@pytest.mark.parametrize(
    "prompts", [None, 5, b"hi", {"a", "b"}, (text for text in "ab")], ids=lambda x: type(x).__name__
)
def test_prompts_are_one_prompt_or_a_list(prompts):
    with pytest.raises(ValueError, match=r"^prompts: expected a prompt or a list of prompts, got"):
        as_list(prompts)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt: expected text, or a list or one-dimensional array of integers, got None"),
        (b"hi", "prompt: expected text, or a list or one-dimensional array of integers, got b'hi'"),
        ({"prompt_token_ids": "abc"}, "prompt['prompt_token_ids']: expected token ids, got 'abc'"),
        ({"prompt": [5]}, "prompt['prompt']: expected text, got [5]"),
        ({"text": "a", 1: 2}, "prompt: expected {'prompt': text} or {'prompt_token_ids': ids}, "),
    ],
)
def test_a_prompt_is_text_or_ids(prompt, message):
    with pytest.raises(ValueError) as caught:
        PromptReader(None).read(prompt)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("messages", [None, 5, "hi", USER, (m for m in [USER])])
def test_messages_are_a_list(messages):
    expected = "^messages: expected a list of messages, or of such lists, got"
    with pytest.raises(ValueError, match=expected):
        as_conversations(messages)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"role": "banana"}, "messages[0].role: expected one of system, developer, user, "),
        ({"contents": "x"}, "messages[0]: 'contents' is not a known parameter. Did you mean"),
        ({"name": 5}, "messages[0].name: expected a string, got 5"),
    ],
)
def test_messages_of_a_chat_have_the_roles_and_keys_of_a_batch(wrong, message):
    with pytest.raises(ValueError) as caught:
        read_messages([USER | wrong])
    assert str(caught.value).startswith(message)
    # a model that would answer any conversation
    chats = SimpleNamespace(encode=lambda messages, **options: [5])
    model = SimpleNamespace(
        _require_generation=lambda: None,
        _prompts=SimpleNamespace(chats=chats),
        _run=lambda generator, rows, params, adapter: rows,
    )
    assert LLM.chat(model, [USER]) == [(None, [5])]
    with pytest.raises(ValueError) as caught:
        LLM.chat(model, [[USER], [USER | wrong]])
    assert str(caught.value).startswith(message)


def test_one_or_several_are_told_apart():
    assert as_list("a") == ["a"] and as_list((5, 6)) == [[5, 6]] and as_list([]) == []
    assert as_list([[5], "a"]) == [[5], "a"] and len(as_list(np.arange(3))) == 1
    assert as_conversations([USER]) == [[USER]] and as_conversations([[USER]]) == [[USER]]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 0}, "sampling_params: expected SamplingParams, or a list with one"),
        (5, "sampling_params: expected SamplingParams, or a list with one"),
        ([None], r"sampling_params\[0\]: expected SamplingParams, got none"),
        ([SamplingParams()] * 2, r"one each \(1\), got 2"),
    ],
)
def test_parameters_are_sampling_params(params, message):
    with pytest.raises(ValueError, match=message):
        one_each("sampling_params", params, SamplingParams, 1)


def test_adapters_of_prompts_are_names():
    assert one_each("adapter", None, str | None, 2) == [None, None]
    with pytest.raises(ValueError, match=r"^adapter\[1\]: expected str \| None, got 5"):
        one_each("adapter", ["a", 5], str | None, 2)


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        seed=np.uint8(3),
        stop_token_ids=np.array([7, 8]),
        logit_bias={np.int64(5): np.float32(1)},
    )
    same = SamplingParams(n=2, temperature=0.5, seed=3, stop_token_ids=[7, 8], logit_bias={5: 1.0})
    assert params == same and repr(params) == repr(same)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("n", np.float32(2), "an integer, got 2.0"),
        ("n", True, "an integer, got True"),
        ("ignore_eos", np.int64(1), "true or false, got 1"),
        ("stop", 5, "a list, got 5"),
        ("stop_token_ids", 5, "a list, got 5"),
        ("stop_token_ids", "57", "a list, got '57'"),
        ("logit_bias", [1], "a mapping from token ids to numbers, got"),
        ("temperature", "0", "0 or a number from"),
    ],
)
def test_a_wrong_sampling_parameter_is_refused(name, value, expected):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(f"{name}: expected {expected}")
