"""A job on the CPU with its kernels: the answers of a job without them, also after a warm start."""

import pytest
from command import read_manifest, read_rows, write_lines
from cpu_kernels import NEEDS_NUMBA

pytestmark = list(NEEDS_NUMBA)
SIZES = "buckets.max_length=64", "buckets.decode_slots=2", "buckets.page=16"
PROMPTS = ("The largest planet is", "Water boils at", "My favourite colour is")


@pytest.fixture
def job(noria, tmp_path):
    """Run the same job under a name with settings; return its answers, manifest and stderr."""
    rows = [
        {"prompt": text, "max_tokens": 12, "temperature": 0, "model": "smollm2"} for text in PROMPTS
    ]
    source = write_lines(tmp_path / "in.jsonl", rows)
    own = noria.without_server().with_cache(tmp_path / "cache")

    def run(name, *settings):
        output = tmp_path / f"{name}.jsonl"
        options = [word for setting in (*SIZES, *settings) for word in ("--set", setting)]
        arguments = "-i", source, "-o", output, "--model", "smollm2", "--dtype", "float32"
        done = own.run("batch", *arguments, *options)
        answers = [row["response"]["body"]["choices"][0]["text"] for row in read_rows(output)]
        return answers, read_manifest(output)["generator"]["attention"], done.stderr

    return run


def test_a_job_answers_as_without_kernels_and_its_executables_are_kept(job):
    answers, attention, said = job("first")
    assert "compiling kernels for this processor" in said
    assert attention["decode"].startswith("numba (") and "numba (" in attention["prefill"]
    again, attention, said = job("second")
    assert again == answers and attention["decode"].startswith("numba (")
    assert "compiling" not in said and "executables taken" in said
    portable, attention, said = job("third", "attention.decode=xla", "attention.prefill=xla")
    assert attention == {"prefill": "xla (as the plan asks)", "decode": "xla (as the plan asks)"}
    assert portable == answers
