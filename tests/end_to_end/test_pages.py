"""Jobs with a cache in pages, through the command: whole, killed, planned and from a bundle."""

import random
import re
import tomllib

import numpy as np
import pytest
from command import answer, completion, read_manifest, read_rows, write_lines
from model_on_disk import write_model
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.runtime import session
from noria.runtime.devices.machine import host_bytes

CHUNKS = ("--set", "buckets.chunk=16")
FEW = ("--set", "buckets.page=16", "--set", "buckets.pages=8", *CHUNKS)
"""Pages for one of the longest rows."""
BYTES_OF_SLOT = 2**15
"""Less than the bytes of a slot with 128 entries."""


@pytest.fixture(scope="module")
def source(noria, tmp_path_factory):
    rng = random.Random(9)
    beginning = [rng.randrange(3, 250) for _ in range(35)]
    rows = [
        completion(
            f"row-{i}",
            beginning * (i % 4 == 1) + [rng.randrange(3, 250) for _ in range(rng.randint(1, 30))],
            temperature=0.8 * (i % 2),
            max_tokens=rng.randint(20, 60),
            n=1 + (i % 9 == 2),
        )
        for i in range(40)
    ]
    return write_lines(tmp_path_factory.mktemp("pages") / "in.jsonl", rows)


@pytest.fixture(scope="module")
def few(noria, source):
    """The output of an undisturbed job in few pages."""
    output = source.with_name("few.jsonl")
    noria.batch(source, output, *FEW)
    return output


def masked(path) -> str:
    return re.sub(r'"created":\d+', '"created":0', path.read_text("utf-8"))


def test_few_pages_give_the_texts_of_many_and_the_counts_are_in_the_manifest(noria, source, few):
    many, _ = noria.batch(source, source.with_name("many.jsonl"), *CHUNKS)
    assert list(map(answer, read_rows(few))) == list(map(answer, many))
    report = read_manifest(few)["generator"]
    assert report["waits"] > 0 and report["replays"] > 0
    padding = report["padding"]
    assert padding["recomputed_tokens"] > 0
    wasted = ("prefill_padding_tokens", "idle_slot_tokens", "overshoot_tokens", "recomputed_tokens")
    assert padding["computed_tokens"] == padding["real_tokens"] + sum(padding[x] for x in wasted)
    assert read_manifest(few)["compiles_during_run"] == 0


def test_a_killed_job_in_few_pages_ends_as_if_undisturbed(noria, source, few, tmp_path):
    output = tmp_path / "out.jsonl"
    noria.kill(output, "-i", source, *FEW, after=12)
    _, manifest = noria.batch(source, output, *FEW)
    assert 0 < manifest["rows"]["kept_from_earlier_runs"] < 40
    assert manifest["generator"]["replays"] > 0
    assert masked(output) == masked(few)


@pytest.mark.slow
def test_a_planned_cache_in_pages_is_compiled_into_a_bundle_and_runs_from_it(noria, source, few):
    plan, folder = source.with_name("plan.toml"), source.with_name("bundle")
    options = ("--model", noria.model, "--workload", source, "-o", plan, "--quiet")
    noria.run_here("plan", *options, "--page", "16", "--chunks", "never")
    buckets = tomllib.loads(plan.read_text("utf-8"))["buckets"]
    assert buckets["page"] == 16 and buckets["pages"] >= buckets["max_length"] // 16
    noria.run("compile", "--model", noria.model, "--plan", plan, "-o", folder)
    output = source.with_name("planned.jsonl")
    arguments = ("-i", source, "-o", output, "--model", noria.model, "--plan", folder)
    noria.run("batch", *arguments, "--require-bundle")
    assert read_manifest(output)["bundle"]["reason"] is None
    assert list(map(answer, read_rows(output))) == list(map(answer, read_rows(few)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["buckets.page=16", "buckets.pages=3"], "buckets.pages: expected at least "),
        (["buckets.page=12", "buckets.pages=40"], "buckets.page: expected a power of two, got 12"),
        (["buckets.page=0"], "buckets.page: expected a positive integer, got 0"),
        (["buckets.page=16", "buckets.span_slots=[4]"], "span_slots"),
    ],
)
def test_a_plan_of_pages_that_cannot_be_is_refused_before_weights_load(
    noria, source, tmp_path, monkeypatch, settings, message
):
    monkeypatch.setattr(session, "load_model", pytest.fail)
    options = [option for one in settings for option in ("--set", one)]
    output = tmp_path / "out.jsonl"
    arguments = ("-i", source, "-o", output, "--model", noria.model, "--quiet", *options)
    assert message in noria.refuse("batch", *arguments)
    assert not output.exists()


def test_a_cache_beyond_the_memory_of_the_machine_is_refused_before_it_is_made(
    noria, source, tmp_path
):
    slots = 2 * host_bytes() // BYTES_OF_SLOT
    sizes = {"max_length": 128, "page": 64, "decode_slots": slots, "pages": 2 * slots}
    settings = [word for key, x in sizes.items() for word in ("--set", f"buckets.{key}={x}")]
    arguments = ("-i", source, "-o", tmp_path / "out", "--model", noria.model, *settings)
    assert "the memory of this machine, got " in noria.refuse("batch", *arguments, expect=4)


@pytest.mark.slow
def test_a_prompt_of_131072_tokens_on_a_ring_is_answered_as_on_one_device(noria, tmp_path):
    """The prompt goes round a ring of eight devices, each of which has an eighth of every page."""
    length, steps = 1 << 17, 8
    model = tmp_path / "model"
    write_model(model, tokenizer=False, num_layers=1, max_position=length, scale=0.2)
    prompt = random.Random(0).choices(range(3, 250), k=length - steps)
    line = completion("long", prompt, max_tokens=steps, ignore_eos=True, logprobs=2)
    source = write_lines(tmp_path / "in.jsonl", [line])
    found = {}
    for name, options in {"one": (), "ring": ("--target", "cpu:8", "--layout", "ring")}.items():
        output = tmp_path / f"{name}.jsonl"
        common = ("-i", source, "-o", output, "--model", model, "--dtype", "float32")
        noria.run("batch", *common, *options, "--set", f"buckets.prefill=[[{length}, 1]]")
        (row,) = read_rows(output)
        found[name] = row["response"]["body"]["choices"][0]["logprobs"]
    assert found["ring"]["tokens"] == found["one"]["tokens"]
    one, ring = (found[name]["token_logprobs"] for name in ("one", "ring"))
    assert len(one) == steps
    np.testing.assert_allclose(ring, one, rtol=0, atol=FLOAT32_MODEL_LOGPROB)
