"""Grammars are read as their automata: an independent parser agrees, up to the depth of calls."""

import random

import pytest
from test_json_schema import random_text

from noria.runtime.structured.byte_automaton import compile_language
from noria.runtime.structured.grammar import read_grammar
from noria.runtime.structured.language import TooManyParts
from noria.runtime.structured.pattern import PatternError

SUMS = 'root ::= root ("+" | "*") root | "(" root ")" | "-" root | root "!" | [0-9]'
CASES = {
    "texts and sets": (
        r'root ::= "a\"\x41\n" [^a-c\]] . # a comment' + "\n",
        ('a"A\nzé', 'a"A\nd\n'),
        ('a"A\naé', 'a"A\n]z', 'a"A\nz'),
    ),
    "quantifiers": (
        'root ::= "a"{2} "b"{1,} ("c" | "d"){0,2} "e"? | ',
        ("aab", "aabbbcde", ""),
        ("ab", "aabcdc", "aa"),
    ),
    "rules": (
        'root ::= pair ("," pair)*\npair ::= [a-z]+ "=" [0-9]',
        ("a=1,bc=2",),
        ("a=1,", "=1"),
    ),
    "a loop to the left": ('root ::= root "," "x" | "x"', ("x", "x,x,x,x,x,x,x,x"), ("", "x,")),
    "a loop to the right": ('root ::= "x" "," root | "x"', ("x", "x,x,x,x,x,x,x,x"), ("", "x,")),
    "loops between": (SUMS, ("1", "-1+2!*--3!!+4", "(1+2)*3"), ("1+", "(1", "1--2", "((1))")),
    "rules that call each other": (
        'root ::= "[" (item ("," item)*)? "]"\nitem ::= "1" | root',
        ("[]", "[1,[1,1]]"),
        ("[[[]]]", "[1"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_grammar_accepts_and_rejects_its_examples(name: str):
    grammar, accepted, rejected = CASES[name]
    automaton = compile_language(read_grammar(grammar, recursion=1).language)
    for text in accepted:
        assert automaton.accepts(text.encode()), text
    for text in rejected:
        assert not automaton.accepts(text.encode()), text


def derives(text: str) -> bool:
    """Whether the grammar of sums derives a text: one term, or two parts around a sign."""

    def term(at: int) -> set[int]:
        """The ends of all terms from a place on."""
        if text[at : at + 1].isdigit():
            ends = {at + 1}
        elif text[at : at + 1] == "-":
            ends = total(at + 1)
        elif text[at : at + 1] == "(":
            ends = {end + 1 for end in total(at + 1) if text[end : end + 1] == ")"}
        else:
            ends = set()
        return ends

    def total(at: int) -> set[int]:
        ends, new = set(), term(at)
        while new - ends:
            ends |= new
            new = {end + 1 for end in ends if text[end : end + 1] == "!"}
            new |= {
                e
                for end in ends
                if text[end : end + 1] in ("+", "*") and end < len(text)
                for e in term(end + 1)
            }
        return ends

    return len(text) in total(0)


def test_random_texts_of_a_grammar_are_derived_by_it():
    automaton = compile_language(read_grammar(SUMS, recursion=2).language)
    draw = random.Random(0)
    texts = [random_text(automaton, draw).decode() for _ in range(200)]
    assert all(map(derives, texts)) and any("((" in text for text in texts)
    for text in texts:
        broken = list(text)
        broken[draw.randrange(len(broken))] = draw.choice("1+-!()*")
        broken = "".join(broken)
        if automaton.accepts(broken.encode()):
            assert derives(broken)
        elif broken.count("(") < 3:
            assert not derives(broken), broken


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start ::= "a"', "expected a rule of the name root"),
        ("root ::= word", "expected a rule of the name word, got word at character 9"),
        ('root ::= "a" $', "got $ at character 13"),
        ('root ::= ("a"', "expected a closing parenthesis, got the end"),
        ('root ::= "a"{3,2}', "expected counts in order"),
        ('root ::= "a"{}', "expected counts in order"),
        ('root ::= "a"\nroot ::= "b"', "expected one rule of each name"),
        ('root ::= "a" )', "expected a rule as"),
        ('root ::= "\\ud800"', "expected characters that UTF-8 can encode"),
        ("root ::= [z-a]", "in the set at 9"),
        ('root: "a"', "got : at character 4"),
        ("root ::= " + "(" * 100, "at most 64 groups"),
        ("a" * 70_000, "at most 65536 characters"),
    ],
)
def test_a_wrong_grammar_is_refused_by_place(grammar: str, message: str):
    with pytest.raises(PatternError) as caught:
        read_grammar(grammar)
    assert message in str(caught.value)


def test_rules_that_call_each_other_too_often_are_refused():
    rules = [f"r{i} ::= r{i + 1} r{i + 1}" for i in range(20)]
    with pytest.raises(TooManyParts):
        read_grammar("\n".join(["root ::= r0", *rules, 'r20 ::= "a"']))


def test_an_endless_grammar_has_an_empty_language():
    assert compile_language(read_grammar("root ::= root").language).is_empty
