"""Patterns of answers: what they find, and which are refused because a search could take long."""

import time

import pytest

from noria.runtime.structured.answer_pattern import (
    MAX_PATTERN,
    MAX_TEXT,
    compile_answer,
    find_answer,
)


def find(pattern: str, text: str) -> str | None:
    return find_answer(compile_answer(pattern), text)


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        (r"answer is (\d+)", "The answer is 42, the answer is 43.", "42"),
        (r"\d+", "12 or 13", "12"),
        (r"answer: (\d*)", "answer: none", None),
        (r"x(\d)?", "x", None),
        (r"(?:a|b)(c)", "ac bc", "c"),
        (r"#### (\-?[0-9.,]+)", "so #### -1,200.", "-1,200."),
        (r"(?i)answer:\s*+\$?(-?[\d,]++(?:\.\d++)?)", "Answer:  $1,200.50", "1,200.50"),
        (r"\\boxed\{([^}]*)\}", r"is \boxed{x+1}", "x+1"),
        (r"(?s).*answer (\d{1,9})", "answer 1\nanswer 2", "2"),
        (r"\d{1,3}(?:,\d{3})*", "about 1,234,567", "1,234,567"),
    ],
)
def test_an_answer_is_the_group_or_the_whole_of_the_first_match(pattern, text, answer):
    assert find(pattern, text) == answer


def test_only_the_end_of_a_text_is_read():
    assert find("a", "a" + "b" * (MAX_TEXT - 1)) == "a"
    assert find("a", "a" + "b" * MAX_TEXT) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "(a*)*b", "(?:a|a)*b", "(?:a+)+b", "(?:a?){50}b", "(?:a|ab|b)*c", "a*a*a*b",
        "(?:(?:x+x+)+)*+y", "(?=(?:a*)*b)a", "(?:(?:a{9999})*){9999}b", r"(?:\w+\s?)*!",
        "(?>(?:a*)*b)a",
    ],
)  # fmt: skip
def test_a_pattern_with_too_many_ways_to_match_is_refused(pattern):
    start = time.process_time()
    with pytest.raises(ValueError, match=r"expected a pattern with at most .* Bound its repeats"):
        compile_answer(pattern)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("((", "expected a regular expression"),
        (r"(a)\1", "references to groups are not supported"),
        ("a{99999999999}", "expected a regular expression"),
        ("(x)(y)", r"at most one group, got 2 in '\(x\)\(y\)'. Write \(\?:"),
        ("a" * (MAX_PATTERN + 1), f"at most {MAX_PATTERN} characters, got {MAX_PATTERN + 1}"),
    ],
)
def test_a_pattern_that_is_not_one_is_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        compile_answer(pattern)


@pytest.mark.parametrize("pattern", ["a*-?-?(a*)b", "(?:a*+)*b", "a*(?:a*b|a*c|a*d)", "(?s).*a+b"])
def test_the_longest_search_that_is_accepted_ends_within_seconds(pattern):
    start = time.process_time()
    assert find(pattern, "a" * 2 * MAX_TEXT) is None
    assert time.process_time() - start < 20
