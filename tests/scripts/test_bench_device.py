"""The device benchmark on the CPU, in a tiny form: it measures every case, and counts its work."""

import json
from argparse import Namespace

import jax
import jax.numpy as jnp
import pytest
from alike import alike
from decode_steps import step_of
from numerics_helpers import script

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.config import DecoderConfig
from noria.sharding.call import Call

TINY = (
    "--target cpu --layers 2 --embed 32 --mlp 48 --query-heads 4 --kv-heads 2 --head-dim 8 "
    "--vocab 64 --context 32 --prompt 32 --batches 1,3 --product 64 --copy-mib 1 --repeats 2"
)
CONFIG = DecoderConfig.alike(
    vocab_size=64,
    embed=32,
    mlp=48,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    windows=(None, None),
    max_position=64,
)


@pytest.mark.reference
def test_every_case_is_measured_beside_transformers(run, tmp_path):
    output = tmp_path / "device.json"
    run("bench_device.py", *TINY.split(), "--output", output.with_suffix(".md"))
    report = json.loads(output.read_text())
    cases = [("decode", 1), ("decode", 3), ("prefill", 1)]
    assert [(row["phase"], row["rows"]) for row in report["noria"]] == cases
    assert all(row["tokens_per_second"] > 0 for row in report["noria"])
    theirs = report["transformers"]["rows"]
    assert [(row["phase"], row["rows"]) for row in theirs] == cases
    assert all(row["seconds"] > 0 for row in theirs)
    assert output.with_suffix(".md").read_text().count("\n| decode |") == 2


def test_what_is_missing_for_the_peer_is_said():
    bench = script("scripts/bench_device.py")
    options = Namespace(python_torch=None)
    assert "torch and transformers are not installed" in bench._run_transformers(options)["missing"]


def work_of(bench, call: Call) -> dict[str, float]:
    device = object.__new__(bench.DeviceBench)
    device.definition, device.options = AbstractModel(CONFIG), Namespace(dtype="float32")
    return device.work(call)


def test_the_bytes_of_a_decode_step_are_its_matrices_and_its_cache():
    bench = script("scripts/bench_device.py")
    definition = AbstractModel(CONFIG)
    matrices = sum(
        leaf.size
        for name, leaf in definition.abstract_parameters(jnp.float32).items()
        if leaf.ndim > 1 and name != "embedding.table"
    )
    cache = 2 * CONFIG.num_layers * 3 * alike(CONFIG).num_kv_heads * 16 * alike(CONFIG).head_dim
    # written, and read by sampling
    logits = 2 * 3 * CONFIG.vocab_size
    work = work_of(bench, step_of(3, 16))
    assert work["bytes"] == 4 * (matrices + cache + logits)


def test_the_flops_of_a_prefill_are_nearly_those_that_xla_counts():
    bench = script("scripts/bench_device.py")
    length, definition = 64, AbstractModel(CONFIG)

    def prefill(parameters, tokens_BT, true_length_B):
        decoder = definition.bind(parameters)
        x_BTD, _ = decoder.forward(tokens_BT, true_length_B)
        return decoder.logits(x_BTD[:, -1])

    arguments = (
        definition.abstract_parameters(jnp.float32),
        jax.ShapeDtypeStruct((1, length), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    counted = jax.jit(prefill).lower(*arguments).compile().cost_analysis()["flops"]
    work = work_of(bench, Call("prefill", 1, length, length))
    # XLA counts norms and rotations, too
    assert 0.6 * counted < work["flops"] < counted
