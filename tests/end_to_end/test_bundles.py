"""`noria compile`, and jobs that start from its bundles, through the command."""

import hashlib
import json
import shutil
import subprocess
import sys

import pytest
from command import answer, completion, read_manifest, read_rows, write_lines


@pytest.fixture(scope="module")
def source(noria, tmp_path_factory):
    rows = [completion(f"row-{i}", list(range(3, 9 + i)), max_tokens=6) for i in range(12)]
    return write_lines(tmp_path_factory.mktemp("bundles") / "in.jsonl", rows)


@pytest.fixture(scope="module")
def plan(noria, source):
    path = source.with_name("plan.toml")
    options = ("--model", noria.model, "--workload", source, "-o", path, "--quiet")
    noria.run_here("plan", *options)
    return path


@pytest.fixture(scope="module")
def bundle(noria, source, plan):
    folder = source.with_name("bundle")
    # the second time, the compile cache of jobs has the programs
    noria.batch(source, source.with_name("before.jsonl"), "--plan", plan)
    noria.run("compile", "--model", noria.model, "--plan", plan, "-o", folder)
    return folder


def test_a_job_starts_from_a_bundle_without_compiling(noria, source, plan, bundle):
    compiled, _ = noria.batch(source, source.with_name("plain.jsonl"), "--plan", plan)
    output = source.with_name("out.jsonl")
    arguments = ("-i", source, "-o", output, "--model", noria.model, "--plan", bundle)
    said = noria.run("batch", *arguments).stderr
    assert "executables taken" in said
    assert "compile [" not in said
    num_graphs = len(json.loads((bundle / "bundle.json").read_text("utf-8"))["graphs"])
    assert read_manifest(output)["bundle"] == {"executables": num_graphs, "reason": None}
    assert read_manifest(source.with_name("plain.jsonl"))["bundle"] is None
    for ours, theirs in zip(read_rows(output), compiled, strict=True):
        assert answer(ours) == answer(theirs)


def test_a_second_job_of_the_same_plan_compiles_nothing(noria, source, plan, bundle):
    output = source.with_name("again.jsonl")
    arguments = ("-i", source, "-o", output, "--model", noria.model, "--plan", plan)
    said = noria.run("batch", *arguments).stderr
    assert "compile cache: " in said and "executables taken" in said
    assert "compile [" not in said


def test_an_executable_that_cannot_be_loaded_is_compiled_in_the_build(noria, source, bundle):
    folder = source.with_name("broken")
    shutil.copytree(bundle, folder)
    contents = json.loads((folder / "bundle.json").read_text())
    name = next(name for name in contents["graphs"] if "decode" in name)
    (folder / "graphs" / contents["graphs"][name]["file"]).write_bytes(b"no pickle")
    contents["graphs"][name]["sha256"] = hashlib.sha256(b"no pickle").hexdigest()
    (folder / "bundle.json").write_text(json.dumps(contents))
    answers = []
    for plan in (bundle, folder):
        output = folder.with_name(f"from-{plan.name}.jsonl")
        arguments = ("-i", source, "-o", output, "--model", noria.model, "--plan", plan)
        said = noria.run("batch", *arguments).stderr
        assert said.count(f"executable {name} cannot be loaded") == (plan is folder)
        assert said.count("compile [") == (plan is folder)
        manifest = read_manifest(output)
        assert manifest["compiles_during_run"] == 0
        reason = f"{name} cannot be loaded" if plan is folder else None
        assert manifest["bundle"]["reason"] == reason
        assert "compiles_announced" not in manifest["generator"]
        answers.append([answer(row) for row in read_rows(output)])
    assert answers[0] == answers[1]
    arguments = ("-i", source, "-o", folder.with_name("required.jsonl"), "--model", noria.model)
    required = ("--plan", folder, "--require-bundle", "--quiet")
    said = noria.run("batch", *arguments, *required, expect=2).stderr
    assert f"bundle {folder}: its executable {name} cannot be loaded" in said
    assert "noria: --require-bundle: expected a bundle of which every executable" in said


def test_a_script_starts_from_a_bundle(noria, bundle):
    code = (
        "import sys; from noria.runtime import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], plan=sys.argv[2])\n"
        "print(llm.generate([3, 4, 5], SamplingParams(max_tokens=1))[0].outputs[0].token_ids)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, noria.model, bundle],
        env=noria.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"bundle {bundle}: " in run.stderr and "executables taken" in run.stderr
    assert run.stdout.startswith("[")


def test_the_graphs_that_read_an_edited_key_are_compiled_with_a_word(noria, source, bundle):
    output = source.with_name("edited.jsonl")
    arguments = ("-i", source, "-o", output, "--model", noria.model, "--plan", bundle)
    said = noria.run("batch", *arguments, "--set", "buckets.steps_per_call=4").stderr
    assert "it has no decode" in said and "executables taken" in said
    compiled = [line for line in said.splitlines() if line.startswith("compile [")]
    assert compiled and all("decode" in line for line in compiled)
    assert all(row["response"]["status_code"] == 200 for row in read_rows(output))


def test_a_bundle_is_the_plan_that_it_was_made_from(noria, source, plan, bundle):
    """Defaults that the compiler writes out are no difference, and other keys are named."""
    short, output = source.with_name("short.toml"), source.with_name("short.jsonl")
    lines = plan.read_text("utf-8").splitlines(keepends=True)
    short.write_text("".join(line for line in lines if not line.startswith("score = false")))
    assert len(short.read_text("utf-8")) < len(plan.read_text("utf-8"))
    noria.batch(source, output, "--plan", short)
    arguments = ("batch", "-i", source, "-o", output, "--model", noria.model)
    said = noria.run(*arguments, "--plan", bundle).stderr
    assert "complete already" in said
    said = noria.refuse(*arguments, "--plan", bundle, "--set", "buckets.steps_per_call=4")
    assert "plan buckets.steps_per_call: there 8, now 4\n" in said
    assert not any(len(line) > 200 for line in said.splitlines())


def test_a_required_bundle_that_is_of_another_plan_ends_the_job(noria, source, plan, bundle):
    output = source.with_name("must.jsonl")
    arguments = ("batch", "-i", source, "-o", output, "--model", noria.model, "--quiet")
    change = ("--set", "buckets.steps_per_call=4")
    said = noria.refuse(*arguments, "--plan", bundle, "--require-bundle", *change)
    assert "plan buckets.steps_per_call: then 8, now 4" in said and "compile [" not in said
    assert not output.exists()
    # without the option, the job runs, and says why it compiles although it is quiet
    edited = source.with_name("edited-bundle")
    shutil.copytree(bundle, edited)
    text = (edited / "plan.toml").read_text("utf-8")
    changed = text.replace("steps_per_call = 8", "steps_per_call = 4")
    (edited / "plan.toml").write_text(changed, "utf-8")
    assert changed != text
    said = noria.run(*arguments, "--plan", edited).stderr
    assert said.startswith(f"bundle {edited}: it has no decode")
    assert said.count("\n") == 1
    assert read_manifest(output)["bundle"]["executables"] > 0
    assert "buckets.steps_per_call" in read_manifest(output)["bundle"]["reason"]
    said = noria.refuse(*arguments, "--plan", plan, "--require-bundle")
    assert f"expected the folder of a bundle as --plan, got {plan}" in said


def test_a_folder_without_a_plan_is_refused(noria, source, tmp_path):
    arguments = ("-i", source, "-o", source.with_name("no.jsonl"), "--model", noria.model)
    said = noria.refuse("batch", *arguments, "--plan", tmp_path)
    assert "noria compile" in said


def test_a_plan_for_a_model_with_weights_is_not_compiled_without_them(noria, plan, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(noria.model / "config.json", model)
    arguments = ("--model", model, "--plan", plan, "-o", tmp_path / "bundle")
    said = noria.refuse("compile", *arguments)
    assert "plan model.fingerprint: expected none, as " in said
    assert "Give the model with its weights" in said


@pytest.mark.tpu_compile
def test_for_a_tpu_that_is_not_there_report_and_executables_are_kept(noria, source):
    plan, folder = source.with_name("tpu.toml"), source.with_name("tpu")
    options = ("--model", noria.model, "--workload", source, "-o", plan, "--quiet")
    noria.run_here("plan", *options, "--target", "tpu:v5e:1x1")
    said = noria.run("compile", "--model", noria.model, "--plan", plan, "-o", folder).stdout
    assert ", executables kept;" in said
    contents = json.loads((folder / "bundle.json").read_text("utf-8"))
    assert contents["executable"] and "TPU" in contents["key"]["compiler"]
    assert all(graph["compile_seconds"] > 0 for graph in contents["graphs"].values())
    assert any(graph["temp_bytes"] > 0 for graph in contents["graphs"].values())
