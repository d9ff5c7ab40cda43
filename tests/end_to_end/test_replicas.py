"""Independent replicas: parts of a job run separately, and merge into the whole job's output."""

import json
import random
import re

import pytest
from command import chat, completion, read_manifest
from file_identity import identity

OF = 3
DTYPE = ("--dtype", "float32")


@pytest.fixture(scope="module")
def replicas(noria, tmp_path_factory):
    """An input with bad lines, its whole output, and the outputs of its parts."""
    folder = tmp_path_factory.mktemp("replicas")
    source = folder / "in.jsonl"
    source.write_bytes(b"\n".join(lines()) + b"\n")
    noria.batch(source, folder / "whole.jsonl", *DTYPE, expect=1)
    parts = [folder / f"part{index}.jsonl" for index in range(OF)]
    for index, part in enumerate(parts):
        noria.batch(source, part, "--rows", f"{index}/{OF}", *DTYPE, expect=1)
    return source, folder / "whole.jsonl", parts


def lines() -> list[bytes]:
    rng = random.Random(5)
    options = [
        {"temperature": 0, "max_tokens": 9, "logprobs": 2},
        {"temperature": 0.9, "max_tokens": 12},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
    ]
    rows = [
        completion(f"row-{i}", [rng.randrange(3, 250) for _ in range(2 * i + 1)], **options[i % 3])
        for i in range(25)
    ]
    rows.insert(11, chat("chat", "the wheel turns", temperature=0, max_tokens=6))
    texts = [json.dumps(row).encode() for row in rows]
    # unreadable, blank, a duplicate of a row of another part, and one that fits no bucket
    too_long = json.dumps(completion("too-long", [5] * 500, max_tokens=4)).encode()
    texts[7:7] = [b"{broken", b"", b"  ", texts[3], too_long]
    return texts


def masked(path) -> str:
    return re.sub(r'"created":\d+', '"created":0', path.read_text("utf-8"))


def test_the_parts_merge_to_the_output_of_the_whole_job(noria, replicas, tmp_path):
    _, whole, parts = replicas
    output = tmp_path / "out.jsonl"
    noria.run("merge", *parts, "-o", output, expect=1)
    assert masked(output) == masked(whole)
    manifest, expected = read_manifest(output), read_manifest(whole)
    assert manifest["rows"] == {**expected["rows"], "total": 29, "ok": 26, "errors": 3}
    assert manifest["plan"] == expected["plan"]


def test_each_part_answers_its_rows_alone_under_the_whole_jobs_plan(replicas):
    _, whole, parts = replicas
    for index, part in enumerate(parts):
        manifest = read_manifest(part)
        assert masked(part).splitlines() == masked(whole).splitlines()[index::OF]
        assert manifest["configuration"]["rows"] == f"part {index} of {OF}"
        assert manifest["plan"] == read_manifest(whole)["plan"]
        assert (manifest["rows"]["total"], manifest["input"]["rows"]) == (10 - index // 2, 29)


def test_merging_imports_nothing_heavy_and_once_more_does_nothing(noria, replicas, tmp_path):
    output = tmp_path / "out.jsonl"
    talkative = noria.without_server(PYTHONPROFILEIMPORTTIME="1")
    done = talkative.run("merge", *replicas[2], "-o", output, expect=1)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "noria.runtime.batch.merge" in imported
    assert not imported & {"jax", "jaxlib", "numpy", "flax", "optax", "tokenizers", "jinja2"}
    before = identity(output)
    done = noria.run("merge", *replicas[2], "-o", output, expect=1)
    assert "merged already, nothing to do" in done.stderr
    assert identity(output) == before


def test_a_merged_job_run_whole_is_complete_already(noria, replicas, tmp_path):
    source, _, parts = replicas
    output = tmp_path / "out.jsonl"
    noria.run("merge", *parts, "-o", output, "--quiet", expect=1)
    done = noria.run("batch", "-i", source, "-o", output, "--model", noria.model, *DTYPE, expect=1)
    assert "complete already" in done.stderr


def test_what_cannot_be_merged_is_exit_code_2_and_named(noria, replicas, tmp_path):
    parts = replicas[2]
    assert "Missing: 2/3" in noria.refuse("merge", *parts[:2], "-o", tmp_path / "out.jsonl")
    assert "is a part too" in noria.refuse("merge", *parts, "-o", parts[0])
    assert list(tmp_path.iterdir()) == []
