"""Jobs between URLs of a real S3 server on this machine, killed and run again."""

import gzip
import json
import os
import random
import time
from dataclasses import replace

import pytest
from command import completion, read_rows, write_lines

pytest.importorskip("s3fs", reason="needs s3fs")
moto = pytest.importorskip("moto.server", reason="needs moto[server]")
boto3 = pytest.importorskip("boto3", reason="needs boto3")

pytestmark = pytest.mark.third_party
KEYS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@pytest.fixture
def bucket(monkeypatch):
    """A client and a bucket that keeps all versions of its objects."""
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (KEYS | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}).items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="jobs")
    client.put_bucket_versioning(Bucket="jobs", VersioningConfiguration={"Status": "Enabled"})
    yield client
    server.stop()


def names(client) -> list[str]:
    """The names of all versions of all objects."""
    return [item["Key"] for item in client.list_object_versions(Bucket="jobs")["Versions"]]


def without_times(lines: list[dict]) -> list[dict]:
    for line in lines:
        (line["response"] or {}).get("body", {}).pop("created", None)
    return lines


def test_a_job_on_s3_is_killed_twice_and_uploads_nothing_twice(noria, bucket, tmp_path):
    rng = random.Random(3)
    rows = [
        completion(f"row-{i}", [rng.randrange(3, 250) for _ in range(1 + i % 9)], max_tokens=40)
        for i in range(600)
    ]
    rows[7]["body"]["top_p"] = 7
    source = write_lines(tmp_path / "in.jsonl", rows)
    noria.batch(source, tmp_path / "whole.jsonl", expect=1)
    bucket.upload_file(str(source), "jobs", "in/rows.jsonl")
    here = {name: os.environ[name] for name in (*KEYS, "AWS_ENDPOINT_URL")}
    noria = replace(noria, environment=noria.environment | here)
    work = tmp_path / "work"
    places = ("-i", "s3://jobs/in/rows.jsonl", "-o", "s3://jobs/out/rows.jsonl.gz")
    arguments = ("batch", *places, "--model", noria.model, "--work-folder", work)
    for count in (20, 200):
        process = noria.start(*arguments)
        deadline = time.monotonic() + 240
        while not any(path.read_bytes().count(b"\n") > count for path in work.glob("*/*.journal")):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.01)
        process.kill()
        process.communicate()
        assert names(bucket) == ["in/rows.jsonl"]
    done = noria.run(*arguments, expect=1)
    kept = int(done.stderr.partition("resumed: ")[2].split()[0])
    # the journal has records of other kinds, too
    assert kept >= 190 and "uploaded and compared" in done.stderr
    outputs = ["out/rows.jsonl.gz", "out/rows.jsonl.gz.manifest.json"]
    assert sorted(names(bucket)) == ["in/rows.jsonl", *outputs]
    assert not list(work.iterdir())
    again = noria.run(*arguments, expect=1)
    assert "complete already" in again.stderr
    assert sorted(names(bucket)) == ["in/rows.jsonl", *outputs]

    body = bucket.get_object(Bucket="jobs", Key=outputs[0])["Body"].read()
    lines = [json.loads(line) for line in gzip.decompress(body).splitlines()]
    whole = read_rows(tmp_path / "whole.jsonl")
    assert without_times(lines) == without_times(whole)


def test_a_bucket_that_is_not_there_is_named(noria, bucket, tmp_path):
    places = ("-i", "s3://elsewhere/in.jsonl", "-o", tmp_path / "out.jsonl")
    said = noria.refuse("batch", *places, "--model", noria.model)
    assert "s3://elsewhere/in.jsonl: cannot be read (no such file)" in said
