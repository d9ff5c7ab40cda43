"""A deterministic model without a device, for tests of the batch job; also runs as a program.

As a program: `fake_model.py INPUT OUTPUT [SECONDS_PER_STEP]` runs one job and exits with its code.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from noria.runtime.batch.job import Build, JobIdentity, JobSettings, ModelFacts
from noria.runtime.batch.job_files import JobFiles
from noria.runtime.batch.run import run_job
from noria.runtime.engine.shared_prefixes import plan_submission
from noria.runtime.errors import RowError
from noria.runtime.progress.progress import Progress
from noria.runtime.request import CompletionOutput, Request, RequestMetrics, RequestOutput
from noria.runtime.rows.job_text import JobText
from noria.runtime.rows.lines import RequestRules

VOCAB_SIZE = 256


class ByteTokens:
    """A tokenizer with one token for each byte."""

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class FakeGenerator:
    """Answers a request with its hash, after a number of steps that depends on its length."""

    def __init__(
        self,
        num_slots: int = 4,
        seconds_per_step: float = 0.0,
        max_length: int = 512,
        num_compiles: int = 0,
    ):
        self.submitted: list[str] = []
        self.num_steps = self.num_reports = 0
        self._num_slots = num_slots
        self._seconds_per_step = seconds_per_step
        self._max_length = max_length
        self._num_compiles = num_compiles
        self._waiting: list[Request] = []
        self._slots: dict[str, tuple[Request, int]] = {}
        self._in_flight: list[RequestOutput] = []
        self._received: list[RequestOutput] = []

    @property
    def unfinished(self) -> int:
        ended = len(self._in_flight) + len(self._received)
        return len(self._waiting) + len(self._slots) + ended

    @property
    def wants_more(self) -> bool:
        return len(self._waiting) < 2

    @property
    def figures(self) -> SimpleNamespace:
        # RunFigures without an import of jax
        used, slots = len(self._slots), self._num_slots
        tokens = 20 * self.num_steps
        return SimpleNamespace(tokens=tokens, used_slots=used, slots=slots, padding_waste=0.25)

    def reserve(self, num_slots: int) -> None:
        assert not num_slots

    def submit(self, request: Request, prefix: None = None) -> None:
        assert prefix is None
        if any(token >= VOCAB_SIZE for token in request.prompt_token_ids):
            raise RowError("invalid_token_id", "prompt: id outside the vocabulary.", "prompt")
        length = len(request.prompt_token_ids) + (request.params.max_tokens or 1)
        if length > self._max_length:
            raise RowError("context_length_exceeded", f"length {length} does not fit.", "prompt")
        self.submitted.append(request.request_id)
        self._waiting.append(request)

    def receive(self) -> bytes:
        self._received += self._in_flight
        self._in_flight = []
        return b""

    def dispatch(self) -> None:
        if self._waiting or self._slots:
            self._in_flight = self.step()

    def collect(self) -> list[RequestOutput]:
        finished, self._received = self._received, []
        return finished

    def step(self) -> list[RequestOutput]:
        time.sleep(self._seconds_per_step)
        self.num_steps += 1
        while self._waiting and len(self._slots) < self._num_slots:
            request = self._waiting.pop(0)
            self._slots[request.request_id] = request, 1 + len(request.prompt_token_ids) % 3
        finished = []
        for name, (request, steps) in list(self._slots.items()):
            self._slots[name] = request, steps - 1
            if steps == 1:
                del self._slots[name]
                finished.append(answer(request))
        return finished

    def drain(self) -> None:
        self._waiting.clear()

    def restarted(self, run_seed: int) -> "FakeGenerator":
        return self

    def statistics(self) -> dict[str, object]:
        self.num_reports += 1
        return {"compiles_during_run": self._num_compiles}


def answer(request: Request) -> RequestOutput:
    if list(request.prompt_token_ids) == list(b"nan"):
        error = RowError("nonfinite_logits", "not finite")
        return RequestOutput(request.request_id, None, list(request.prompt_token_ids), error=error)
    params = request.params
    # a seed that is not given is derived from the id
    is_fixed = 0 in (params.temperature, params.max_tokens) or params.seed is not None
    asked = f"{list(request.prompt_token_ids)} {params} {'' if is_fixed else request.request_id}"
    text = hashlib.sha256(asked.encode()).hexdigest()[:8] + "\u2028é"
    completion = CompletionOutput(0, text, list(text.encode()), "stop")
    first_token = 1.0 + len(request.prompt_token_ids)
    return RequestOutput(
        request.request_id,
        request.prompt,
        list(request.prompt_token_ids),
        [completion],
        metrics=RequestMetrics(1.0, first_token, 2 * first_token),
    )


class FakeModel:
    """A model that counts its builds; the build raises `failure` in phase `failure_phase`."""

    def __init__(
        self,
        generator: FakeGenerator | None = None,
        failure=None,
        failure_phase="build",
        digest: str = "sha256:fake",
    ):
        self.generator = generator or FakeGenerator()
        self.digest = digest
        self.num_builds = self.num_texts = 0
        self.stored_plans: list[str | None] = []
        self.plan: str | None = None
        self._failure = failure
        self._failure_phase = failure_phase

    @contextmanager
    def open_text(self, now) -> Iterator[JobText]:
        self.num_texts += 1
        self.encoded: list[str] = []

        def encode_all(rows):
            self.encoded += [row.custom_id for row in rows]
            return [encode(row, now) for row in rows]

        prompts = self.encoded
        yield JobText(encode_all, ByteTokens(), reads_clock=lambda: "clock" in prompts)

    def weights(self) -> str:
        return self.digest

    def build(self, summary, stored_plan, *, phases, progress) -> Build:
        self.num_builds += 1
        self.stored_plans.append(stored_plan)
        phases.enter(self._failure_phase)
        if self._failure is not None:
            raise self._failure
        longest = max(need.prompt_length for need in summary.requirements)
        plan = stored_plan or self.plan or f"max_length = {longest}\n"
        return Build(self.generator, plan, self.digest, plan_submission)


def encode(row, now=None):
    """Return a prompt's bytes; the row `clock` contains the time, as in some chat templates."""
    if row.prompt_token_ids is not None:
        return row.prompt_token_ids
    if row.custom_id == "clock":
        return list(now.isoformat().encode())
    text = row.prompt or "".join(message["content"] for message in row.messages)
    return list(text.encode())


def settings(input_path: Path, output_path: Path, **changes) -> JobSettings:
    """Return the settings of a job with changed fields, of its parts or its own."""
    values = {
        "configuration": {"model": "fake", "dtype": "float32"},
        "name": "fake",
        "input": Path(input_path),
        "output": Path(output_path),
    } | changes

    def part(kind):
        names = kind.__dataclass_fields__.keys() & values.keys()
        return kind(**{name: values.pop(name) for name in names})

    parts = [part(kind) for kind in (JobFiles, JobIdentity, ModelFacts, RequestRules)]
    return JobSettings(*parts, **values)


def write_input(path: Path, num_rows: int = 40) -> Path:
    lines = [
        json.dumps({"id": f"q{i}", "prompt": f"prompt {i}" * (1 + i % 4)}) for i in range(num_rows)
    ]
    lines[3:3] = ["{broken", "", '{"id": "q1", "prompt": "again"}', '{"prompt": "x", "top_q": 1}']
    lines[9:9] = ['{"id": "huge", "prompt": [999]}', '{"id": "bad", "prompt": "nan"}']
    path.write_text("\n".join(lines))
    return path


def run(input_path, output_path, model=None, disk=None, **changes):
    job = settings(input_path, output_path, **changes)
    return run_job(job, model or FakeModel(), progress=Progress(is_quiet=True), disk=disk)


def masked(path: Path) -> bytes:
    """Return the file without the values of `created`; all other bytes must be equal."""
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    kept = []
    for line in lines:
        record = json.loads(line)
        body = (record["response"] or {}).get("body") or {}
        created = body.get("created")
        kept.append(line.replace(b'"created":%d' % created, b"") if created else line)
    return b"\n".join(kept)


if __name__ == "__main__":
    pause = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    job = settings(Path(sys.argv[1]), Path(sys.argv[2]))
    try:
        code = run_job(job, FakeModel(FakeGenerator(seconds_per_step=pause)), progress=Progress())
    except BaseException as error:
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
    assert "jax" not in sys.modules, "the job imported jax"
    sys.exit(code)
