"""`LLM` over a small model: forms of prompts, order, refusals, scores."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.graph_failures import GraphFailed
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.monitor import compile_monitor
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.runtime import LLM, SamplingParams
from noria.runtime.errors import ForkedProcess, RowError
from noria.runtime.text.tokenizer import ChatTemplate

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
GRID = BucketGrid(max_length=64, prefill=((16, 2),), decode_slots=2)


@pytest.fixture(scope="module")
def llm(noria):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", noria.environment["XDG_CACHE_HOME"])
        now = "2026-01-31T12:00:00"
        llm = LLM(model=str(noria.model), max_model_len=64, max_num_seqs=3, now=now)
    yield llm
    llm.close()


def ids(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def num_prefills(llm) -> int:
    return sum(use["calls"] for use in llm._generator.statistics()["buckets"]["prefill"].values())


def test_a_prompt_is_the_same_in_every_form(llm):
    tokens = llm.get_tokenizer().encode("the water", special_tokens=True)
    forms = ["the water", tokens, {"prompt": "the water"}, {"prompt_token_ids": tokens}]
    outputs = llm.generate(forms, GREEDY)
    assert len({tuple(row) for row in ids(outputs)}) == 1
    assert [output.prompt for output in outputs] == ["the water", None, "the water", None]
    assert all(output.prompt_token_ids == tokens for output in outputs)
    for form in forms:
        assert ids(llm.generate(form, GREEDY)) == ids(outputs[:1])


def test_outputs_come_in_the_order_of_the_prompts_with_their_own_parameters(llm):
    rows = [[5] * length for length in (40, 3, 17, 1, 30, 8)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in range(6, 0, -1)]
    outputs = llm.generate(rows, params)
    assert [output.prompt_token_ids for output in outputs] == rows
    assert [len(row) for row in ids(outputs)] == [6, 5, 4, 3, 2, 1]
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    alone = [llm.generate(row, param)[0] for row, param in zip(rows, params, strict=True)]
    assert ids(alone) == ids(outputs)


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == llm.generate([], []) == llm.chat([]) == []


@pytest.mark.parametrize("params", [[], [GREEDY], [GREEDY] * 3])
def test_as_many_parameters_as_prompts_are_expected(llm, params):
    with pytest.raises(ValueError, match=rf"one each \(2\), got {len(params)}"):
        llm.generate(["a", "b"], params)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([5] * 65, "context_length_exceeded"),
        ([5, 100_000], "invalid_token_id"),
        ([], "empty_prompt"),
        ({"text": "x"}, "invalid_request"),
    ],
)
def test_a_refusal_raises_before_any_row_of_the_call_runs(llm, prompt, code):
    before = num_prefills(llm)
    with pytest.raises(RowError) as caught:
        llm.generate([[5, 6], prompt], GREEDY)
    assert caught.value.code == code
    assert num_prefills(llm) == before
    assert len(llm.generate([[5, 6]], GREEDY)) == 1


def test_scores_are_the_logprobs_with_which_the_tokens_were_made(llm):
    prompt = [5, 6, 7]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0)
    (made,) = llm.generate(prompt, params)
    completion = made.outputs[0]
    (scored,) = llm.score([*prompt, *completion.token_ids])
    assert scored.prompt_logprobs[0] is None
    assert [entry.token_id for entry in scored.prompt_logprobs[1:]] == [6, 7, *completion.token_ids]
    expected = [entry.logprob for entry in completion.logprobs]
    found = [entry.logprob for entry in scored.prompt_logprobs[len(prompt) :]]
    assert found == pytest.approx(expected, abs=FLOAT32_MODEL_LOGPROB)
    assert completion.cumulative_logprob == pytest.approx(sum(expected))


def test_one_conversation_or_several(llm):
    conversations = [[{"role": "user", "content": text}] for text in ("the wheel", "the stream")]
    several = llm.chat(conversations, GREEDY)
    assert ids(several) == [ids(llm.chat(one, GREEDY))[0] for one in conversations]
    tokenizer = llm.get_tokenizer()
    start = tokenizer.encode("<|im_start|>user\nthe wheel<|im_end|>\n", special_tokens=True)
    assert several[0].prompt_token_ids[: len(start)] == start


def test_a_length_beyond_the_models_is_refused(noria):
    with pytest.raises(ValueError, match=r"max_model_len: expected at most 128.*got 129"):
        LLM(model=str(noria.model), max_model_len=129)


@pytest.mark.parametrize(
    ("planned", "options", "message"),
    [
        (PlannedModel("m", "sha256:00"), {}, "plan model.fingerprint: expected sha256"),
        (
            PlannedModel("m", ""),
            {"dtype": "bfloat16"},
            "plan numbers.dtype: expected bfloat16, got float32",
        ),
        (
            PlannedModel("m", ""),
            {"target": "tpu:v5e:2x4"},
            "'tpu:v5e:2x4' is not on this machine.* plan again",
        ),
    ],
)
def test_a_plan_for_something_else_is_refused(noria, planned, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(model=str(noria.model), plan=Plan("cpu", planned, Numbers("float32"), GRID), **options)


def interrupt(llm, monkeypatch, *, after: int) -> None:
    """End the next call after some graphs, each of which has consumed its state."""
    graphs = llm._generator.runner.graphs
    of_name, count = type(graphs).executable, iter(range(after))

    def executable(name):
        def call(*arguments):
            result = of_name(graphs, name)(*arguments)
            if next(count, None) is None:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)  # the signal ends this at once
            return result

        return call

    monkeypatch.setattr(graphs, "executable", executable)
    # a shell starts what runs in its background with the signal ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(ROWS, GREEDY)
    signal.signal(signal.SIGINT, before)
    monkeypatch.undo()


ROWS = [[5] * length for length in (40, 3, 17, 1, 30, 8)]


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4])
def test_after_ctrl_c_the_next_call_is_as_if_there_had_been_none(llm, monkeypatch, after):
    expected = ids(llm.generate(ROWS, GREEDY))
    interrupt(llm, monkeypatch, after=after)
    assert ids(llm.generate(ROWS, GREEDY)) == expected
    interrupt(llm, monkeypatch, after=after)
    interrupt(llm, monkeypatch, after=after)
    compiles = compile_monitor().num_compiles
    assert ids(llm.generate(ROWS[:2], GREEDY)) == expected[:2]
    assert compile_monitor().num_compiles == compiles


def test_a_graph_that_the_device_fails_is_named_and_the_next_call_runs(llm, monkeypatch):
    graphs = llm._generator.runner.graphs

    def executable(name):
        raise RuntimeError(f"RESOURCE_EXHAUSTED: no memory for {name}")

    monkeypatch.setattr(graphs, "executable", executable)
    with pytest.raises(GraphFailed, match=r"graph 'prefill .*' failed as it ran: RESOURCE_.* Cha"):
        llm.generate(ROWS, GREEDY)
    monkeypatch.undo()
    assert len(llm.generate(ROWS, GREEDY)) == len(ROWS)


@pytest.mark.parametrize(
    "form",
    [
        np.array([3, 4, 5]),
        np.array([3, 4, 5], np.uint16),
        list(np.array([3, 4, 5])),
        {"prompt_token_ids": np.array([3, 4, 5])},
        [np.array([3, 4, 5])],
        (3, 4, 5),
    ],
)
def test_integers_of_numpy_are_token_ids(llm, form):
    (output,) = llm.generate(form, GREEDY)
    assert output.prompt_token_ids == [3, 4, 5]
    assert all(type(token) is int for token in output.prompt_token_ids)


@pytest.mark.parametrize(
    ("prompt", "remedy"),
    [
        (np.array([[3, 4], [5, 6]]), r"got an array of shape \(2, 2\)\. Give its rows as list"),
        (np.array([3.0, 4.0]), r"got \[3\.0, 4\.0\]\. Give token ids as integers"),
        (np.array([True, False]), "Give token ids as integers"),
        ([True, 4], r"got \[True, 4\]"),
        ([3.5, 4], r"got \[3\.5, 4\]"),
        ([[3, "x"]], "Give token ids as integers"),
        ([None], "got None"),
    ],
)
def test_what_cannot_be_token_ids_is_refused_by_name(llm, prompt, remedy):
    with pytest.raises(RowError, match=f"prompt: expected text, or a list or one.*{remedy}"):
        llm.generate(prompt, GREEDY)


def test_what_changes_nothing_in_vllm_is_accepted_in_calls(llm):
    expected = ids(llm.generate([3, 4, 5], GREEDY))
    assert ids(llm.generate([3, 4, 5], GREEDY, use_tqdm=False, lora_request=None)) == expected
    messages = [{"role": "user", "content": "the water"}]
    options = {"use_tqdm": True, "tools": None, "chat_template_content_format": "auto"}
    assert ids(llm.chat(messages, GREEDY, **options)) == ids(llm.chat(messages, GREEDY))
    with pytest.raises(ValueError, match="lora_request: expected None"):
        llm.generate([3, 4, 5], GREEDY, lora_request="adapter")
    with pytest.raises(ValueError, match=r"chat_template: .* as chat_template\.jinja"):
        llm.chat(messages, GREEDY, chat_template="{{ messages }}")
    with pytest.raises(TypeError, match="use_tdqm"):
        llm.generate([3, 4, 5], GREEDY, use_tdqm=False)


def test_chat_templates_see_the_instant_that_was_asked_for(llm, monkeypatch):
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}", "here")
    monkeypatch.setattr(llm.get_tokenizer(), "chat_templates", {"default": template})
    monkeypatch.setattr(llm._prompts, "_renderer", None)
    (output,) = llm.chat([{"role": "user", "content": "the water"}], GREEDY)
    llm._prompts._renderer.close()
    text = llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=True)
    assert text == "31 Jan 2026 the water"
    with pytest.raises(ValueError, match="now: expected a local date and time"):
        LLM(model="none", now="today")


def test_chat_templates_show_tools(llm, monkeypatch):
    template = "{{ tools[0].function.name }} for {{ messages[0].content }}"
    templates = {"default": ChatTemplate(template, "here")}
    monkeypatch.setattr(llm.get_tokenizer(), "chat_templates", templates)
    monkeypatch.setattr(llm._prompts, "_renderer", None)
    tool = {"type": "function", "function": {"name": "weather"}}
    (output,) = llm.chat([{"role": "user", "content": "the water"}], GREEDY, tools=[tool])
    llm._prompts._renderer.close()
    text = llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=True)
    assert text == "weather for the water"


def open_files(folder) -> list[str]:
    links = (path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [str(name) for name in [*links, *maps] if str(folder) in str(name)]


def test_a_closed_model_holds_nothing_and_says_so(noria, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", noria.environment["XDG_CACHE_HOME"])
    grid = BucketGrid(max_length=64, prefill=((32, 1),), decode_slots=2)
    plan = Plan("cpu", PlannedModel("model", ""), Numbers("float32"), grid)
    options = {"trust_remote_code": False, "gpu_memory_utilization": 0.9, "enforce_eager": True}
    with LLM(str(noria.model), plan=plan, **options) as llm:
        assert not open_files(noria.model)
        llm.chat([{"role": "user", "content": "the"}], SamplingParams(max_tokens=1))
        child = llm._prompts._renderer._templates["default"].process._process
        assert child.poll() is None
        parameters = weakref.ref(llm._generator.runner)
    assert child.poll() is not None
    gc.collect()
    assert parameters() is None
    llm.close()
    for call in (llm.generate, llm.score, llm.chat):
        with pytest.raises(ValueError, match=r"got one after close\(\)\. Make another"):
            call([3, 4, 5])


def test_a_forked_child_is_refused_and_does_not_hang(llm, noria):
    with pytest.warns(RuntimeWarning, match="os.fork"):
        child = os.fork()
    if not child:
        is_refused = []
        for use in (lambda: llm.generate([3]), lambda: LLM(str(noria.model), max_model_len=64)):
            try:
                use()
            except ForkedProcess as error:
                is_refused.append("get_context('spawn')" in str(error))
        os._exit(0 if is_refused == [True, True] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(llm.generate([3], GREEDY)) == 1


def test_a_script_for_the_cpu_starts_no_other_backend(noria):
    code = "import sys; from noria.runtime import LLM; LLM(sys.argv[1], max_model_len=32)"
    command = [sys.executable, "-c", code, noria.model]
    done = subprocess.run(command, env=noria.environment, capture_output=True, text=True)
    assert done.returncode == 0
    # libtpu, where it is installed, complains about a machine without TPUs
    assert "TPU" not in done.stderr
    assert "libtpu" not in done.stderr
