"""The study's arithmetic: the published context lengths, and the fastest layouts."""

from numerics_helpers import script

STUDY = script("scripts/layout_study.py")


def test_contexts_are_as_long_as_those_that_were_published():
    for name, by_rows in STUDY.contexts().items():
        for rows, length in by_rows.items():
            assert abs(length / STUDY.PAPER_CONTEXTS[name][rows] - 1) < 0.015


def test_the_longest_context_by_batch_is_at_least_32_times_that_by_heads():
    found = STUDY.contexts()
    for by_heads in ("multihead, by heads", "multiquery, by heads"):
        assert found["multiquery, by batch"][128] >= 32 * found[by_heads][128]


def test_a_layout_wins_from_the_batch_on_where_it_is_the_fastest_that_fits():
    def points(*of: tuple[float, bool]) -> list[dict]:
        rows = (1, 2, 4)
        return [
            {"rows": r, "seconds": s, "fits": fits} for r, (s, fits) in zip(rows, of, strict=True)
        ]

    swept = {
        "few": points((1.0, True), (2.0, True), (4.0, True)),
        "many": points((3.0, True), (1.5, False), (3.0, True)),
    }
    assert list(STUDY.winners(swept)) == [(1, "few"), (4, "many")]
