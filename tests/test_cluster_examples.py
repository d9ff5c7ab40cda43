"""The example files for clusters: their syntax, their fields, and their commands."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from noria.runtime.commands.command_line import command_parser

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "cluster"
SCRIPTS = sorted(FOLDER.glob("slurm_*.sh"))
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
VALUES = {
    "SLURM_ARRAY_TASK_ID": "1",
    "SLURM_ARRAY_TASK_COUNT": "8",
    "JOB_COMPLETION_INDEX": "1",
}


def commands(text: str) -> list:
    """The options of every job in a script."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        if not re.match(r"\s*(srun )?noria ", line):
            continue
        words = shlex.split(
            re.sub(r"\$\{?(\w+)\}?", lambda name: VALUES[name[1]], line.rstrip(" &"))
        )
        found.append(command_parser().parse_args(words[words.index("noria") + 1 :]))
    return found


def job_of(manifest: dict) -> dict:
    """The specification of the Job in a manifest."""
    if manifest["kind"] == "JobSet":
        (replicated,) = manifest["spec"]["replicatedJobs"]
        return replicated["template"]["spec"]
    return manifest["spec"]


def test_all_examples_are_here():
    assert len(SCRIPTS) == len(MANIFESTS) == 2


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_for_slurm_is_valid_and_queues_stopped_jobs_again(path):
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert options.keys() >= {"job-name", "time", "requeue", "gres"}
    # every process gets the signal, in time to finish its rows
    assert int(options["signal"].removeprefix("TERM@")) > 20
    (command,) = commands(text)
    assert "scontrol requeue" in text and "-eq 75" in text
    if "array" in options:
        first, last = map(int, options["array"].split("-"))
        assert (first, last) == (0, 7) and command.rows == "1/8"
    else:
        # the plan names the devices
        assert command.distributed == "auto" and command.plan and command.target is None


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_for_kubernetes_has_its_fields_and_a_valid_command(path):
    (manifest,) = yaml.safe_load_all(path.read_text())
    assert manifest["apiVersion"] and manifest["metadata"]["name"]
    job = job_of(manifest)
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] > 20
    (container,) = pod["containers"]
    assert container["image"] and container["resources"]["limits"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    (script,) = container["args"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    (command,) = commands(script)
    if manifest["kind"] == "JobSet":
        (chips,) = container["resources"]["limits"].values()
        assert chips * job["completions"] == 2 * 4  # the chips of the slice, which the plan names
        assert command.plan and command.target is None
        assert command.distributed == "auto" and job["backoffLimit"] == 0
    else:
        assert command.rows == f"1/{job['completions']}"
        rules = job["podFailurePolicy"]["rules"]
        by_code = {
            code: r["action"] for r in rules for code in r.get("onExitCodes", {}).get("values", ())
        }
        assert by_code == {75: "Ignore", 2: "FailJob", 3: "FailJob", 4: "FailJob"}
