"""Automata over tokens, and their tables on the device, against a walk over bytes."""

import random
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics_helpers import script
from schemas import CASES

from noria.modelzoo.structure import StructureTables, allowed_tokens, next_states
from noria.runtime.errors import ConfigError, RowError
from noria.runtime.structured import structures, token_automaton
from noria.runtime.structured.form_compiler import compile_form
from noria.runtime.structured.params import StructuredOutputsParams
from noria.runtime.structured.structures import Structures
from noria.runtime.structured.tables import JobTables
from noria.runtime.structured.token_automaton import TokenTrie

WALKS = script("scripts/structured_walks.py")
FORMS = [StructuredOutputsParams(json=case.schema) for case in CASES]
FORMS += [
    StructuredOutputsParams(regex=r"(a|é|中)*b{1,3}"),
    StructuredOutputsParams(choice=["name", "na", "null", "a12"]),
    StructuredOutputsParams(json={"type": "string", "maxLength": 12}),
]


@cache
def walks():
    """Walks in the tables of all forms together."""
    return WALKS.Walks(FORMS)


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_masks_on_random_walks_are_those_of_a_walk_over_bytes(number: int):
    assert walks().check(FORMS[number], 6, random.Random(number)) > 6


def test_the_device_computes_masks_and_states_as_numpy_does():
    tables = walks().tables
    draw = np.random.default_rng(0)
    state_B = draw.integers(0, len(tables.schema_S), 64)
    left_B = np.maximum(draw.integers(1, 40, 64), tables.needs_SL[state_B, 0])
    token_B = draw.integers(0, WALKS.PADDED_VOCAB, 64)

    @jax.jit
    def step(tables: StructureTables) -> tuple[jax.Array, jax.Array]:
        state, left, token = map(jnp.asarray, (state_B, left_B, token_B))
        allowed_BV = allowed_tokens(tables, state, left, WALKS.PADDED_VOCAB)
        return allowed_BV, next_states(tables, state, token)

    allowed_BV, next_B = map(np.asarray, step(tables))
    for row, (state, left, token) in enumerate(zip(state_B, left_B, token_B, strict=True)):
        assert (allowed_BV[row] == walks().bits(state, left)).all()
        assert next_B[row] == walks().following(state, token)


def test_rows_without_a_form_may_have_every_token():
    assert walks().bits(0, 1).all()
    assert all(walks().following(0, token) == 0 for token in range(WALKS.PADDED_VOCAB))


def test_special_tokens_are_no_text():
    tables = walks().tables
    masks_MW = tables.words_QU[tables.mask_block_MJ[1:]].reshape(len(tables.mask_block_MJ) - 1, -1)
    bits = np.unpackbits(masks_MW.view(np.uint8), axis=1, bitorder="little")
    assert not bits[:, sorted({*WALKS.SPECIAL} - WALKS.END_IDS)].any()
    assert not bits[:, len(WALKS.tokens()) :].any()
    # the plain token of the same text is one
    assert bits[:, WALKS.tokens().index(b"{", 3)].any()


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
        ({"regex": "((a|b){0,90}a){0,90}"}, "regex at /: expected a smaller"),
        ({"regex": "(a"}, "regex: expected a closing parenthesis"),
        ({"regex": "й"}, "expected a text that the vocabulary can spell"),
        ({"json": {"not": {}}}, "not at /: expected a schema without this keyword"),
    ],
)
def test_a_form_that_cannot_be_compiled_is_refused_by_keyword_and_place(form, message):
    with pytest.raises(RowError) as caught:
        compile_form(StructuredOutputsParams(**form), WALKS.trie())
    assert f"structured output: {message}" in caught.value.message


def test_a_model_without_tokenizer_or_end_token_has_no_forms():
    form = StructuredOutputsParams(choice=["a"])
    with pytest.raises(RowError, match="a model with a tokenizer"):
        Structures().automaton(form)
    with pytest.raises(RowError, match="a model with an end token"):
        compile_form(form, TokenTrie([b"a"], ()))


def test_a_plan_with_smaller_tables_is_refused():
    made = Structures(WALKS.trie)
    made.automaton(form := StructuredOutputsParams(choice=["a", "b"]))
    grid = made.grid({form.fingerprint})
    assert grid is not None
    for name in ("states", "classes", "masks", "move_blocks", "mask_blocks"):
        small = replace(grid, **{name: getattr(grid, name) - 1})
        with pytest.raises(ValueError, match=rf"plan \[structured\]: expected {name} of at least"):
            made.pack(small, WALKS.PADDED_VOCAB)


def test_sizes_are_those_of_the_packed_tables(monkeypatch):
    made = Structures(WALKS.trie)
    sizes, forms = JobTables(), FORMS[:6]
    for form in forms:
        sizes.add(made.automaton(form))
    grid = made.grid({form.fingerprint for form in forms})
    assert grid is not None
    packed = made.pack(grid, WALKS.PADDED_VOCAB)
    num_bytes = sum(table.nbytes for table in packed.tables)
    assert num_bytes == sizes.num_bytes(WALKS.PADDED_VOCAB)
    # equal blocks of several forms are stored once
    apart = [len(made.automaton(form).moves_PA) for form in forms]
    assert grid.move_blocks < sum(apart)
    # the first form beyond the limit ends the job
    limit = num_bytes // 2
    monkeypatch.setattr(structures, "MAX_TABLE_BYTES", limit)
    bounded = Structures(WALKS.trie)
    with pytest.raises(ConfigError, match=r"expected tables of at most .* Split the job by forms"):
        for form in forms:
            bounded.automaton(form)


@pytest.mark.parametrize("limit", ["MAX_MOVES", "MAX_MASKS"])
def test_many_moves_and_masks_are_refused_before_they_are_made(monkeypatch, limit):
    form = StructuredOutputsParams(choice=["name", "na"])
    made = compile_form(form, WALKS.trie())
    sizes = {"MAX_MOVES": made.num_states * made.num_classes, "MAX_MASKS": len(made.mask_block_MJ)}
    monkeypatch.setattr(token_automaton, limit, sizes[limit] // 2)
    with pytest.raises(RowError, match="expected a smaller language"):
        compile_form(form, WALKS.trie())


def test_references_that_double_are_refused_in_time():
    names = {f"s{i}": {"properties": {k: {"$ref": f"#/$defs/s{i + 1}"} for k in "ab"}}
             for i in range(30)}  # fmt: skip
    schema = {"$defs": names | {"s30": {"const": 1}}, "$ref": "#/$defs/s0"}
    with pytest.raises(RowError, match="expected a schema or grammar of fewer parts"):
        compile_form(StructuredOutputsParams(json=schema), WALKS.trie())
