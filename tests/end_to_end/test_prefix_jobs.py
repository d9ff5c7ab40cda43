"""Jobs whose derived plans share planned prefixes: killed and resumed, in parts, and without."""

import random
import re
import tomllib

import pytest
from command import completion, read_manifest, write_lines


@pytest.fixture(scope="module")
def job(noria, tmp_path_factory):
    """The input of questions about two documents, and the output of an undisturbed job."""
    folder = tmp_path_factory.mktemp("job")
    rng = random.Random(3)
    documents = [[rng.randrange(3, 250) for _ in range(80)] for _ in range(2)]
    rows = [
        completion(
            f"row-{i}",
            documents[i % 2][: 80 * (i % 9 > 0)]
            + [rng.randrange(3, 250) for _ in range(rng.randint(1, 12))],
            temperature=0.8 * (i % 3 == 0),
            max_tokens=rng.randint(1, 24),
        )
        for i in range(300)
    ]
    source = write_lines(folder / "in.jsonl", rows)
    output = folder / "whole.jsonl"
    done, manifest = noria.batch(source, output)
    print(done.stderr)
    assert "[prefixes]" in done.stderr
    return source, output, manifest


def test_x(job):
    print(job[2]["generator"]["shared_prefixes"], job[2]["wall_seconds"])
    assert 0
