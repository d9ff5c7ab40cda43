"""Jobs that prefill their prompts in chunks, through the command."""

import random
import re

import numpy as np
import pytest
from command import answer, completion, read_manifest, read_rows, write_lines
from tolerances import FLOAT32_MODEL_LOGPROB


def overrides(*settings: str) -> tuple[str, ...]:
    """Return options with six slots, as compile time grows with slots."""
    return sum((("--set", one) for one in (*settings, "buckets.decode_slots=6")), ())


CHUNKS = overrides("buckets.chunk=16", "buckets.max_length=128", "buckets.prefill=[[128, 4]]")
TAILS = overrides(
    "buckets.chunk=[4, 16]", "buckets.max_length=128", "buckets.prefill=[[128, 4, 4]]"
)
PART_OPTIONS = ("--dtype", "float32", *CHUNKS)
"""Parts of a job need a dtype that does not depend on the machine."""
SCORED = "row-4"


@pytest.fixture(scope="module")
def source(noria, tmp_path_factory):
    rng = random.Random(5)
    rows = [
        completion(
            f"row-{i}",
            [rng.randrange(3, 250) for _ in range(rng.randint(1, 90))],
            temperature=0,
            max_tokens=rng.randint(1, 30),
        )
        for i in range(120)
    ]
    rows[3]["body"] |= {"n": 3, "temperature": 0.8, "seed": 4}
    assert rows[4]["custom_id"] == SCORED
    rows[4]["body"] |= {"echo": True, "max_tokens": 0, "logprobs": 1}
    return write_lines(tmp_path_factory.mktemp("chunks") / "in.jsonl", rows)


@pytest.fixture(scope="module")
def in_chunks(noria, source):
    """The output of an undisturbed run, and its stderr."""
    output = source.with_name("chunks.jsonl")
    arguments = ("batch", "-i", source, "-o", output, "--model", noria.model, *CHUNKS)
    return output, noria.run(*arguments).stderr


def logprobs(row) -> list[float]:
    """Return the log probabilities of a prompt's tokens, except the first."""
    (choice,) = row["response"]["body"]["choices"]
    return choice["logprobs"]["token_logprobs"][1:]


def masked(path) -> str:
    return re.sub(r'"created":\d+', '"created":0', path.read_text("utf-8"))


def test_chunks_and_whole_prompts_give_the_same_texts(noria, source, in_chunks):
    output, _ = in_chunks
    whole, _ = noria.batch(source, source.with_name("whole.jsonl"))
    for got, expected in zip(read_rows(output), whole, strict=True):
        if got["custom_id"] != SCORED:  # log-probabilities come from other executables
            assert answer(got) == answer(expected)
    assert read_manifest(output)["compiles_during_run"] == 0


def test_the_padding_of_chunks_is_in_the_manifest(in_chunks, source):
    used = read_manifest(in_chunks[0])["generator"]["buckets"]["prefill"]
    prompts = [row["body"]["prompt"] for row in read_rows(source)]
    assert sum(use["real_tokens"] for use in used.values()) == sum(map(len, prompts))
    whole = sum(-(-len(prompt) // 16) * 16 for prompt in prompts)
    assert sum(use["computed_tokens"] for use in used.values()) >= whole
    for name, use in used.items():
        batch = int(name.split()[0].partition("x")[2])
        assert use["computed_tokens"] == use["calls"] * batch * 16


@pytest.mark.slow
def test_chunks_of_two_sizes_give_the_texts_of_one(noria, source, in_chunks):
    output = source.with_name("tails.jsonl")
    rows, _ = noria.batch(source, output, *TAILS)
    for got, expected in zip(rows, read_rows(in_chunks[0]), strict=True):
        if got["custom_id"] != SCORED:
            assert answer(got) == answer(expected)
    manifest = read_manifest(output)
    assert manifest["compiles_during_run"] == 0
    used = manifest["generator"]["buckets"]["prefill"]
    assert {name.partition("x")[0] for name in used} == {"4", "16"}


def run_killed_in_between(noria, output, *arguments) -> None:
    """Run a job, kill it after some rows, and run it again to its end."""
    noria.kill(output, *arguments, after=10)
    noria.run("batch", "-o", output, "--model", noria.model, *arguments)


def test_a_job_that_is_killed_goes_on_to_the_same_file(noria, source, in_chunks, tmp_path):
    output = tmp_path / "out.jsonl"
    run_killed_in_between(noria, output, "-i", source, *CHUNKS)
    assert masked(output) == masked(in_chunks[0])


@pytest.mark.slow
def test_chunks_over_a_ring_of_groups_give_the_texts_of_one_device(
    noria, source, in_chunks, tmp_path
):
    """The job is killed once, and resumed."""
    output = tmp_path / "out.jsonl"
    ring = ("--target", "cpu:4", "--layout", "ring-tensor@sequence=2,tensor=2")
    run_killed_in_between(noria, output, "-i", source, *CHUNKS, *ring)
    for got, expected in zip(read_rows(output), read_rows(in_chunks[0]), strict=True):
        if got["custom_id"] == SCORED:
            np.testing.assert_allclose(
                logprobs(got), logprobs(expected), rtol=0, atol=FLOAT32_MODEL_LOGPROB
            )
        else:
            assert answer(got) == answer(expected)
    assert read_manifest(output)["compiles_during_run"] == 0


@pytest.mark.slow
def test_parts_of_a_job_give_the_rows_of_the_whole(noria, source, in_chunks, tmp_path):
    expected = read_rows(in_chunks[0])
    for part in (0, 1):
        rows, _ = noria.batch(
            source, tmp_path / f"part{part}.jsonl", *PART_OPTIONS, "--rows", f"{part}/2"
        )
        assert [answer(row) for row in rows] == [answer(row) for row in expected[part::2]]


def test_what_chunks_and_whole_prompts_would_waste_is_printed(in_chunks):
    pattern = r"computed in chunks of 16, [\d.]+% padding; .* in whole prompts, [\d.]+% padding"
    assert re.search(pattern, in_chunks[1])


def test_a_chunk_that_is_none_is_refused_by_key(noria, source, tmp_path):
    arguments = ("-i", source, "-o", tmp_path / "out.jsonl", "--model", noria.model)
    said = noria.refuse("batch", *arguments, "--set", "buckets.chunk=0")
    assert "buckets.chunk: expected growing positive integers, got [0]" in said


def test_a_chunk_that_does_not_divide_over_a_ring_is_refused(noria, source, tmp_path):
    arguments = ("-i", source, "-o", tmp_path / "out.jsonl", "--model", noria.model)
    ring = ("--target", "cpu:3", "--layout", "ring@sequence=3")
    said = noria.refuse("batch", *arguments, "--set", "buckets.chunk=16", *ring)
    assert "buckets.chunk is 16, which does not divide over 3 devices" in said
