"""Jobs that are killed, stopped and run again, with the real engine and real signals."""

import random
import re
import signal
import time

import pytest
from command import completion, read_manifest, write_lines

KILLS = [6, pytest.param(50, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def job(noria, tmp_path_factory):
    """The input of a job of a few seconds, and its output when nothing disturbs it."""
    folder = tmp_path_factory.mktemp("job")
    rng = random.Random(3)
    rows = [
        completion(
            f"row-{i}",
            [rng.randrange(3, 250) for _ in range(rng.randint(1, 40))],
            temperature=0.8 * (i % 2),
            max_tokens=rng.randint(1, 60),
        )
        for i in range(400)
    ]
    rows[7]["body"]["top_p"] = 7
    source = write_lines(folder / "in.jsonl", rows)
    output = folder / "whole.jsonl"
    # twice: the second run has every program in the compile cache, as the killed ones will
    noria.batch(source, folder / "first.jsonl", expect=1)
    noria.batch(source, output, expect=1)
    return source, output


def masked(path) -> str:
    return re.sub(r'"created":\d+', '"created":0', path.read_text("utf-8"))


@pytest.mark.parametrize("kills", KILLS)
def test_a_job_killed_at_random_moments_ends_as_if_undisturbed(noria, job, tmp_path, kills):
    source, whole = job
    output = tmp_path / "out.jsonl"
    lifetime = read_manifest(whole)["wall_seconds"] + 1.0
    rng = random.Random(kills)
    arguments = ("batch", "-i", source, "-o", output, "--model", noria.model)
    hits = 0
    while hits < kills:
        process = noria.start(*arguments)
        time.sleep(rng.uniform(0.0, lifetime))
        if process.poll() is None:
            hits += 1
        process.kill()
        process.communicate()
        if output.exists() and process.returncode == 1:
            # it finished: begin another job
            assert masked(output) == masked(whole)
            for path in tmp_path.iterdir():
                path.unlink()
    noria.run(*arguments, expect=1)
    assert masked(output) == masked(whole)


def test_a_complete_job_run_again_does_nothing_quickly(noria, job):
    source, output = job
    before = {path.name: path.stat().st_mtime_ns for path in output.parent.iterdir()}
    start = time.monotonic()
    done = noria.run("batch", "-i", source, "-o", output, "--model", noria.model, expect=1)
    seconds = time.monotonic() - start
    assert {path.name: path.stat().st_mtime_ns for path in output.parent.iterdir()} == before
    assert "complete already" in done.stdout + done.stderr
    assert seconds < 3


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_stopped_job_drains_and_goes_on_later(noria, job, tmp_path, number, status):
    source, whole = job
    output = tmp_path / "out.jsonl"
    journal = tmp_path / "out.jsonl.journal"
    arguments = ("batch", "-i", source, "-o", output, "--model", noria.model)
    process = noria.start(*arguments)
    deadline = time.monotonic() + 120
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 20):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    assert not output.exists()
    noria.run(*arguments, expect=1)
    assert masked(output) == masked(whole)
