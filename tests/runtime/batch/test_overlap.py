"""The host makes text and journal of a call while the device runs the next call."""

import json
from math import ceil

import fake_model as fake
import pytest
from faulty_disk import Crash
from numerics_helpers import script

from noria.compile.grids.bucket_grid import BucketGrid
from noria.runtime.batch.journal import Journal
from noria.runtime.errors import JobError

bench = script("scripts/bench_host.py")
GRID = BucketGrid(64, ((16, 8),), decode_slots=8, steps_per_call=4)
MAX_TOKENS = [3, 30, 9, 17, 5, 24, 16, 4, 30, 2, 7, 11, 20, 3, 3, 19]


class Bytes(fake.ByteTokens):
    vocab_size = fake.VOCAB_SIZE
    special_ids = frozenset()
    strips_leading_space = False
    add_bos = False

    def encode_prompts(self, texts):
        assert not texts
        return []


def model() -> bench.StandInModel:
    return bench.StandInModel(GRID, Bytes(), seconds=0.0)


def write_rows(path, lengths=MAX_TOKENS, **params):
    rows = [
        {"id": f"q{i}", "prompt": [5] * (1 + i % 7), "max_tokens": length, **params}
        for i, length in enumerate(lengths)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def happened(monkeypatch) -> list[str]:
    """Record the host's steps in order: `start` and `read` of calls, `text`, and `journal`."""
    found: list[str] = []

    def note(owner, name, what):
        of_owner = getattr(owner, name)

        def noted(self, *arguments, **options):
            found.append(what)
            return of_owner(self, *arguments, **options)

        monkeypatch.setattr(owner, name, noted)

    note(bench.StandInDevice, "_start", "start")
    note(bench.Pending, "__array__", "read")
    note(Bytes, "token_bytes", "text")
    note(Journal, "record_row", "journal")
    return found


def between_calls(happened: list[str]) -> set[str]:
    """Return the steps between the read of a call and the start of the next call."""
    last = len(happened) - happened[::-1].index("start")
    found, is_idle = set(), True
    for what in happened[:last]:
        is_idle = what != "start" and (is_idle or what == "read")
        if is_idle:
            found.add(what)
    return found


def test_no_text_is_made_and_no_row_recorded_while_the_device_waits(tmp_path, happened):
    fake.run(write_rows(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", model())
    assert between_calls(happened) == {"read"}
    assert happened.count("journal") == len(MAX_TOKENS)
    assert happened.count("text") == sum(MAX_TOKENS)


def test_only_the_text_of_rows_with_stop_strings_is_made_while_the_device_waits(tmp_path, happened):
    source = write_rows(tmp_path / "in.jsonl", stop=["never, as no answer has as many letters"])
    fake.run(source, tmp_path / "out.jsonl", model())
    assert between_calls(happened) == {"read", "text"}


def test_a_stop_string_frees_the_slot_before_the_next_call(tmp_path):
    ids = bench.answer_ids(30, fake.VOCAB_SIZE)
    stop = "".join(chr(i) for i in ids if i < 128)[:2]
    source = write_rows(tmp_path / "in.jsonl", [30] * 9, stop=[stop])
    of_job = model()
    fake.run(source, tmp_path / "out.jsonl", of_job)
    records = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    choices = [record["response"]["body"]["choices"][0] for record in records]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    kinds = [name.split()[0] for name, _ in of_job.device.calls]
    # the ninth row starts as soon as the stop string of the others is complete
    num_calls = kinds.index("prefill", 1) - 1
    assert num_calls < ceil(30 / GRID.steps_per_call)
    assert kinds == 2 * ["prefill", *["decode"] * num_calls]


def test_rows_are_recorded_in_the_order_in_which_they_end(tmp_path, monkeypatch):
    lengths = MAX_TOKENS[: GRID.decode_slots]
    source, output = write_rows(tmp_path / "in.jsonl", lengths), tmp_path / "out.jsonl"
    recorded = []
    record_row = Journal.record_row

    def noted(self, row, *facts):
        recorded.append(row.row)
        record_row(self, row, *facts)

    monkeypatch.setattr(Journal, "record_row", noted)
    fake.run(source, output, model())
    # long rows are submitted first, so they have the first slots
    by_call = sorted(range(len(lengths)), key=lambda row: (ceil(lengths[row] / 4), -lengths[row]))
    assert recorded == by_call


class Failing(bench.StandInDevice):
    """Fails at the start of a call, after a number of other calls."""

    def __init__(self, after: int, error: BaseException):
        super().__init__(GRID, fake.VOCAB_SIZE, 0.0)
        self._after, self._error = after, error

    def _start(self, name: str):
        if len(self.calls) == self._after:
            raise self._error
        return super()._start(name)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    of_job = model()
    assert fake.run(write_rows(folder / "in.jsonl"), folder / "out.jsonl", of_job) == 0
    return fake.masked(folder / "out.jsonl"), len(of_job.device.calls)


@pytest.mark.parametrize("error", [Crash(), RuntimeError("out of memory")])
def test_a_job_that_ends_as_a_call_starts_has_recorded_all_rows_that_ended(
    tmp_path, reference, error
):
    expected, num_calls = reference
    source, output = write_rows(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    num_kept = 0
    for after in range(num_calls):
        of_job = model()
        of_job.device = Failing(after, error)
        with pytest.raises((Crash, JobError)):
            fake.run(source, output, of_job, restart=True)
        records = (tmp_path / "out.jsonl.journal").read_bytes().count(b'"kind":"row"')
        assert records == of_job.device.num_ended
        num_kept += records
    assert num_kept
    again = model()
    assert fake.run(source, output, again) == 0
    assert fake.masked(output) == expected
    assert len(again.device.calls) < num_calls
