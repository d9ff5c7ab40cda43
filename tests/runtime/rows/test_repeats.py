"""Equal rows are computed once and answered each, with the bytes of rows that are computed."""

import contextlib
import io
import json
import signal
from collections import Counter, deque

import fake_model as fake
import pytest
from fake_model import VOCAB_SIZE, masked, write_input
from faulty_disk import Crash, FaultyDisk

from noria.runtime.batch import job_input
from noria.runtime.batch.journal import Journal
from noria.runtime.batch.merge import merge
from noria.runtime.batch.run import run_job
from noria.runtime.errors import JobError, RowError
from noria.runtime.files.strict_json import Line
from noria.runtime.pods.peers import Peers
from noria.runtime.progress.progress import Progress
from noria.runtime.request import RequestOutput
from noria.runtime.rows import repeats
from noria.runtime.rows.lines import BatchRow, read_row
from noria.runtime.rows.part import Part
from noria.runtime.rows.repeats import Answer, RowDigests

GREEDY = {"prompt": "wheel", "temperature": 0}
SCORED = {"prompt": "wheel", "echo": True, "max_tokens": 0}
DISTINCT = [
    GREEDY,
    GREEDY | {"prompt": "wheels"},
    GREEDY | {"max_tokens": 5},
    GREEDY | {"max_tokens": 5, "n": 2},
    GREEDY | {"max_tokens": 5, "stop": ["x"]},
    GREEDY | {"max_tokens": 5, "logit_bias": {"7": 1}},
    GREEDY | {"echo": True},
    GREEDY | {"logprobs": 0},
    GREEDY | {"logprobs": 1},
    GREEDY | {"logprobs": 1, "echo": True},
    GREEDY | {"prompt_logprobs": 1},
    {"prompt": "wheel", "seed": 1},
    {"prompt": "wheel", "seed": 2},
    {"prompt": "wheel", "seed": 1, "temperature": 0.5},
    {"prompt": "wheel", "seed": 1, "n": 2},
    SCORED | {"logprobs": 1},
    SCORED | {"logprobs": 2},
    SCORED | {"logprobs": 2, "prompt_logprobs": 2},
    SCORED | {"logprobs": 1, "prompt_logprobs": 2},
    {"messages": [{"role": "user", "content": "wheel"}], "temperature": 0},
    {"messages": [{"role": "user", "content": "wheel"}], "temperature": 0, "logprobs": True},
]
"""Requests with a fixed answer, each different from the others in one thing."""
SAMPLED = [
    {"prompt": "wheel"},
    {"prompt": "wheel", "n": 2},
    {"prompt": "wheel", "temperature": 0.1},
]
"""Requests whose answers depend on the rows' ids."""
FAILING = [{"prompt": "nan", "temperature": 0}]
REFUSED = [GREEDY | {"prompt": [VOCAB_SIZE]}, GREEDY | {"max_tokens": 9999}]
COPIES = 3


class Generator(fake.FakeGenerator):
    """Names requests in its errors, as the engine does."""

    def __init__(self, code: str | None = None, **options):
        super().__init__(**options)
        self._code = code
        """The code of all rows; None for results."""

    def step(self):
        outputs = super().step()
        for output in outputs:
            if self._code or output.error:
                message = f"request {output.request_id!r}: not finite"
                output.error = RowError(self._code or "nonfinite_logits", message, "prompt")
        return outputs


def write_rows(path, requests, copies=COPIES):
    """Write copies of requests under their own ids, all requests once before any is repeated."""
    rows = [
        {"id": f"{number}-{copy}", **request}
        for copy in range(copies)
        for number, request in enumerate(requests)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(source, output, generator=None, **changes) -> list[str]:
    """Run a job; return the ids of the rows that were computed."""
    generator = generator or Generator()
    fake.run(source, output, fake.FakeModel(generator), **changes)
    return generator.submitted


def run_each(source, output, **changes) -> bytes:
    """Run a job that computes every row; return its output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowDigests, "add", lambda self, row, ids: None)
        run(source, output, **changes)
    assert counts(output)["repeated"] == 0
    return masked(output)


def counts(output) -> dict:
    return json.loads(output.with_name(f"{output.name}.manifest.json").read_text())["rows"]


def finished(output) -> list[str]:
    """Return the ids of the rows in a journal, in the order of their records."""
    lines = output.with_name(f"{output.name}.journal").read_bytes().split(b"\n")[:-1]
    records = [json.loads(line[9:].split(b"\t")[0]) for line in lines]
    return [record["custom_id"] for record in records if record["kind"] == "row"]


@pytest.fixture
def everything(tmp_path):
    """An input with rows of every kind, and its output if every row is computed."""
    source = write_rows(tmp_path / "in.jsonl", [*DISTINCT, *FAILING, *REFUSED, *SAMPLED])
    return source, run_each(source, tmp_path / "each.jsonl")


def test_equal_rows_are_computed_once_and_answered_as_if_computed(everything, tmp_path):
    source, expected = everything
    output = tmp_path / "out.jsonl"
    computed = Counter(name.partition("-")[0] for name in run(source, output))
    assert masked(output) == expected
    num_fixed = len(DISTINCT) + len(FAILING)
    first_sampled = num_fixed + len(REFUSED)
    once = dict.fromkeys(map(str, range(num_fixed)), 1)
    each = {str(first_sampled + number): COPIES for number in range(len(SAMPLED))}
    assert computed == once | each
    assert counts(output)["repeated"] == (COPIES - 1) * num_fixed
    assert counts(output)["total"] == expected.count(b"\n") + 1


def test_labels_and_spelling_make_no_row_different(tmp_path):
    same = [
        GREEDY,
        GREEDY | {"user": "someone"},
        GREEDY | {"model": "another name"},
        GREEDY | {"top_k": None},
        GREEDY | {"prompt": list(b"wheel")},
        {"temperature": 0, "prompt": "wheel"},
    ]
    source, output = write_rows(tmp_path / "in.jsonl", same), tmp_path / "out.jsonl"
    assert run(source, output) == ["0-0"]
    assert masked(output) == run_each(source, tmp_path / "each.jsonl")
    assert b"another name" in output.read_bytes()


def test_defaults_of_the_job_count_as_written(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "wheel"}, GREEDY], copies=1)
    output = tmp_path / "out.jsonl"
    assert run(source, output, defaults={"temperature": 0}) == ["0-0"]
    assert counts(output)["repeated"] == 1


def test_an_echo_is_the_prompt_as_the_row_has_it(tmp_path, monkeypatch):
    # the text of these ids is not the text that they were encoded from
    monkeypatch.setattr(fake.ByteTokens, "token_bytes", lambda self, token: bytes([token]).upper())
    prompts = ["wheel", list(b"wheel")]
    written = [SCORED | {"logprobs": 1, "prompt": prompt} for prompt in prompts]
    source, output = write_rows(tmp_path / "in.jsonl", written), tmp_path / "out.jsonl"
    assert len(run(source, output)) == 1
    assert b'"text":"wheel' in output.read_bytes() and b'"text":"WHEEL' in output.read_bytes()
    assert masked(output) == run_each(source, tmp_path / "each.jsonl")


@pytest.mark.parametrize("per_step", [1, 64])
def test_rows_whose_digests_collide_are_each_computed(everything, tmp_path, monkeypatch, per_step):
    source, expected = everything
    monkeypatch.setattr(repeats, "_digest", lambda row, ids: 7)
    monkeypatch.setattr(repeats, "ANSWERED_PER_STEP", per_step)
    output = tmp_path / "out.jsonl"
    run(source, output)
    assert masked(output) == expected
    assert counts(output)["repeated"] == COPIES - 1, "the rows that equal the first row"


def test_a_crash_at_any_disk_operation_changes_nothing_in_the_end(tmp_path):
    requests = [*DISTINCT[:3], *SAMPLED[:1], *FAILING, *REFUSED[:1]]
    source = write_rows(tmp_path / "in.jsonl", requests)
    expected = run_each(source, tmp_path / "each.jsonl")
    counter = FaultyDisk(0)
    run(source, tmp_path / "count.jsonl", disk=counter)
    for at in range(1, counter.calls + 1):
        output = tmp_path / f"{at}.jsonl"
        with pytest.raises(Crash):
            run(source, output, disk=FaultyDisk(at, Crash(), tear=at % 2 == 0))
        run(source, output)
        assert masked(output) == expected, f"after a crash at operation {at}"


def test_a_resumed_job_computes_the_first_row_that_is_left_of_each_group(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [GREEDY, GREEDY | {"seed": 1}], copies=10)
    expected = run_each(source, tmp_path / "each.jsonl")
    output = tmp_path / "out.jsonl"
    with pytest.raises(Crash):
        run(source, output, disk=FaultyDisk(24, Crash()))
    kept = finished(output)
    assert kept[:2] == ["0-0", "1-0"] and 4 < len(kept) < 18
    left = [f"{group}-{copy}" for copy in range(10) for group in range(2)]
    left = [name for name in left if name not in kept]
    first = [next(name for name in left if name.startswith(group)) for group in ("0", "1")]
    assert sorted(run(source, output)) == first
    assert masked(output) == expected
    # two rows were computed in each run
    assert counts(output)["repeated"] == 20 - 4
    assert counts(output)["kept_from_earlier_runs"] == len(kept)


class Stopping(Generator):
    """Receives a signal as its first row ends."""

    def collect(self):
        outputs = super().collect()
        if outputs and not self.is_stopped:
            self.is_stopped = True
            signal.raise_signal(signal.SIGTERM)
        return outputs

    is_stopped = False


def stop(source, output, **changes) -> int:
    """Run a job that receives a signal; return its exit code."""
    model = fake.FakeModel(Stopping(num_slots=1))
    return fake.run(source, output, model, **changes)


def test_a_drain_answers_repeats_of_finished_rows_and_leaves_the_others(tmp_path):
    requests = [GREEDY | {"max_tokens": length} for length in (9, 8, 7, 6)]
    source, output = write_rows(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    assert stop(source, output) == 75
    names = finished(output)
    groups = Counter(name.partition("-")[0] for name in names)
    assert groups and set(groups.values()) == {COPIES} and len(groups) < len(requests)
    again = run(source, output)
    assert again == [f"{number}-0" for number in range(len(groups), len(requests))]
    assert masked(output) == run_each(source, tmp_path / "each.jsonl")


@pytest.mark.parametrize(("grace", "code"), [(60, 0), (0, 75)])
def test_a_signal_is_seen_while_one_output_answers_many_rows(tmp_path, monkeypatch, grace, code):
    monkeypatch.setattr(repeats, "ANSWERED_PER_STEP", 5)
    source, output = write_rows(tmp_path / "in.jsonl", [GREEDY], 100), tmp_path / "out.jsonl"
    assert stop(source, output, grace_seconds=grace) == code
    if code:
        assert len(finished(output)) == 1 + 5
        assert run(source, output) == ["0-6"]
    assert counts(output)["repeated"] == (98 if code else 99)
    assert masked(output) == run_each(source, tmp_path / "each.jsonl")


def test_an_output_answers_a_limited_number_of_rows_between_two_steps(tmp_path, monkeypatch):
    happened = []
    record_row = Journal.record_row

    class Watching(Peers):
        def exchange_directive(self, directive, own_signal):
            happened.append("step")
            return directive

    def noted(self, *facts):
        happened.append("row")
        record_row(self, *facts)

    monkeypatch.setattr(Journal, "record_row", noted)
    monkeypatch.setattr(repeats, "ANSWERED_PER_STEP", 5)
    source = write_rows(tmp_path / "in.jsonl", [GREEDY], 23)
    job = fake.settings(source, tmp_path / "out.jsonl")
    run_job(job, fake.FakeModel(), progress=Progress(is_quiet=True), peers=Watching())
    between = " ".join(happened).split("step")
    assert [steps.count("row") for steps in between if "row" in steps] == [6, 5, 5, 5, 2]
    assert happened[-1] == "step", "processes compare their work after the last row"


def test_a_part_repeats_its_own_rows_only(everything, tmp_path):
    source, expected = everything
    paths = [tmp_path / f"part{index}.jsonl" for index in range(2)]
    for index, path in enumerate(paths):
        run(source, path, part=Part(index, 2))
        assert masked(path) == b"\n".join(expected.split(b"\n")[index::2])
    merge(paths, tmp_path / "out.jsonl", progress=Progress(is_quiet=True))
    assert masked(tmp_path / "out.jsonl") == expected
    # three copies of a request are in both parts, as the number of requests is odd
    repeated = [counts(path)["repeated"] for path in paths]
    assert (
        sum(repeated) == len(DISTINCT) + len(FAILING) == counts(tmp_path / "out.jsonl")["repeated"]
    )


def test_a_row_that_fails_gives_its_error_to_its_repeats_under_their_names(tmp_path):
    source, output = write_rows(tmp_path / "in.jsonl", FAILING), tmp_path / "out.jsonl"
    assert run(source, output) == ["0-0"]
    errors = [json.loads(line)["response"]["body"]["error"] for line in masked(output).split(b"\n")]
    assert [error["message"] for error in errors] == [
        f"request '0-{copy}': not finite" for copy in range(COPIES)
    ]
    assert {(error["code"], error["param"]) for error in errors} == {("nonfinite_logits", "prompt")}
    assert counts(output)["errors_by_code"] == {"nonfinite_logits": COPIES}
    assert counts(output)["repeated"] == COPIES - 1


def test_the_output_for_an_equal_row_has_its_id():
    request = b'{"id": "%s", "prompt": "wheel"}'
    first, second = (read_row(Line(1, 0, request % name), 0) for name in (b"first", b"second"))
    assert isinstance(first, BatchRow) and isinstance(second, BatchRow)
    answer = Answer(first, RequestOutput("first", "wheel", list(b"wheel")), deque())
    assert answer.fits(second, list(b"wheel")) and not answer.fits(second, list(b"wheels"))
    assert answer.output_for(second) == RequestOutput("second", "wheel", list(b"wheel"))


def test_an_error_that_is_tried_again_is_tried_once_for_all_repeats(tmp_path):
    source, output = write_rows(tmp_path / "in.jsonl", [GREEDY], 8), tmp_path / "out.jsonl"
    expected = run_each(source, tmp_path / "each.jsonl")
    with pytest.raises(Crash):
        run(source, output, Generator("internal_error"), disk=FaultyDisk(21, Crash()))
    assert 2 < len(finished(output)) < 8
    assert run(source, output) == ["0-0"]
    assert masked(output) == expected
    assert counts(output)["repeated"] == 7


def test_on_error_raise_ends_at_the_first_row_of_a_group(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", FAILING)
    with pytest.raises(JobError, match="row '0-0'"):
        run(source, tmp_path / "out.jsonl", on_error="raise")


def test_rows_whose_ids_were_not_kept_are_encoded_and_compared(everything, tmp_path, monkeypatch):
    source, expected = everything
    monkeypatch.setattr(job_input, "SHARE_OF_DISK", 0.0)
    run(source, tmp_path / "out.jsonl")
    assert masked(tmp_path / "out.jsonl") == expected


@pytest.mark.parametrize("failing", ["0-0", "0-1"])
def test_a_row_that_cannot_be_encoded_again_is_the_only_error(tmp_path, monkeypatch, failing):
    monkeypatch.setattr(job_input, "SHARE_OF_DISK", 0.0)
    seen = Counter()
    encode = fake.encode

    def once(row, now=None):
        seen[row.custom_id] += 1
        if row.custom_id == failing and seen[failing] > 1:
            return RowError("chat_template_error", "it takes too long")
        return encode(row, now)

    monkeypatch.setattr(fake, "encode", once)
    source, output = write_rows(tmp_path / "in.jsonl", [GREEDY], 4), tmp_path / "out.jsonl"
    run(source, output)
    assert counts(output)["errors_by_code"] == {"chat_template_error": 1}
    lines = masked(output).split(b"\n")
    seen.clear()
    expected = run_each(source, tmp_path / "each.jsonl").split(b"\n")
    assert lines == expected and b"it takes too long" in lines[int(failing[-1])]


class Recorder(Peers):
    """The leader of a pod, which remembers all that the processes share and compare."""

    def __init__(self):
        self.shared, self.facts = [], []

    def broadcast(self, value):
        self.shared.append(value)
        return value

    def record(self, *facts):
        self.facts.append(facts)


class Replica(Recorder):
    """Another process of the pod."""

    rank = 1

    def __init__(self, shared):
        super().__init__()
        self._from_leader = iter(shared)

    def broadcast(self, value):
        return next(self._from_leader)


@pytest.mark.parametrize("collides", [False, True])
def test_all_processes_of_a_pod_compute_and_repeat_the_same_rows(
    everything, tmp_path, monkeypatch, collides
):
    source, _ = everything
    if collides:
        monkeypatch.setattr(repeats, "_digest", lambda row, ids: 7)
    job = fake.settings(source, tmp_path / "out.jsonl")
    with contextlib.suppress(Crash):
        run(source, job.files.output, disk=FaultyDisk(24, Crash()))
    leader = Recorder()
    processes = [leader, Replica(leader.shared)]
    computed = []
    for peers in processes:
        generator = Generator()
        model = fake.FakeModel(generator)
        run_job(job, model, progress=Progress(is_quiet=True), peers=peers)
        computed.append(generator.submitted)
    assert computed[0] == computed[1] and computed[0]
    assert processes[0].facts == processes[1].facts
    assert any("repeated" in facts for facts in leader.facts)


@pytest.mark.parametrize(
    ("copies", "note"),
    [(1, None), (2, "1 row repeats an earlier row\n"), (13, "12 rows repeat earlier rows\n")],
)
def test_the_number_of_repeats_is_said_before_the_run(tmp_path, copies, note):
    source, stream = write_rows(tmp_path / "in.jsonl", [GREEDY], copies), io.StringIO()
    job = fake.settings(source, tmp_path / "out.jsonl")
    run_job(job, fake.FakeModel(), progress=Progress(stream=stream))
    assert ("earlier row" in stream.getvalue()) == (note is not None)
    assert (note or "") in stream.getvalue()


def test_rates_and_times_are_those_of_computed_rows_and_tokens_those_of_all_rows(tmp_path):
    other = {"id": "other", "prompt": "a longer prompt"}
    for name, copies in (("one", 1), ("many", 50)):
        path = write_rows(tmp_path / f"{name}.jsonl", [GREEDY], copies)
        path.write_text(f"{json.dumps(other)}\n{path.read_text()}")
    manifests = {}
    for name in ("one", "many"):
        output = tmp_path / f"{name}.out.jsonl"
        run(tmp_path / f"{name}.jsonl", output)
        manifests[name] = json.loads(output.with_name(f"{output.name}.manifest.json").read_text())
    one, many = manifests["one"], manifests["many"]
    emitted = {
        name: found["output_tokens_per_second"] * found["run_seconds"]
        for name, found in manifests.items()
    }
    assert emitted["one"] == pytest.approx(emitted["many"], rel=0.05)
    for key in ("time_to_first_token_seconds", "output_tokens_per_second_per_row"):
        assert one[key] == many[key]
    num_prompt, num_output = len(GREEDY["prompt"]), one["output_tokens"] // 2
    assert many["prompt_tokens"] == one["prompt_tokens"] + 49 * num_prompt
    assert many["output_tokens"] == one["output_tokens"] + 49 * num_output


def test_a_job_without_equal_rows_says_and_counts_nothing(tmp_path):
    output = tmp_path / "out.jsonl"
    run(write_input(tmp_path / "in.jsonl"), output)
    assert counts(output)["repeated"] == 0
