"""A job on the CPU with its kernels: the answers of a job without them, also after a warm start."""

import numpy as np
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


def test_bfloat16_scores_a_prompt_nearly_as_float32_does(noria, tmp_path):
    """The cache, weights and keys in bfloat16 are those of the model, pairs in their order."""
    text = " ".join(PROMPTS * 6)
    row = {"prompt": text, "max_tokens": 1, "logprobs": 0, "echo": True, "model": "smollm2"}
    source = write_lines(tmp_path / "in.jsonl", [row, {**row, "prompt": PROMPTS[0]}])
    own, found = noria.without_server().with_cache(tmp_path / "cache"), {}
    for dtype in ("bfloat16", "float32"):
        output = tmp_path / f"{dtype}.jsonl"
        sizes = "--set", "buckets.max_length=128", "--set", "buckets.decode_slots=2"
        own.run("batch", "-i", source, "-o", output, "--model", "smollm2", "--dtype", dtype, *sizes)
        first = read_rows(output)[0]["response"]["body"]["choices"][0]["logprobs"]
        found[dtype] = np.array(first["token_logprobs"][1:-1])
    difference = abs(found["bfloat16"] - found["float32"])
    assert len(difference) > 64 and 0 < difference.mean() < 0.05 and difference.max() < 0.5


@pytest.mark.parametrize("numbers", ["dtype=bfloat16", "dtype=float32", "cache=int8"])
def test_the_bits_of_a_row_are_its_own(noria, tmp_path, numbers):
    """Rows in another order, in other slots and pages, with fewer others, and forked samples."""
    texts = [f"{text} {'and so on ' * count}" for count, text in enumerate(PROMPTS * 2)]
    rows = [
        {
            "custom_id": str(number), "prompt": text, "max_tokens": 6, "temperature": 0.7,
            "seed": number, "n": 1 + number % 2, "logprobs": 0, "model": "smollm2",
        }
        for number, text in enumerate(texts)
    ]  # fmt: skip
    own = noria.without_server().with_cache(tmp_path / "cache")

    def choices(name, rows):
        source, output = write_lines(tmp_path / f"{name}.in", rows), tmp_path / f"{name}.jsonl"
        settings = *SIZES, "numbers.dtype=float32", f"numbers.{numbers}"
        options = [word for setting in settings for word in ("--set", setting)]
        own.run("batch", "-i", source, "-o", output, "--model", "smollm2", *options)
        assert "numba (" in read_manifest(output)["generator"]["attention"]["decode"]
        return {row["custom_id"]: row["response"]["body"]["choices"] for row in read_rows(output)}

    together = choices("together", rows)
    assert len(together["1"]) == 2
    assert choices("reversed", rows[::-1]) == together
    assert choices("alone", rows[3:4]) == {"3": together["3"]}
