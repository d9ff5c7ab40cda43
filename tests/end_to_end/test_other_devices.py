"""A job that other devices continue: by another plan, with the finished rows kept."""

import json
import math
import tomllib

import pytest
from command import answer, completion, plan_text, read_manifest, read_rows, write_lines

OPTIONS = ("--dtype", "float32", "--set", "buckets.decode_slots=2")
TWO = ("--target", "cpu:2", "--layout", "data-parallel@data=2")
ALLOW = "--allow-different-numerics"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    rows = [
        completion(f"row-{i}", [3 + i, 4, 5], max_tokens=12, ignore_eos=True, temperature=0)
        for i in range(60)
    ]
    return write_lines(tmp_path_factory.mktemp("devices") / "in.jsonl", rows)


@pytest.fixture
def stopped(noria, source, tmp_path):
    """The output of a job of two devices that was killed after a few rows."""
    output = tmp_path / "out.jsonl"
    noria.kill(output, "-i", source, *OPTIONS, *TWO, after=8)
    return output


def finished_lines(output) -> list[str]:
    """The output lines in a journal."""
    journal = output.with_name(f"{output.name}.journal").read_text("utf-8").splitlines()
    return [line.split("\t")[1] for line in journal if "\t" in line]


def test_a_job_goes_on_with_the_devices_that_are_there(noria, source, stopped, tmp_path):
    kept = finished_lines(stopped)
    arguments = ("batch", "-i", source, "-o", stopped, "--model", noria.model, *OPTIONS)
    said = noria.refuse(*arguments, "--target", "cpu")
    assert "target: there cpu:2, now cpu" in said and "layout: there given, now none" in said
    assert f"With {ALLOW} the job continues on these devices by another plan" in said
    noria.run(*arguments, "--target", "cpu", ALLOW)
    lines = stopped.read_text("utf-8").splitlines()
    assert kept and set(kept) < set(lines) and len(lines) == 60
    manifest = read_manifest(stopped)
    assert manifest["setups"] == ["1 process on cpu:2", "1 process on cpu"]
    assert 'target = "cpu"\n' in manifest["plan"]
    assert manifest["rows"]["kept_from_earlier_runs"] == len(kept)
    whole, _ = noria.batch(source, tmp_path / "whole.jsonl", *OPTIONS, "--target", "cpu")
    assert list(map(answer, read_rows(stopped))) == list(map(answer, whole))
    assert "complete already" in noria.run(*arguments, "--target", "cpu").stderr


def test_a_plan_of_the_other_devices_is_refused_with_what_works(noria, source, stopped, tmp_path):
    plan = tmp_path / "plan.toml"
    layout = '[mesh]\ndata = 2\n\n[rules]\nbatch = "data"\n'
    buckets = "max_length = 16\nprefill = [[16, 2]]\ndecode_slots = 2\n"
    groups = "slot_groups = 2\n"
    plan.write_text(plan_text(buckets + groups, target="cpu:2", layout="two", others=layout))
    arguments = ("batch", "-i", source, "-o", stopped, "--model", noria.model, "--target", "cpu")
    said = noria.refuse(*arguments, *OPTIONS[:2], "--plan", plan)
    assert "The --plan must be for these devices." in said
    said = noria.refuse(*arguments, *OPTIONS[:2], "--plan", plan, ALLOW)
    assert "give another plan with --plan: noria plan --target cpu makes one" in said
    plan.write_text(plan_text(buckets))
    noria.run(*arguments, *OPTIONS[:2], "--plan", plan, ALLOW)
    assert json.loads(read_manifest(stopped)["configuration"]["plan"])["target"] == "cpu"
    assert len(read_rows(stopped)) == 60


def test_a_plan_without_a_layout_takes_one_beside_it_which_is_fitted(noria, source, tmp_path):
    plan, layout = tmp_path / "plan.toml", ("--target", "cpu:2", "--layout", "data-tensor")
    plan.write_text(plan_text("max_length = 16\nprefill = [[16, 2]]\ndecode_slots = 4\n"))
    output = tmp_path / "out.jsonl"
    arguments = ("batch", "-i", source, "-o", output, "--model", noria.model, "--plan", plan)
    noria.run(*arguments, *layout)
    planned = read_manifest(output)["plan"]
    mesh = tomllib.loads(planned)["mesh"]
    assert math.prod(mesh.values()) == 2 and 'layout = "data-tensor"' in planned
    whole, _ = noria.batch(source, tmp_path / "whole.jsonl", *OPTIONS, "--target", "cpu")
    assert list(map(answer, read_rows(output))) == list(map(answer, whole))
    plan.write_text(planned)
    said = noria.refuse(*arguments, *layout, "--restart")
    assert "--layout: expected no layout beside a plan that has its own" in said


def test_a_layout_for_more_devices_than_the_target_has_is_fitted_by_its_name(
    noria, source, tmp_path
):
    output, layout = tmp_path / "out.jsonl", ("--target", "cpu:2", "--layout", "v5e-host")
    noria.batch(source, output, "--dtype", "float32", *layout)
    assert tomllib.loads(read_manifest(output)["plan"])["mesh"] == {"tensor": 2}
    plan = tmp_path / "plan.toml"
    arguments = ("--model", noria.model, "--workload", source, "-o", plan, "--quiet")
    noria.run_here("plan", *arguments, *layout)
    assert tomllib.loads(plan.read_text("utf-8"))["mesh"] == {"tensor": 2}
