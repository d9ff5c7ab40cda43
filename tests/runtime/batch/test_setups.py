"""A job that another set-up of processes continues: refused, or allowed and recorded."""

import json

import fake_model as fake
import pytest
from fake_model import masked, run, write_input
from faulty_disk import Crash, FaultyDisk
from file_identity import identity

from noria.runtime.batch.journal import Journal
from noria.runtime.batch.journal_records import OF_DEVICES, PLAN, SETUP
from noria.runtime.errors import JobError, JournalError
from noria.runtime.rows.lines import PlacedRow

TWO, FOUR = "2 processes of 4 devices, gloo", "4 processes of 2 devices, gloo"


def begin(path, setup: str, **options) -> None:
    journal = Journal(path, {"model": "m", SETUP: setup}, **options)
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
    journal = Journal(path, {"model": "m", SETUP: TWO}, may_differ={SETUP})
    assert journal.setups == [TWO, FOUR, TWO]
    journal.close()


def test_a_set_up_that_may_differ_lets_nothing_else_differ(tmp_path):
    path = tmp_path / "out.jsonl.journal"
    begin(path, TWO)
    with pytest.raises(JournalError) as caught:
        Journal(path, {"model": "other", SETUP: FOUR}, may_differ={SETUP})
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
    Journal(path, {"model": "m", SETUP: TWO}).close()
    path.write_bytes(path.read_bytes() + b"torn")
    begin(path, FOUR)
    journal = Journal(path, {"model": "m", SETUP: FOUR})
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


EIGHT = {"model": "m", "target": "cpu:8", "layout": "{}", "plan": "derived", "overrides": ""}
ONE = EIGHT | {"target": "cpu", "layout": ""}
ALL = {SETUP, *OF_DEVICES}


def test_other_devices_have_no_plan_until_one_is_recorded_for_them(tmp_path):
    path = tmp_path / "out.jsonl.journal"
    journal = Journal(path, EIGHT)
    journal.record_fact(PLAN, "devices = 8")
    journal.record_row(PlacedRow(0, 1, 0, "a", "h"), {"id": "x"})
    journal.close()
    for _ in range(2):  # also after a kill before the new plan
        journal = Journal(path, ONE, may_differ=ALL)
        assert (journal.plan, journal.plan_before) == (None, "devices = 8")
        assert journal.binds and len(journal.rows) == 1
        journal.close()
    journal = Journal(path, ONE)
    journal.record_fact(PLAN, "devices = 1")
    journal.close()
    journal = Journal(path, ONE)
    assert journal.plan == "devices = 1" and len(journal.rows) == 1
    journal.close()
    with pytest.raises(JournalError, match="target: there cpu, now cpu:8"):
        Journal(path, EIGHT)


def test_the_option_is_advised_only_where_it_works(tmp_path):
    path, advice = tmp_path / "out.jsonl.journal", "--allow-different-numerics"
    begin(path, TWO)

    def refusal(**changes) -> str:
        with pytest.raises(JournalError) as caught:
            Journal(path, {"model": "m", SETUP: TWO} | changes)
        return str(caught.value)

    assert "by another plan" not in refusal(**{SETUP: FOUR})
    assert advice in refusal(**{SETUP: FOUR})
    assert f"With {advice} the job continues on these devices" in refusal(target="cpu:4")
    assert "The --plan must be for these devices." in refusal(target="cpu:4", plan="{}")
    assert advice not in refusal(target="cpu:4", model="other")
    assert advice not in refusal(plan="{}")
    assert advice not in refusal(target="cpu:4", pipeline="p")


def test_a_plan_that_answers_otherwise_is_refused_on_other_devices(tmp_path):
    source, output = write_input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    begun = {"configuration": EIGHT, "setup": TWO}
    with pytest.raises(Crash):
        run(source, output, disk=FaultyDisk(30, Crash()), **begun)
    model = fake.FakeModel()
    model.plan = 'max_length = 9\n[numbers]\ndtype = "bfloat16"\n'
    goes_on = {"configuration": ONE, "setup": FOUR, "allow_other_setup": True}
    with pytest.raises(JobError, match="numbers dtype: finished rows have nothing, now bfloat16"):
        run(source, output, model, **goes_on)
    run(source, output, **goes_on)
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["setups"] == [TWO, FOUR] and manifest["configuration"]["target"] == "cpu"
