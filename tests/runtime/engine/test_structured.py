"""Rows whose answers have a form, in the engine: valid, on time, and without effect on others."""

import json
import re
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from related_prompts import hash_tokens
from tiny import CONFIG, EOS_ID, GRID, TWO_LAYERS, TinyModel, prompts
from unoptimized import set_optimized

from noria.compile.graphs.graph_kinds import GraphKey
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid
from noria.runtime import StructuredOutputsParams
from noria.runtime.errors import RowError
from noria.runtime.request import Request, RequestOutput, SamplingParams
from noria.runtime.structured.form_compiler import make_trie
from noria.runtime.structured.structures import Structures

STEPS = 8
PLAIN_GRID = replace(GRID, prefill=((16, 2),), steps_per_call=STEPS, score=False)
PIECES = ['{"', '": ', '"}', ", ", '", "', "true", "null", "12", '\\"', "éa", "[]", "ab"]


class Characters:
    """A tokenizer with a character, or a piece of JSON, for each token."""

    special_ids = frozenset({0, 1, EOS_ID})
    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 3:
            return b"<special>"
        if token_id < 98:
            return bytes([token_id + 29])
        return (PIECES[token_id - 98] if token_id < 98 + len(PIECES) else "").encode()


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -5, "maximum": 17},
        "b": {"type": "array", "items": {"enum": ["x", None]}, "maxItems": 2},
        "c": {"type": "string", "maxLength": 6},
    },
    "required": ["a"],
}
FORMS = {
    "json": StructuredOutputsParams(json=SCHEMA),
    "string": StructuredOutputsParams(json={"type": "string"}),
    "regex": StructuredOutputsParams(regex="(ab|c)+-[0-9]{2}"),
    "choice": StructuredOutputsParams(choice=["yes", "no", "maybe"]),
    "object": StructuredOutputsParams(json_object=True),
}


def is_valid(name: str, text: str) -> bool:
    match name:
        case "regex":
            return re.fullmatch("(ab|c)+-[0-9]{2}", text) is not None
        case "choice":
            return text in ("yes", "no", "maybe")
    schema = {"json": SCHEMA, "string": {"type": "string"}, "object": {"type": "object"}}[name]
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


@pytest.fixture(scope="module")
def structures() -> Structures:
    tokenizer = Characters()
    compiled = Structures(
        lambda: make_trie(
            tokenizer.token_bytes, CONFIG.vocab_size, tokenizer.special_ids, (EOS_ID,)
        )
    )
    for form in FORMS.values():
        compiled.automaton(form)
    return compiled


@pytest.fixture(scope="module")
def model(structures: Structures, optimizes: bool) -> TinyModel:
    """A model with optimized programs, as a test compares its bits with those of `plain`."""
    hashes = {form.fingerprint for form in FORMS.values()}
    set_optimized(True)
    model = TinyModel(TWO_LAYERS, replace(PLAIN_GRID, structured=structures.grid(hashes)))
    set_optimized(optimizes)
    return model


@pytest.fixture(scope="module")
def plain(optimizes: bool) -> TinyModel:
    """The same model and grid without forms."""
    set_optimized(True)
    model = TinyModel(TWO_LAYERS, PLAIN_GRID)
    set_optimized(optimizes)
    return model


def generator_of(model: TinyModel, structures: Structures):
    assert model.grid.structured is not None
    packed = structures.pack(model.grid.structured, CONFIG.vocab_size)
    return model.generator(tokenizer=Characters(), structures=packed)


def run(generator, requests: list[Request]) -> dict[str, RequestOutput]:
    for request in requests:
        generator.submit(request)
    return {output.request_id: replace(output, metrics=None) for output in generator.run()}


PROMPTS = prompts(12, longest=14)
OPTIONS = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 3.0, "n": 3},
    {"temperature": 2.0, "top_k": 2},
    {"temperature": 2.0, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 0, "presence_penalty": 2.0, "repetition_penalty": 5.0, "logprobs": 2},
    {"temperature": 1.0, "logit_bias": {EOS_ID: -100.0, 5: 100.0}},
)


def structured_requests(structures: Structures, extra: int) -> list[Request]:
    """Every form with every option; limits are `extra` above the shortest answer."""
    requests = []
    for name, form in FORMS.items():
        shortest = structures.automaton(form).shortest
        for i, options in enumerate(OPTIONS):
            params = SamplingParams(
                **options, seed=i, max_tokens=shortest + extra, structured_outputs=form
            )
            prompt = PROMPTS[(len(requests)) % len(PROMPTS)]
            requests.append(Request(f"{name} {i} {extra}", prompt, params))
    return requests


def free_requests() -> list[Request]:
    return [
        Request(f"free {i}", PROMPTS[i], SamplingParams(max_tokens=20, seed=i, logprobs=3, **o))
        for i, o in enumerate([{"temperature": 0}, {"temperature": 1.0, "n": 2}, {"top_k": 4}])
    ]


@pytest.fixture(scope="module")
def requests(structures: Structures) -> list[Request]:
    """Rows with forms at three limits, and rows without a form between them."""
    structured = [r for extra in (0, 3, 20) for r in structured_requests(structures, extra)]
    free = free_requests()
    structured[20:20], structured[70:70] = free[:2], free[2:]
    return structured


@pytest.fixture(scope="module")
def outputs(model, structures, requests) -> dict[str, RequestOutput]:
    return run(generator_of(model, structures), requests)


def test_every_answer_is_valid_and_ends_by_itself_or_complete_at_its_limit(outputs, requests):
    count = 0
    for request in requests:
        if request.params.structured_outputs is None:
            continue
        for choice in outputs[request.request_id].outputs:
            assert is_valid(request.request_id.split()[0], choice.text), choice.text
            assert choice.finish_reason == "stop"
            ends_by_itself = choice.token_ids[-1] == EOS_ID
            assert ends_by_itself or len(choice.token_ids) == request.params.max_tokens
            assert len(choice.token_ids) <= request.params.max_tokens
            text_ids = choice.token_ids[: len(choice.token_ids) - ends_by_itself]
            assert not set(text_ids) & Characters.special_ids
            count += 1
    assert count == 3 * len(FORMS) * (len(OPTIONS) + 2)


def test_sampled_answers_differ(outputs):
    texts = {c.text for o in outputs.values() if o.request_id[:4] == "json" for c in o.outputs}
    assert len(texts) > 10


def test_the_shortest_answer_is_given_where_nothing_else_fits(outputs, structures):
    for name, form in FORMS.items():
        shortest = structures.automaton(form).shortest
        choices = outputs[f"{name} 1 0"].outputs + outputs[f"{name} 2 0"].outputs
        assert {len(choice.token_ids) for choice in choices} == {shortest}


def test_rows_without_a_form_keep_their_bits(outputs, plain):
    assert plain.generator().admission.structures is None
    expected = run(plain.generator(tokenizer=Characters()), free_requests())
    for name, output in expected.items():
        assert outputs[name] == output


def test_a_plan_without_forms_has_no_state_of_automata(plain, model):
    key = GraphKey("decode")
    num_without, num_with = (m.graphs.executable(key).in_tree.num_leaves for m in (plain, model))
    assert plain.graphs.empty_state().sampling.structure_B is None
    # the state of each slot, and nine tables
    assert num_with == num_without + 10


def test_the_order_of_rows_has_no_effect(outputs, model, structures, requests):
    chosen = requests[::-3]
    again = run(generator_of(model, structures), chosen)
    assert again == {request.request_id: outputs[request.request_id] for request in chosen}


def test_every_call_decodes_as_many_steps_as_without_forms(model, structures):
    generator = generator_of(model, structures)
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=40, structured_outputs=FORMS["json"], min_p=0.0
    )
    output = run(generator, [Request("row", PROMPTS[0], params)])["row"]
    (decode,) = generator.statistics()["buckets"]["decode"].values()
    num_tokens = len(output.outputs[0].token_ids)
    assert num_tokens > STEPS
    assert decode["calls"] == -(-num_tokens // STEPS)
    assert generator.statistics()["compiles_during_run"] == 0


def test_a_form_that_the_plan_lacks_is_refused(model, structures, plain):
    other = StructuredOutputsParams(choice=["other"])
    for generator in (generator_of(model, structures), plain.generator()):
        with pytest.raises(
            RowError, match="expected a form of answers, or allowed tokens, that the plan"
        ) as caught:
            generator.submit(Request("x", [5], SamplingParams(structured_outputs=other)))
        assert "make a plan for such rows by noria plan" in str(caught.value)
        # several keys of a row ask for forms
        assert caught.value.param is None


def test_a_form_whose_shortest_answer_does_not_fit_is_refused(model, structures):
    generator = generator_of(model, structures)
    shortest = structures.automaton(FORMS["json"]).shortest
    params = SamplingParams(max_tokens=shortest - 1, structured_outputs=FORMS["json"])
    with pytest.raises(RowError, match=f"{shortest} tokens, got {shortest - 1}"):
        generator.check(Request("x", [5], params))


BEGINNING = np.random.default_rng(1).integers(3, CONFIG.vocab_size, 9).tolist()
"""The tokens with which every second prompt of the next test begins."""
SHARING_GRIDS = {
    "chunks": {"prefill": ((64, 2, 8),), "chunks_per_decode": None},
    "few pages": {"prefill": ((64, 2),), "pages": 8},
    "planned prefixes": {
        "prefill": ((64, 2, 8),),
        "prefixes": PrefixGrid(2, 4, 8, (PlannedPrefix(9, hash_tokens(BEGINNING)),)),
    },
}


@pytest.mark.parametrize("name", SHARING_GRIDS)
def test_answers_are_valid_where_prompts_share_a_beginning_or_pages(structures, requests, name):
    hashes = {form.fingerprint for form in FORMS.values()}
    grid = replace(PLAIN_GRID, structured=structures.grid(hashes), **SHARING_GRIDS[name])
    model = TinyModel(TWO_LAYERS, grid)
    rows = [r for r in requests[::7] if r.params.structured_outputs is not None]
    rows = [
        replace(row, prompt_token_ids=[*BEGINNING[: 9 * (i % 2)], *row.prompt_token_ids])
        for i, row in enumerate(rows)
    ]
    generator = generator_of(model, structures)
    outputs = run(generator, rows)
    assert len(outputs) == len(rows) > 10
    for row in rows:
        for choice in outputs[row.request_id].outputs:
            assert is_valid(row.request_id.split()[0], choice.text), choice.text
            assert choice.finish_reason == "stop"
    if name == "planned prefixes":
        use = generator.metrics.decode
        assert use.read_entries < use.seen_entries
