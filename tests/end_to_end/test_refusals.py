"""Refusals of the command: the exit code, and an explanation on stderr."""

import json
import resource
import shutil

import numpy as np
import pytest
from command import completion, write_lines
from safetensors.numpy import load_file, save_file

EXIT_USAGE, EXIT_MODEL, EXIT_BUILD = 2, 3, 4


@pytest.fixture
def source(tmp_path):
    row = completion("row", "the water", temperature=0, max_tokens=4)
    return write_lines(tmp_path / "in.jsonl", [row])


@pytest.fixture
def copy(noria, tmp_path):
    return shutil.copytree(noria.model, tmp_path / "model")


def refusal(noria, source, *options, model=None, expect) -> str:
    output = source.with_name("out.jsonl")
    arguments = ("-i", source, "-o", output, "--model", model or noria.model, "--quiet", *options)
    said = noria.refuse("batch", *arguments, expect=expect)
    assert not output.exists()
    return said.partition("noria: ")[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--dtype", "bfloat16", "--set", "numbers.dtype=float32"],
            "expected bfloat16, got float32",
        ),
        (["--set", "numbers.dtype=float16"], "numbers.dtype: expected float32 or bfloat16"),
        (["--set", "target=tpu"], "plan target: expected cpu, got tpu"),
        (["--target", "cuda"], "target: expected cpu, gpu, tpu, a number of them"),
        (
            ["--set", "attention.decode=pages"],
            "one of auto, splash, cudnn, numba, paged, xla, got",
        ),
        (["--set", "attention.prefill=splash"], "'splash': it is for tpu, not for cpu"),
        (["--set", "buckets.prefill=16"], "buckets.prefill: expected a list, got 16"),
        (["--set", "buckets.slots=3"], "unknown ['slots']"),
        (["--set", "buckets.decode_slots"], "expected a.b=value"),
        (["--rows", "3/3"], "rows: expected i/n with 0 <= i < n, got '3/3'"),
        (["--rows", "0/3", "--error-file", "err.jsonl"], "Give it to noria merge instead"),
        (["--rows", "0/3"], "--rows 0/3: expected a plan or a dtype"),
        (["--rows", "0/3", "--set", "numbers.dtype=float16"], "numbers.dtype: expected float32"),
        (
            ["--set", "buckets.max_length=129"],
            "buckets.max_length: expected at most 128",
        ),
    ],
)
def test_a_plan_or_option_that_cannot_be_followed(noria, source, options, message):
    assert message in refusal(noria, source, *options, expect=EXIT_USAGE)


def test_a_target_that_is_not_there_cannot_run_rows(noria, source):
    message = refusal(noria, source, "--target", "tpu:v5e:2x4", expect=EXIT_USAGE)
    assert "'tpu:v5e:2x4' is not on this machine" in message and "plan again" in message


@pytest.mark.parametrize(
    "name", ["gpu:h100:12", "gpu:h100:10", "tpu:v5e:4x4x4", "tpu:v6e:16x32", "tpu:v5e:1x4"]
)
def test_hardware_that_cannot_be_gets_no_plan(noria, source, name):
    plan = source.with_name("plan.toml")
    options = ("--model", noria.model, "--workload", source, "-o", plan, "--target", name)
    assert f", got {name}. " in noria.refuse("plan", *options, expect=EXIT_USAGE)
    assert not plan.exists()


def test_a_model_of_an_unknown_architecture(noria, source, copy):
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    (copy / "config.json").write_text(json.dumps(config))
    message = refusal(noria, source, model=copy, expect=EXIT_MODEL)
    assert "expected one of llama" in message and "got 'mamba'" in message


def test_weights_that_end_early(noria, source, copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert str(weights) in refusal(noria, source, model=copy, expect=EXIT_MODEL)


def test_weights_that_lack_one_tensor_and_bring_another(noria, source, copy):
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["adapter.weight"] = np.ones(3, np.float32)
    save_file(tensors, copy / "model.safetensors")
    message = refusal(noria, source, model=copy, expect=EXIT_MODEL)
    assert "model.norm.weight" in message and "adapter.weight" in message


def test_a_tokenizer_that_cannot_be_read(noria, source, copy):
    (copy / "tokenizer.json").write_text("{")
    assert "tokenizer.json" in refusal(noria, source, model=copy, expect=EXIT_MODEL)


def test_a_plan_that_no_memory_holds(noria, source):
    output = source.with_name("out.jsonl")
    arguments = ("-i", source, "-o", output, "--model", noria.model)
    # a new process compiles as for a user; compiled without optimizations, XLA refuses the size
    user = noria.without_server()
    process = user.start("batch", *arguments, "--set", "buckets.decode_slots=1000000000")
    # terabytes, as some systems promise more memory than they have
    resource.prlimit(process.pid, resource.RLIMIT_AS, (2**35, 2**35))
    _, err = process.communicate(timeout=120)
    assert process.returncode == EXIT_BUILD
    assert "memory" in err and "Traceback" not in err


def test_an_input_that_is_not_there(noria, tmp_path):
    message = refusal(noria, tmp_path / "absent.jsonl", expect=EXIT_USAGE)
    assert "absent.jsonl: expected an input file" in message


@pytest.mark.parametrize(
    "arguments",
    [["--help"], *([name, "--help"] for name in ("batch", "merge", "inspect", "bench"))],
)
def test_every_command_explains_itself(noria, arguments):
    text = noria.run(*arguments).stdout
    assert text.startswith("usage: noria") and "--help" in text
