"""A job that another set-up of processes continues: refused, or allowed and recorded."""

import json

import fake_model as fake
import pytest
from fake_model import masked, run, write_input
from faulty_disk import Crash, FaultyDisk
from file_identity import identity

from noria.runtime.batch.journal import Journal
from noria.runtime.batch.journal_records import PLAN, SETUP
from noria.runtime.errors import JournalError

TWO, FOUR = "2 processes of 4 devices, gloo", "4 processes of 2 devices, gloo"


def begin(path, setup: str, **options) -> None:
    journal = Journal.open(path, {"model": "m", SETUP: setup}, **options)
    if journal.plan is None:
        journal.record_fact(PLAN, "plan = 1")
    journal.close()


def test_a_job_goes_on_with_the_set_up_that_came_last(tmp_path):
    path = tmp_path / "out.jsonl.journal"
    begin(path, TWO)
    begin(path, FOUR, may_differ={SETUP})
    begin(path, FOUR)
    with pytest.raises(JournalError, match=f"processes: there {FOUR}, now {TWO}"):
        begin(path, TWO)
    journal = Journal.open(path, {"model": "m", SETUP: TWO}, may_differ={SETUP})
    assert journal.setups == [TWO, FOUR, TWO]
    journal.close()


def test_a_set_up_that_may_differ_lets_nothing_else_differ(tmp_path):
    path = tmp_path / "out.jsonl.journal"
    begin(path, TWO)
    with pytest.raises(JournalError) as caught:
        Journal.open(path, {"model": "other", SETUP: FOUR}, may_differ={SETUP})
    assert "model: there m, now other" in str(caught.value)
    assert "processes" not in str(caught.value)


def test_a_refusal_leaves_the_journal_as_it_was(tmp_path):
    path = tmp_path / "out.jsonl.journal"
    begin(path, TWO)
    path.write_bytes(path.read_bytes() + b"torn")
    before = path.read_bytes()
    with pytest.raises(JournalError):
        begin(path, FOUR)
    assert path.read_bytes() == before


def test_a_journal_without_a_plan_binds_nothing(tmp_path):
    """Its first job was refused, or ended before a build."""
    path = tmp_path / "out.jsonl.journal"
    Journal.open(path, {"model": "m", SETUP: TWO}).close()
    path.write_bytes(path.read_bytes() + b"torn")
    begin(path, FOUR)
    journal = Journal.open(path, {"model": "m", SETUP: FOUR})
    assert journal.setups == [FOUR] and journal.plan == "plan = 1"
    journal.close()


def test_rows_are_the_same_and_the_manifest_names_every_set_up(tmp_path):
    source, output = write_input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    run(source, tmp_path / "whole.jsonl")
    with pytest.raises(Crash):
        run(source, output, disk=FaultyDisk(30, Crash()), setup=TWO)
    with pytest.raises(JournalError, match="--allow-different-numerics"):
        run(source, output, setup=FOUR)
    run(source, output, setup=FOUR, allow_other_setup=True)
    assert masked(output) == masked(tmp_path / "whole.jsonl")
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["setups"] == [TWO, FOUR]


def test_a_complete_job_is_complete_under_another_set_up_where_that_is_allowed(tmp_path):
    source, output = write_input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    run(source, output, setup=TWO)
    before = identity(output)
    model = fake.FakeModel()
    run(source, output, model, setup=FOUR, allow_other_setup=True)
    assert model.num_builds == 0 and identity(output) == before
