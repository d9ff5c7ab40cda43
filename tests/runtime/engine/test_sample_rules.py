"""Rules for samples against their definition, in which all samples grow in step.

A sample is the list of its texts after each token. `defined` follows the definition token by token;
`decided` feeds the samples in a random order and in random amounts, as slots might run them.
"""

import random

import pytest

from noria.runtime.engine.sample_rules import RowSamples, SampleOutcome
from noria.runtime.request import SampleRule

PATTERN = r"=(\d)"


def own_end(texts: list[str], rule: SampleRule, min_tokens: int) -> tuple[int, str | None, bool]:
    """Return where a sample ends without the others, its answer, and whether it was certain."""
    probes: list[str] = []
    for length in range(1, len(texts)):
        if rule.probe_every and length % rule.probe_every == 0:
            probes.append(texts[length - 1].partition("=")[2][:1])
            last = probes[-rule.probes :]
            is_certain = len(last) == rule.probes and len(set(last)) == 1 and last[0] != ""
            if is_certain and length >= min_tokens:
                return length, last[0], True
    return len(texts), texts[-1].partition("=")[2][:1] or None, False


def defined(samples: list[list[str]], rule: SampleRule, min_tokens: int = 0):
    ends = [own_end(texts, rule, min_tokens) for texts in samples]
    stop = None
    for length in range(1, max(end[0] for end in ends) + 1):
        answers = [answer for end, answer, _ in ends if end <= length and answer is not None]
        if rule.stop_when and any(answers.count(a) >= rule.stop_when for a in answers):
            stop = length
            break
    ended = [end for end in ends if stop is None or end[0] <= stop]
    return [
        SampleOutcome(
            end[0],
            end[1],
            0 if end[1] is None else sum(other[1] == end[1] for other in ended),
            "certainty" if end[2] else None,
        )
        if end in ended
        else SampleOutcome(stop, None, 0, "agreement")
        for end in ends
    ]


def decided(samples, rule, draw: random.Random, min_tokens: int = 0, failing=()):
    """Return the decided state, and the number of tokens that were computed."""
    row = RowSamples(rule, len(samples), min_tokens)
    computed = [0] * len(samples)
    while running := [i for i in range(len(samples)) if not row.is_over(i)]:
        sample = draw.choice(running)
        length, end = computed[sample], computed[sample] + draw.randint(1, 8)
        computed[sample] = end = min(end, len(samples[sample]))
        while length < end and not row.has_ended(sample):
            length = min(end, length + row.until_probe(sample))
            is_last = length == len(samples[sample])
            if is_last and sample in failing:
                row.fail(sample, length)
                break
            row.read(sample, length, samples[sample][length - 1], has_ended=is_last)
    return row, computed


def random_samples(draw: random.Random, count: int) -> list[list[str]]:
    """Return samples of random lengths, whose answers may change while they grow."""
    samples = []
    for _ in range(count):
        texts, answer = [], ""
        for _ in range(draw.randint(1, 40)):
            if draw.random() < 0.15:
                answer = f"={draw.randrange(3)}"
            texts.append(answer)
        samples.append(texts)
    return samples


@pytest.mark.parametrize("probes", [None, (4, 2), (3, 3), (1, 1)])
@pytest.mark.parametrize("stop_when", [None, 2, 3, 5])
def test_every_order_decides_as_defined(probes, stop_when):
    draw = random.Random(f"{probes} {stop_when}")
    every, num = probes or (None, None)
    rule = SampleRule(PATTERN, stop_when, every, num)
    seen = set()
    for _ in range(150):
        samples = random_samples(draw, draw.randint(2, 9))
        min_tokens = draw.choice([0, 0, 9])
        expected = defined(samples, rule, min_tokens)
        for _ in range(4):
            row, computed = decided(samples, rule, draw, min_tokens)
            assert row.outcomes() == expected
            assert all(n >= end.length for n, end in zip(computed, expected, strict=True))
        seen |= {end.stopped_early for end in expected}
    assert ("agreement" in seen) == (stop_when is not None)
    assert ("certainty" in seen) == (probes is not None)


def test_samples_with_tokens_beyond_the_limit_stop_at_once():
    rule = SampleRule(PATTERN, stop_when=2)
    row = RowSamples(rule, 4)
    row.read(0, 12, "", has_ended=False)
    row.read(1, 10, "=1", has_ended=True)
    assert row.limit is None and not row.is_over(0)
    row.read(2, 11, "=1", has_ended=True)
    assert row.limit == 11 and row.is_over(0) and not row.is_over(3)
    # a sample that runs later may lower the limit, and may not be left out
    row.read(3, 5, "=1", has_ended=True)
    assert row.limit == 10
    ends = [(end.length, end.stopped_early) for end in row.outcomes()]
    assert ends == [(10, "agreement"), (10, None), (10, "agreement"), (5, None)]


def test_a_failure_counts_only_where_the_row_needs_the_token():
    rule = SampleRule(PATTERN, stop_when=2)
    for length, has_failed in ((8, True), (9, True), (10, False), (11, False)):
        samples = [["=1"] * 10, ["=1"] * 10, [""] * length, [""] * 30]
        for seed in range(20):
            row, _ = decided(samples, rule, random.Random(seed), failing={2})
            assert row.has_failed == has_failed
            expected = (length, None) if has_failed else (10, "agreement")
            assert (row.outcomes()[2].length, row.outcomes()[2].stopped_early) == expected


def kept(keep, ends: list[tuple[str | None, str | None]], means=()) -> list[int]:
    votes = [sum(a == answer for a, _ in ends) if answer else 0 for answer, _ in ends]
    outcomes = [
        SampleOutcome(5, answer, n, early) for (answer, early), n in zip(ends, votes, strict=True)
    ]
    return list(RowSamples(SampleRule(PATTERN, keep=keep), len(ends)).kept(outcomes, means))


def test_kept_samples():
    ends = [(None, "agreement"), ("1", None), ("2", None), ("2", "certainty"), ("1", None)]
    assert kept("all", ends) == [0, 1, 2, 3, 4]
    assert kept("majority", ends) == [1]
    assert kept("majority", [*ends, ("2", None)]) == [2]
    assert kept("majority", [(None, None), (None, None)]) == [0]
    assert kept("best", ends, [-0.1, -0.9, -0.2, -0.2, -0.3]) == [2]


def test_more_than_half_of_the_votes_decide_as_all_samples_do():
    draw = random.Random(6)
    num_stopped = 0
    for _ in range(300):
        samples = random_samples(draw, 7)
        whole, _ = decided(samples, SampleRule(PATTERN, keep="majority"), draw)
        early, _ = decided(samples, SampleRule(PATTERN, stop_when=4, keep="majority"), draw)
        answers = []
        for row in (whole, early):
            ends = row.outcomes()
            answers.append(ends[row.kept(ends, ())[0]].answer)
        assert answers[0] == answers[1]
        num_stopped += early.limit is not None
    assert num_stopped > 20
