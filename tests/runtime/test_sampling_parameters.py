"""The table of sampling parameters: every entry, from a key of a body to a change of an answer."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from tiny import EOS_ID, GRID, TinyModel
from tiny import TWO_LAYERS as CONFIG

from noria.compile.graphs.signatures import greedy_sampling
from noria.modelzoo.sampling import SamplingState
from noria.modelzoo.sampling_parameters import ARRAYS, GREEDY
from noria.runtime.checkpoint.generation_defaults import GenerationDefaults
from noria.runtime.engine.actions import ScheduledRequest, ScheduledSequence
from noria.runtime.engine.padding import pack_sampling
from noria.runtime.errors import ConfigError, RowError
from noria.runtime.parameters.checks import INTEGERS
from noria.runtime.request import PARAMETERS, Request, RequestOutput, SamplingParams
from noria.runtime.rows.request_body import read_params, read_sampling

BASE = {"temperature": 1.0, "seed": 3, "max_tokens": 16}
PROMPT = [5, 6, 7]
LISTS = {
    "stop": ["x"],
    "stop_token_ids": [9],
    "logit_bias": {"5": 2.0},
    "allowed_token_ids": [5, 6],
    "bad_words": ["x"],
}
"""Values of the entries that have no bounds."""
STRONG = {"temperature": 5.0, "top_p": 0.05, "top_k": 1}
"""Values that change the tokens of a row; for other numbers, the largest valid value does."""
OF_TEXTS = {"stop", "skip_special_tokens", "include_stop_str_in_output"}
"""Entries that change the text of the same tokens (tests/runtime/text/test_detokenizer.py)."""
OF_FORMS = {"allowed_token_ids", "bad_words"}
"""Entries that a plan serves with an automaton (tests/runtime/engine/test_allowed_tokens.py)."""


def changed(name: str):
    """A valid value of an entry that is not its default."""
    entry, default = PARAMETERS[name], getattr(SamplingParams, name)
    if entry.dtype is None:
        return LISTS[name]
    if entry.dtype == "bool":
        return not default
    if entry.dtype in INTEGERS:
        return 3
    return (max(entry.low, 0.0) + min(entry.high, 3.0)) / 2


def packed(**params) -> SamplingState:
    sequence = ScheduledSequence(ScheduledRequest(0, 0, 64, 1, is_scored=False), 0)
    return pack_sampling(SamplingParams(**params), sequence, seed=0, stop_ids=(), vocab_size=99)


@pytest.mark.parametrize("name", ARRAYS)
def test_a_value_is_in_its_array_and_in_no_other(name):
    before, after = packed()._asdict(), packed(**{name: changed(name)})._asdict()
    array, dtype = ARRAYS[name]
    assert after[array].dtype == dtype == np.asarray(before[array]).dtype
    assert after[array] == np.asarray([changed(name)], dtype)
    different = [key for key, x in before.items() if not np.array_equal(x, after[key])]
    assert different == [array]


def test_rows_without_parameters_are_greedy():
    alone, two = greedy_sampling(1, 99), greedy_sampling(2, 99, xp=np)
    for array, one, row in zip(SamplingState._fields, alone, packed(**vars(GREEDY)), strict=True):
        np.testing.assert_array_equal(one, row, strict=one is not None, err_msg=array)
        if one is not None:
            np.testing.assert_array_equal(np.concatenate([one, one]), getattr(two, array))


def test_every_state_of_a_row_that_is_a_plain_number_is_in_the_table():
    of_rows = {"sample_B", "min_length_B", "num_logprobs_B", "structure_B", "adapter_B"}
    names = {name for name in SamplingState._fields if name.endswith("_B")}
    assert {array for array, _ in ARRAYS.values()} == names - of_rows


def shown(output: RequestOutput) -> list:
    return [output.prompt_logprobs, *[(o.token_ids, o.logprobs) for o in output.outputs]]


def test_an_answer_changes_with_every_entry():
    generator = TinyModel(CONFIG, replace(GRID, prefill=((16, 4),))).generator()

    def answers(rows: dict[str, dict]) -> dict[str, list]:
        for name, params in rows.items():
            generator.submit(Request(name, PROMPT, SamplingParams(**params)))
        return {output.request_id: shown(output) for output in generator.run()}

    ended = BASE | {"logit_bias": {EOS_ID: 100.0}}
    plain = answers({"free": BASE, "ended": ended})
    (_, (tokens, _)), (_, (at_once, _)) = plain["free"], plain["ended"]
    assert len(at_once) < 2 and len(tokens) == BASE["max_tokens"] > len(set(tokens))
    values = STRONG | {"stop_token_ids": [tokens[4]], "logit_bias": {tokens[0]: -100.0}}
    values |= {"n": 2, "seed": 4, "max_tokens": 5, "logprobs": 1, "prompt_logprobs": 1}
    values |= {"ignore_eos": True, "min_tokens": 3}
    names = PARAMETERS.keys() - OF_TEXTS - OF_FORMS
    rows = {name: {name: values.get(name, PARAMETERS[name].high)} for name in names}
    of_ends = {"ignore_eos", "min_tokens"}
    outputs = answers({n: (ended if n in of_ends else BASE) | row for n, row in rows.items()})
    same = [n for n in names if outputs[n] == plain["ended" if n in of_ends else "free"]]
    assert same == []


@pytest.mark.parametrize("name", [name for name, entry in PARAMETERS.items() if entry.in_body])
@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_a_body_gives_every_entry(name, is_chat):
    value = changed(name)
    if name == "prompt_logprobs":
        value = 2
    expected = getattr(SamplingParams(**{name: {5: 2.0} if name == "logit_bias" else value}), name)
    body = read_params({name: value}, is_chat=is_chat, defaults={})
    assert getattr(body.params, name) == expected != getattr(SamplingParams(), name)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_job_sets_the_entries_that_it_may(name):
    value = {5: 2.0} if name == "logit_bias" else changed(name)
    if PARAMETERS[name].of_jobs:
        assert read_sampling([f"{name}={json.dumps(value)}"]) == {name: value}
    else:
        with pytest.raises(ConfigError, match="with one of"):
            read_sampling([f"{name}={json.dumps(value)}"])


@pytest.mark.parametrize("name", PARAMETERS)
def test_publishers_give_the_defaults_of_some(name):
    read = GenerationDefaults.from_hf({name: changed(name)}, {})
    is_given = PARAMETERS[name].published
    assert read.sampling == ({name: changed(name)} if is_given else {})
    assert GenerationDefaults.from_hf(read.as_json(), {}).sampling == read.sampling
    assert is_given or read.unknown == (f"{name} = {changed(name)!r}",)


@pytest.mark.parametrize("name", [name for name, x in PARAMETERS.items() if x.dtype is not None])
def test_a_value_outside_the_bounds_is_refused_by_name(name):
    entry = PARAMETERS[name]
    if entry.dtype == "bool":
        wrong = [1, None]
    elif entry.dtype in INTEGERS:
        wrong = [entry.low - 1, entry.high + 1, 1.5, True]
    else:
        wrong = [math.nextafter(entry.low, -9e99), math.nextafter(entry.high, 9e99), math.nan, True]
    for value in wrong:
        with pytest.raises(RowError, match=f"^{name}: expected ") as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name
    for value in {"bool": (True, False)}.get(entry.dtype, (entry.low or 1, entry.high)):
        more = {"max_tokens": value} if name == "min_tokens" else {}
        assert getattr(SamplingParams(**{name: value} | more), name) == value
