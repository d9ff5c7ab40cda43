"""Wrong records with a correct checksum give one error, with the byte and a remedy."""

import json
import re
import zlib
from pathlib import Path

import pytest
from fake_model import FakeModel, masked, run, settings, write_input
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from noria.runtime.batch.journal import Journal
from noria.runtime.batch.journal_records import PLAN
from noria.runtime.errors import JournalError
from noria.runtime.process.stop_signals import StopNow

HEADER, RUN, THE_PLAN, ROW = 0, 1, 6, 8
"""Positions in a journal's records, of which a run has one when each of its phases begins."""
KINDS = ["header", "run", "run", "run", "fact", "fact", "fact", "run", "row"]

WORDS = st.text(st.characters(codec="utf-8"), max_size=6)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        WORDS,
        st.sampled_from(["header", "fact", "row", "setup", "plan", 2, -1, 10**400]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=5,
)


def record(facts: bytes, line: bytes | None) -> bytes:
    payload = facts if line is None else facts + b"\t" + line
    return b"%08x %s\n" % (zlib.crc32(payload), payload)


def parted(whole: bytes) -> tuple[bytes, bytes | None]:
    facts, tab, line = whole[9:-1].partition(b"\t")
    return facts, line if tab else None


class Stopping(FakeModel):
    """A model that ends the job after some rows, like a signal."""

    def build(self, *arguments, **options):
        built = super().build(*arguments, **options)
        step = self.generator.step

        def steps():
            if self.generator.num_steps == 4:
                raise StopNow(15)
            return step()

        self.generator.step = steps
        return built


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory) -> tuple[Path, list[bytes]]:
    """A job's input, and the records of its journal when it was stopped."""
    folder = tmp_path_factory.mktemp("unfinished")
    source = write_input(folder / "in.jsonl", num_rows=12)
    with pytest.raises(StopNow):
        run(source, folder / "out.jsonl", Stopping())
    records = (folder / "out.jsonl.journal").read_bytes().splitlines(keepends=True)
    kinds = [json.loads(parted(whole)[0])["kind"] for whole in records]
    assert kinds[: ROW + 1] == KINDS and len(records) > 10
    assert json.loads(parted(records[THE_PLAN])[0])["name"] == PLAN
    return source, records


def open_journal(path: Path) -> Journal:
    job = settings("in.jsonl", path.with_name("out.jsonl"))
    return Journal(path, job.identity.stored)


@st.composite
def changed(draw, whole: bytes) -> bytes:
    """Draw a record with other facts or another line, and a correct checksum."""
    facts, line = parted(whole)
    how = draw(st.sampled_from(["key", "value", "inner", "facts", "bytes", "line", "no line"]))
    table = json.loads(facts)
    key = draw(st.sampled_from(sorted(table)))
    if how == "key":
        del table[key]
    elif how == "value":
        table[key] = draw(VALUES)
    elif how == "inner" and isinstance(table[key], dict):
        table[key][draw(WORDS)] = draw(VALUES)
    elif how == "facts":
        table = draw(VALUES)
    facts = json.dumps(table).encode()
    if how == "bytes":
        facts = draw(st.binary(max_size=20)).replace(b"\n", b"")
    elif how == "line":
        line = draw(st.binary(max_size=20) | VALUES.map(json.dumps).map(str.encode))
        line = line.replace(b"\n", b"")
    elif how == "no line":
        line = None
    return record(facts, line)


@given(data=st.data())
@examples(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_wrong_record_is_one_error_that_names_its_byte_or_does_no_harm(
    unfinished, tmp_path, data
):
    _, records = unfinished
    index = data.draw(st.integers(0, ROW + 1))
    spoilt = [*records[:index], data.draw(changed(records[index])), *records[index + 1 :]]
    path = tmp_path / "out.jsonl.journal"
    path.write_bytes(b"".join(spoilt))
    offset = sum(map(len, records[:index]))
    try:
        journal = open_journal(path)
    except JournalError as error:
        message = str(error)
        if "configuration of this job" not in message:
            assert f"the record at byte {offset} is complete, but wrong: " in message
        assert "--restart" in message and "\n" not in message.partition("configuration")[0]
        assert path.read_bytes() == b"".join(spoilt)
        return
    for row in journal.rows.values():
        assert isinstance(json.loads(journal.output_line(row)), dict)
        json.dumps(dict(row.metrics), allow_nan=False)
    journal.close()


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (
            HEADER,
            {"configuration": None},
            "configuration: expected a table of strings in a header, got",
        ),
        (HEADER, {"configuration": {"a": 1}}, "configuration: expected a table of strings"),
        (HEADER, {"kind": "row"}, "row: expected a number from 0 in a row, got none"),
        (
            HEADER,
            {"format": 1},
            r"journal of format 2, got 1, which the version of noria that wrote",
        ),
        (THE_PLAN, {"value": 7}, "value: expected a string in a fact, got 7"),
        (THE_PLAN, {"name": "instant", "value": "no"}, "the instant: expected a time, got 'no'"),
        (THE_PLAN, {"value": "= no"}, "the plan: expected TOML, got '= no'"),
        (
            THE_PLAN,
            {"kind": "note"},
            "kind: expected one of header, fact, setup, run, row, got 'note'",
        ),
        (RUN, {"number": -1}, "number: expected a number from 0 in a run, got -1"),
        (RUN, {"run": {}}, r"run: expected the figures of a run in a run, got \{\}"),
        (ROW, {"row": -1}, "row: expected a number from 0 in a row, got -1"),
        (ROW, {"row": True}, "row: expected a number from 0 in a row, got True"),
        (ROW, {"custom_id": None}, "custom_id: expected a string in a row, got none"),
        (ROW, {"code": 3}, "code: expected a string or null in a row, got 3"),
        (ROW, {"metrics": {"output_tokens": "5"}}, "metrics: expected a table of finite numbers"),
        (ROW, {"metrics": {"output_tokens": float("nan")}}, "metrics: expected a table of finite"),
    ],
)
def test_an_error_says_what_was_expected_where_and_what_to_do(
    unfinished, tmp_path, index, change, message
):
    source, records = unfinished
    facts, line = parted(records[index])
    spoilt = [*records]
    spoilt[index] = record(json.dumps(json.loads(facts) | change).encode(), line)
    path = tmp_path / "out.jsonl.journal"
    path.write_bytes(b"".join(spoilt))
    at = sum(map(len, records[:index]))
    expected = (
        f"{re.escape(str(path))}: the record at byte {at} is complete, but wrong: .*{message}"
    )
    for _ in range(2):
        with pytest.raises(JournalError, match=rf"{expected}.*\. Restore the file, or discard it"):
            run(source, tmp_path / "out.jsonl")
    assert run(source, tmp_path / "out.jsonl", restart=True) == 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: [*r, r[0]], "expected one header, got 'header'"),
        (lambda r: r[1:], "expected a header first, got 'run'"),
        (lambda r: [*r, record(b"{", None)], r"facts: expected a JSON object, got b'\{'"),
        (lambda r: [*r, record(b"[" * 10**5, None)], "facts: expected a JSON object"),
        (lambda r: [*r, record(b"[]", None)], r"facts: expected a JSON object, got \[\]"),
        (lambda r: [*r, record(parted(r[ROW])[0], b"{]")], "output line: expected a JSON object"),
        (lambda r: [*r, record(parted(r[ROW])[0], None)], "output line: expected a JSON object"),
        (
            lambda r: [*r, record(parted(r[THE_PLAN])[0], b"{}")],
            "expected no output line in a fact",
        ),
    ],
)
def test_records_in_the_wrong_place_or_of_the_wrong_form(unfinished, tmp_path, spoil, message):
    source, records = unfinished
    (tmp_path / "out.jsonl.journal").write_bytes(b"".join(spoil(records)))
    with pytest.raises(JournalError, match=message):
        run(source, tmp_path / "out.jsonl")


def test_the_journal_that_they_were_made_of_is_gone_on_with(unfinished, tmp_path):
    source, records = unfinished
    (tmp_path / "out.jsonl.journal").write_bytes(b"".join(records))
    model = FakeModel()
    assert run(source, tmp_path / "out.jsonl", model) == 1
    assert 0 < len(model.generator.submitted) < 14
    run(source, tmp_path / "whole.jsonl")
    assert masked(tmp_path / "out.jsonl") == masked(tmp_path / "whole.jsonl")
