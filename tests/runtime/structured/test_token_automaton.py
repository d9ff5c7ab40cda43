"""Automata over tokens, and their tables on the device, against a walk over bytes."""

import random
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import BruteForce
from schemas import CASES

from noria.compile.grids.structured_grid import MAX_LEVELS
from noria.modelzoo.structure import allowed_tokens, next_states
from noria.runtime.errors import RowError
from noria.runtime.structured.automaton import START
from noria.runtime.structured.byte_automaton import compile_language
from noria.runtime.structured.form_compiler import compile_form, make_trie, read_language
from noria.runtime.structured.params import StructuredOutputsParams
from noria.runtime.structured.structures import Structures
from noria.runtime.structured.token_automaton import TokenTrie

SPECIAL = {0: b"<start>", 1: b"{", 2: b"<end>"}
"""Special tokens; one has the text of a plain token."""
END_IDS = {2, 70}
"""Tokens that end a text; one of them is not special."""
PADDED_VOCAB = 320


def tokens(seed: int = 0) -> list[bytes]:
    """The bytes of a small vocabulary: all bytes, and random pieces of JSON of several bytes."""
    draw = random.Random(seed)
    pieces = ['{"', '":', '": "', '", "', '"}', "name", "na", "[1", ", ", "true", "nul", "-1", "é"]
    pieces += ["中", "😀"[:1], '\\"', "null", "12", "00", "}, {", "a" * 5, " ", '"a', "-", "T00:"]
    pieces += ["".join(draw.choices('{}[]",: aen10-é\\', k=draw.randint(2, 4))) for _ in range(20)]
    parts = [bytes([byte]) for byte in range(32, 128)] + [text.encode() for text in pieces]
    parts += ["中".encode()[:2], "😀".encode()[1:], b"\xc3", b"\xa9", b"\xe4", b"\xb8", b"\xad"]
    return [*SPECIAL.values(), *parts]


@cache
def trie() -> TokenTrie:
    texts = tokens()
    return make_trie(texts.__getitem__, len(texts), SPECIAL, END_IDS)


def brute_force(form: StructuredOutputsParams) -> BruteForce:
    texts = [b"" if i in {*SPECIAL, *END_IDS} else text for i, text in enumerate(tokens())]
    return BruteForce(compile_language(read_language(form)), texts, END_IDS)


FORMS = [StructuredOutputsParams(json=case.schema) for case in CASES]
FORMS += [
    StructuredOutputsParams(regex=r"(a|é|中)*b{1,3}"),
    StructuredOutputsParams(choice=["name", "na", "null", "a12"]),
    StructuredOutputsParams(json={"type": "string", "maxLength": 12}),
]


@cache
def packed():
    """The tables of all forms together."""
    structures = Structures(trie)
    for form in FORMS:
        structures.automaton(form)
    grid = structures.grid({form.fingerprint for form in FORMS})
    assert grid is not None
    return structures.pack(grid, PADDED_VOCAB)


def check_walks(form: StructuredOutputsParams, num_walks: int, draw: random.Random) -> None:
    """Walk at random in the tables of all forms, and compare every mask with the walk over bytes.

    The numbers of tokens that are left differ by walk; every walk ends in time.
    """
    plain, tables = brute_force(form), packed().tables
    assert packed().shortest[form.fingerprint] == plain.least[START]
    for _ in range(num_walks):
        left = plain.least[START] + draw.randint(0, 12)
        state, byte_state = packed().first_states[form.fingerprint], START
        while True:
            words = np.asarray(allowed_words(tables, state, left))
            allowed = set(np.flatnonzero(words).tolist())
            expected = plain.allowed(byte_state, left)
            num_levels = int((tables.needs_SL[state] < 2**31 - 1).sum())
            if num_levels < MAX_LEVELS:
                assert allowed == expected
            assert allowed and allowed <= expected
            token = draw.choice(sorted(allowed))
            left -= 1
            if token in END_IDS:
                assert plain.automaton.is_accepting_S[byte_state]
                break
            byte_state = plain.next_of(byte_state)[token]
            state = following(tables, state, token)


def allowed_words(tables, state: int, left: int):
    """The arithmetic of the device for one row, in numpy, as jax is slow for single rows."""
    level = max(int((tables.needs_SL[state] <= left).sum()) - 1, 0)
    words_W = tables.masks_MW[tables.mask_SL[state, level]]
    return np.unpackbits(words_W.view(np.uint8), bitorder="little")[:PADDED_VOCAB]


def following(tables, state: int, token: int) -> int:
    schema = tables.schema_S[state]
    return int(tables.first_K[schema] + tables.next_SC[state, tables.class_KV[schema, token]])


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_masks_on_random_walks_are_those_of_a_walk_over_bytes(number: int):
    check_walks(FORMS[number], 6, random.Random(number))


def test_the_device_computes_masks_and_states_as_numpy_does():
    tables = packed().tables
    draw = np.random.default_rng(0)
    state_B = draw.integers(0, len(tables.schema_S), 64)
    left_B = np.maximum(draw.integers(1, 40, 64), tables.needs_SL[state_B, 0])
    token_B = draw.integers(0, PADDED_VOCAB, 64)
    device = type(tables)._make(map(jnp.asarray, tables))
    allowed_BV = allowed_tokens(device, jnp.asarray(state_B), jnp.asarray(left_B), PADDED_VOCAB)
    next_B = next_states(device, jnp.asarray(state_B), jnp.asarray(token_B))
    for row, (state, left, token) in enumerate(zip(state_B, left_B, token_B, strict=True)):
        assert (np.asarray(allowed_BV[row]) == allowed_words(tables, state, left)).all()
        assert next_B[row] == following(tables, state, token)


def test_rows_without_a_form_may_have_every_token():
    tables = packed().tables
    assert allowed_words(tables, 0, 1).all()
    assert all(following(tables, 0, token) == 0 for token in range(PADDED_VOCAB))


def test_special_tokens_are_no_text():
    tables = packed().tables
    bits = np.unpackbits(tables.masks_MW[1:].view(np.uint8), axis=1, bitorder="little")
    assert not bits[:, sorted({*SPECIAL} - END_IDS)].any()
    assert not bits[:, len(tokens()) :].any()
    # the plain token of the same text is one
    assert bits[:, tokens().index(b"{", 3)].any()


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": {"type": "string", "maxLength": 20_000}}, "maxLength at /: expected a smaller"),
        (
            {
                "json": {
                    "properties": {
                        "a": {"type": "boolean"},
                        "b": {"type": "array", "items": {"type": "string"}, "maxItems": 9000},
                    }
                }
            },
            "maxItems at /properties/b: expected a smaller",
        ),
        ({"json": {"enum": [f"value {i:06}" for i in range(9000)]}}, "enum at /: expected a small"),
        ({"json": {"type": "string", "pattern": "a[ab]{15}$"}}, "pattern at /: expected a smaller"),
        ({"regex": "(a|b)*a(a|b){15}"}, "regex at /: expected a smaller"),
        ({"regex": "(a{1000}){1000}"}, "regex at /: expected a smaller"),
        ({"regex": "(a"}, "regex: expected a closing parenthesis"),
        ({"regex": "й"}, "expected a text that the vocabulary can spell"),
        ({"json": {"not": {}}}, "not at /: expected a schema without this keyword"),
    ],
)
def test_a_form_that_cannot_be_compiled_is_refused_by_keyword_and_place(form, message):
    with pytest.raises(RowError) as caught:
        compile_form(StructuredOutputsParams(**form), trie())
    assert f"structured output: {message}" in caught.value.message


def test_a_model_without_tokenizer_or_end_token_has_no_forms():
    form = StructuredOutputsParams(choice=["a"])
    with pytest.raises(RowError, match="a model with a tokenizer"):
        Structures().automaton(form)
    with pytest.raises(RowError, match="a model with an end token"):
        compile_form(form, TokenTrie([b"a"], ()))


def test_a_plan_with_smaller_tables_is_refused():
    structures = Structures(trie)
    structures.automaton(form := StructuredOutputsParams(choice=["a", "b"]))
    grid = structures.grid({form.fingerprint})
    assert grid is not None
    small = type(grid)(grid.states - 1, grid.classes, grid.masks, grid.schemas)
    with pytest.raises(ValueError, match=r"plan \[structured\]: expected states, classes and"):
        structures.pack(small, PADDED_VOCAB)


def test_references_that_double_are_refused_in_time():
    names = {f"s{i}": {"properties": {k: {"$ref": f"#/$defs/s{i + 1}"} for k in "ab"}}
             for i in range(30)}  # fmt: skip
    schema = {"$defs": names | {"s30": {"const": 1}}, "$ref": "#/$defs/s0"}
    with pytest.raises(RowError, match="at most 64 schemas inside each other, and 10000 in all"):
        compile_form(StructuredOutputsParams(json=schema), trie())
