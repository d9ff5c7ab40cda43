"""Jobs that are killed, stopped and run again, with the real engine and real signals."""

import gzip
import json
import os
import random
import re
import signal
import time

import pytest
from adapter_on_disk import write_adapter
from command import answer, chat, completion, read_manifest, wait_for_records, write_lines
from model_on_disk import write_model
from related_prompts import hash_tokens

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid
from noria.compile.plan import Numbers, Plan, PlannedModel

IN_CHUNKS = ("--set", "buckets.chunk=16")
"""Prompts in chunks share their beginnings."""
KILLS = [6, pytest.param(50, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def job(noria, tmp_path_factory):
    """The input of a job of a few seconds, and its undisturbed output."""
    folder = tmp_path_factory.mktemp("job")
    rng = random.Random(3)
    prefixes = [[], [rng.randrange(3, 250) for _ in range(40)]]
    rows = [
        completion(
            f"row-{i}",
            prefixes[i % 3 == 1] + [rng.randrange(3, 250) for _ in range(rng.randint(1, 40))],
            temperature=0.8 * (i % 2),
            max_tokens=rng.randint(1, 60),
        )
        for i in range(400)
    ]
    rows[7]["body"]["top_p"] = 7
    # some rows need the process that renders templates
    rows[::20] = [chat(row["custom_id"], "the wheel", max_tokens=20) for row in rows[::20]]
    source = write_lines(folder / "in.jsonl", rows)
    output = folder / "whole.jsonl"
    # run twice: the second run finds every program in the compile cache, like the killed jobs
    _, manifest = noria.batch(source, folder / "first.jsonl", *IN_CHUNKS, expect=1)
    assert manifest["generator"]["shared_prefixes"]["saved_tokens"] > 1000
    noria.batch(source, output, *IN_CHUNKS, expect=1)
    return source, output


def masked(path) -> str:
    return re.sub(r'"created":\d+', '"created":0', path.read_text("utf-8"))


@pytest.mark.parametrize("kills", KILLS)
def test_a_job_killed_at_random_moments_ends_as_if_undisturbed(noria, job, tmp_path, kills):
    source, whole = job
    output = tmp_path / "out.jsonl"
    lifetime = read_manifest(whole)["wall_seconds"] + 1.0
    rng = random.Random(kills)
    arguments = ("batch", "-i", source, "-o", output, "--model", noria.model, *IN_CHUNKS)
    hits = 0
    while hits < kills:
        process = noria.start(*arguments)
        time.sleep(rng.uniform(0.0, lifetime))
        if process.poll() is None:
            hits += 1
        process.kill()
        process.communicate()
        if output.exists() and process.returncode == 1:
            # the job has finished: start another
            assert masked(output) == masked(whole)
            for path in tmp_path.iterdir():
                path.unlink()
    noria.run(*arguments, expect=1)
    assert masked(output) == masked(whole)


def test_a_killed_job_with_compressed_input_ends_as_if_undisturbed(noria, job, tmp_path):
    source, whole = job
    packed, output = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    noria.kill(output, "-i", packed, *IN_CHUNKS, after=20)
    noria.batch(packed, output, *IN_CHUNKS, expect=1)
    assert masked(output) == masked(whole)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"in.jsonl.gz", "out.jsonl", "out.jsonl.manifest.json"}


def test_a_killed_job_with_adapters_ends_as_if_undisturbed(noria, tmp_path):
    folders = {"one": {"rank": 2}, "two": {"rank": 4, "seed": 1, "modules": ("mlp.down_proj",)}}
    adapters = [
        f"{name}={write_adapter(tmp_path / name, noria.model, **options)}"
        for name, options in folders.items()
    ]
    rng = random.Random(8)
    rows = [
        {"id": f"row-{i}", "model": ("model", "one", "two")[i % 3], "temperature": i % 2}
        | {"prompt": [rng.randrange(3, 250) for _ in range(8)], "max_tokens": rng.randint(8, 40)}
        for i in range(150)
    ]
    # the same request of two adapters, and of none
    same = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 20}
    rows[:3] = [row | same for row in rows[:3]]
    source = write_lines(tmp_path / "in.jsonl", rows)
    options = ("--adapters", *adapters, "--set", "buckets.decode_slots=8")
    found, _ = noria.batch(source, tmp_path / "whole.jsonl", *options)
    assert len({str(answer(row)[0]) for row in found[:3]}) == 3
    output = tmp_path / "out.jsonl"
    noria.kill(output, "-i", source, *options, after=20)
    _, manifest = noria.batch(source, output, *options)
    assert 0 < manifest["rows"]["kept_from_earlier_runs"] < len(rows)
    assert masked(output) == masked(tmp_path / "whole.jsonl")


def test_a_job_that_shares_nothing_gives_the_same_answers(noria, job, tmp_path):
    source, whole = job
    _, manifest = noria.batch(source, tmp_path / "out.jsonl", *IN_CHUNKS, "--no-sharing", expect=1)
    assert manifest["generator"]["shared_prefixes"]["saved_tokens"] == 0
    assert masked(tmp_path / "out.jsonl") == masked(whole)


@pytest.fixture
def prefix_plan(job, tmp_path):
    """A plan in which groups of rows read their common beginning once."""
    source, _ = job
    beginning = json.loads(source.read_text("utf-8").splitlines()[1])["body"]["prompt"][:32]
    prefixes = PrefixGrid(2, 4, 32, (PlannedPrefix(32, hash_tokens(beginning)),))
    grid = BucketGrid(112, ((112, 8, 16),), 8, page=16, prefixes=prefixes)
    path = tmp_path / "plan.toml"
    path.write_text(Plan("cpu", PlannedModel("m", ""), Numbers("float32"), grid).to_toml())
    return path


def test_a_killed_job_with_planned_prefixes_ends_as_if_undisturbed(
    noria, job, prefix_plan, tmp_path
):
    source, _ = job
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    options = ("--plan", prefix_plan)
    _, manifest = noria.batch(source, whole, *options, expect=1)
    shared = manifest["generator"]["shared_prefixes"]
    assert shared["saved_tokens"] > 1000
    assert "[prefixes]" in manifest["plan"]
    noria.kill(output, "-i", source, *options, after=20)
    noria.batch(source, output, *options, expect=1)
    assert masked(output) == masked(whole)


def test_a_complete_job_run_again_does_nothing_quickly(noria, job):
    source, output = job

    def contents() -> dict[str, tuple[int, bytes]]:
        paths = output.parent.iterdir()
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}

    before = contents()
    start = time.monotonic()
    done = noria.without_server().run(
        "batch", "-i", source, "-o", output, "--model", noria.model, *IN_CHUNKS, expect=1
    )
    seconds = time.monotonic() - start
    assert contents() == before
    assert "complete already" in done.stdout + done.stderr
    assert seconds < 3


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_stopped_job_drains_and_goes_on_later(noria, job, tmp_path, number, status):
    source, whole = job
    output = tmp_path / "out.jsonl"
    arguments = ("batch", "-i", source, "-o", output, "--model", noria.model, *IN_CHUNKS)
    process = noria.start(*arguments, start_new_session=True)
    wait_for_records(process, output, 20)
    # signal the whole group, as a terminal does for Ctrl-C
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    assert "Traceback" not in err and "run the same command again" in err
    assert not output.exists()
    noria.run(*arguments, expect=1)
    assert masked(output) == masked(whole)


def test_a_complete_job_run_again_imports_nothing_heavy(noria, job):
    source, output = job
    talkative = noria.without_server(PYTHONPROFILEIMPORTTIME="1")
    arguments = ("-i", source, "-o", output, "--model", noria.model, *IN_CHUNKS)
    done = talkative.run("batch", *arguments, expect=1)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "noria.runtime.batch.run" in imported
    assert not imported & {"jax", "jaxlib", "flax", "optax", "orbax", "tokenizers", "jinja2"}


def test_a_job_stopped_in_the_middle_of_a_long_compile_leaves_at_once(noria, tmp_path):
    # every layer is unrolled, so the decode graph takes many seconds to compile
    deep_model = tmp_path / "model"
    write_model(deep_model, num_layers=16)
    source = write_lines(tmp_path / "in.jsonl", [completion("row", [3, 4, 5], max_tokens=20)])
    output = tmp_path / "out.jsonl"
    cold = noria.with_cache(tmp_path)
    process = cold.start("batch", "-i", source, "-o", output, "--model", deep_model)
    # the decode graph starts first, and takes by far the longest
    first = next(line for line in process.stderr if line.startswith("compile [1/"))
    process.terminate()
    start = time.monotonic()
    _, rest = process.communicate(timeout=120)
    assert time.monotonic() - start < 2
    assert process.returncode == 75, rest
    assert "decode" not in first + rest and "Traceback" not in rest
    assert sorted(path.name for path in tmp_path.glob("out.jsonl*")) == ["out.jsonl.journal"]


def test_a_job_stopped_while_it_compiles_ends_soon_and_goes_on_later(noria, job, tmp_path):
    source, whole = job
    output = tmp_path / "out.jsonl"
    arguments = ("batch", "-i", source, "-o", output, "--model", noria.model, *IN_CHUNKS)
    # no compile cache: there is time to stop it
    cold = noria.with_cache(tmp_path)
    process = cold.start(*arguments)
    first = next(line for line in process.stderr if line.startswith("compile [1/"))
    process.terminate()
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 75, rest
    assert "Traceback" not in rest
    num_graphs = int(first.partition("/")[2].partition("]")[0])
    assert rest.count("compile [") < num_graphs - 1
    assert not output.exists() and not output.with_name("out.jsonl.lock").exists()
    noria.run(*arguments, expect=1)
    assert masked(output) == masked(whole)
