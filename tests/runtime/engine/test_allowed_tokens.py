"""Rows with forbidden words and allowed ids, against a reference in numpy that knows all tokens.

The reference is that of vLLM (v1/sample/ops/bad_words.py): before each token it compares the end
of the answer with each sequence, and forbids the last token of one whose other tokens are there.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tiny import CONFIG, EOS_ID, GRID, TWO_LAYERS, TinyModel, prompts

from noria.runtime.errors import RowError
from noria.runtime.request import Request, RequestOutput, SamplingParams
from noria.runtime.structured.params import AllowedTokens
from noria.runtime.structured.structures import Structures
from noria.runtime.structured.token_rules import compile_allowed

V = CONFIG.vocab_size
PLAIN_GRID = replace(GRID, prefill=((16, 2),), steps_per_call=8, score=False)
PROMPTS = prompts(4, longest=14)
WORDS = ("5", "5 6", "6 7 8", "7 8", "8 8 8 9", "10 11 10 12", "10 11 13")


def encode(texts: Sequence[str]) -> list[list[int] | RowError]:
    """The tokens of a text are the numbers in it; a space before it is the token 3."""
    return [[3] * text.startswith(" ") + list(map(int, text.split())) for text in texts]


def sequences(words: Sequence[str]) -> list[list[int]]:
    return [ids for ids in encode([*words, *(f" {word}" for word in words)]) if max(ids) < V]


def is_allowed(allowed: AllowedTokens, answer: Sequence[int]) -> np.ndarray:
    """Whether each token may follow an answer, by the reference."""
    mask = np.ones(V, bool)
    if allowed.token_ids is not None:
        mask[:] = False
        mask[list(allowed.token_ids)] = True
    for *before, last in sequences(allowed.bad_words):
        if list(answer[len(answer) - len(before) :]) == before:
            mask[last] = False
    return mask


def masks(automaton) -> tuple[np.ndarray, np.ndarray]:
    """The masks and the next states of each state."""
    words = automaton.words_QU[automaton.mask_block_MJ].reshape(len(automaton.mask_block_MJ), -1)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :V].astype(bool)
    assert (automaton.needs_SL[:, 0] == 0).all()
    moves = automaton.moves_PA[automaton.move_block_SI].reshape(automaton.num_states, -1)
    return bits[automaton.mask_SL[:, 0]], moves[:, automaton.class_of_token]


@pytest.mark.parametrize("seed", range(20))
def test_masks_on_random_walks_are_those_of_the_reference(seed: int):
    draw = np.random.default_rng(seed)
    letters = draw.integers(5, 8, (12, 4))
    words = [" ".join(map(str, row[: draw.integers(1, 5)])) for row in letters]
    # words of one token of a walk's few would end most walks
    words = [word for word in words if " " in word]
    ids = None if seed % 2 else tuple(draw.permutation(np.r_[2:12]).tolist())
    allowed = AllowedTokens(ids, tuple(words))
    automaton = compile_allowed(allowed, V, encode)
    mask_SV, next_SV = masks(automaton)
    assert (automaton.always_allowed == mask_SV.all(axis=0)).all()
    for _ in range(20):
        state, answer = 0, []
        for _ in range(30):
            assert (mask_SV[state] == is_allowed(allowed, answer)).all()
            choices = [token for token in (3, 5, 6, 7) if mask_SV[state, token]]
            token = int(draw.choice(choices or [int(mask_SV[state].argmax())]))
            state, answer = next_SV[state, token], [*answer, token]


RULES = {
    "one token": AllowedTokens(None, ("5", "6", "700")),
    "many tokens": AllowedTokens(None, WORDS),
    "ids": AllowedTokens((2, 4, 5, 6, 7, 8, 9)),
    "both": AllowedTokens((2, 5, 6, 7, 8, 9, 10, 11, 12), WORDS[1:]),
}


@pytest.fixture(scope="module")
def structures() -> Structures:
    compiled = Structures(None, lambda allowed: compile_allowed(allowed, V, encode))
    for rule in RULES.values():
        compiled.automaton(rule)
    return compiled


@pytest.fixture(scope="module")
def model(structures: Structures) -> TinyModel:
    hashes = {rule.fingerprint for rule in RULES.values()}
    return TinyModel(TWO_LAYERS, replace(PLAIN_GRID, structured=structures.grid(hashes)))


def generator_of(model: TinyModel, structures: Structures):
    assert model.grid.structured is not None
    return model.generator(structures=structures.pack(model.grid.structured, V))


def params_of(rule: AllowedTokens, **options) -> SamplingParams:
    return SamplingParams(
        allowed_token_ids=rule.token_ids, bad_words=rule.bad_words, max_tokens=20, **options
    )


def run(generator, requests: list[Request]) -> dict[str, RequestOutput]:
    for request in requests:
        generator.submit(request)
    return {output.request_id: replace(output, metrics=None) for output in generator.run()}


def test_greedy_answers_are_those_of_the_reference(model, structures):
    requests = [
        Request(f"{name} {i}", prompt, params_of(rule, temperature=0, ignore_eos=True))
        for name, rule in RULES.items()
        for i, prompt in enumerate(PROMPTS)
    ]
    outputs = run(generator_of(model, structures), requests)
    for request in requests:
        rule, answer = RULES[request.request_id.rpartition(" ")[0]], []
        for _ in range(20):
            logits = model.next_logits([*request.prompt_token_ids, *answer])
            answer.append(int(np.where(is_allowed(rule, answer), logits, -np.inf).argmax()))
        (choice,) = outputs[request.request_id].outputs
        assert choice.token_ids == answer and choice.finish_reason == "length"


def test_sampled_answers_never_have_a_forbidden_sequence(model, structures):
    requests = [
        Request(
            f"{name} {i}",
            prompt,
            params_of(rule, temperature=8.0, n=8, seed=i, logit_bias={2: 1.0}, min_tokens=i),
        )
        for name, rule in RULES.items()
        for i, prompt in enumerate(PROMPTS)
    ]
    outputs = run(generator_of(model, structures), requests)
    reasons = set()
    for request in requests:
        rule = RULES[request.request_id.rpartition(" ")[0]]
        for choice in outputs[request.request_id].outputs:
            reasons.add(choice.finish_reason)
            assert len(choice.token_ids) >= request.params.min_tokens
            for index, token in enumerate(choice.token_ids):
                assert is_allowed(rule, choice.token_ids[:index])[token]
    assert reasons == {"stop", "length"}


def test_rows_without_rules_keep_their_bits(model, structures):
    plain = TinyModel(TWO_LAYERS, PLAIN_GRID)
    free = [
        Request(f"free {i}", prompt, SamplingParams(max_tokens=20, seed=i, logprobs=3))
        for i, prompt in enumerate(PROMPTS)
    ]
    ruled = [Request("x", PROMPTS[0], params_of(RULES["both"]))]
    outputs = run(generator_of(model, structures), [*free[:2], *ruled, *free[2:]])
    expected = run(plain.generator(), free)
    assert {name: outputs[name] for name in expected} == expected


def test_min_tokens_needs_a_token_that_ends_no_answer(model, structures):
    generator = generator_of(model, structures)
    stops = [t for t in RULES["ids"].token_ids or () if t != EOS_ID]
    fine = params_of(RULES["ids"], stop_token_ids=stops[1:], min_tokens=1)
    generator.check(Request("x", [5], fine))
    with pytest.raises(RowError, match="min_tokens: expected a token") as caught:
        generator.check(Request("x", [5], replace(fine, stop_token_ids=stops)))
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (AllowedTokens((V,)), f"allowed_token_ids: expected ids from 0 to {V - 1}, got {V}"),
        (AllowedTokens((5,), ("5",)), "allowed_token_ids: expected a token that may follow"),
        (AllowedTokens((5, 6), ("6 5", "6 6")), "allowed_token_ids: expected a token that may"),
        (
            AllowedTokens(None, tuple(map(str, range(V)))),
            "bad_words: expected a token that may follow",
        ),
        (
            AllowedTokens(None, tuple(f"{i % V} {i // V % V} {i}" for i in range(20_000))),
            "bad_words: expected fewer words",
        ),
    ],
)
def test_rules_that_cannot_be_kept_are_refused_by_name(rule: AllowedTokens, message: str):
    big = 30_000 if len(rule.bad_words) > V else V
    with pytest.raises(RowError, match=f"^{message}"):
        compile_allowed(rule, big, encode)


def test_words_need_a_tokenizer_and_ids_do_not():
    compile_allowed(AllowedTokens((5,)), V, None)
    with pytest.raises(RowError, match="bad_words: expected none, as the model has no tokenizer"):
        compile_allowed(AllowedTokens(None, ("5",)), V, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bad_words": ["  "]}, "bad_words: expected texts that are not only spaces"),
        ({"bad_words": [3]}, "bad_words: expected texts"),
        ({"bad_words": "red"}, "bad_words: expected a list"),
        ({"allowed_token_ids": []}, "allowed_token_ids: expected at least one id"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids: expected an integer from 0"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids: expected an integer"),
    ],
)
def test_wrong_values_are_refused_by_name(options, message):
    with pytest.raises(RowError, match=f"^{message}"):
        SamplingParams(**options)


def test_a_scored_prompt_has_no_answer_to_restrict():
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0, bad_words=["5"])
    assert scored.form is None and SamplingParams().form is None
