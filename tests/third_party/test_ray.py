"""Ray Data on a real local cluster: two actors, one of which is killed."""

import subprocess
import sys
from pathlib import Path

import pytest
from command import read_rows

pytest.importorskip("ray.data", reason="needs ray[data]")

pytestmark = pytest.mark.third_party
HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"


def test_every_row_is_answered_once_although_an_actor_is_killed(noria, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    path = f"{EXAMPLES}:{noria.environment.get('PYTHONPATH', '')}"
    quiet = {"RAY_DEDUP_LOGS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, HERE / "ray_job.py", noria.model, tmp_path, marks],
        env=noria.environment | {"PYTHONPATH": path} | quiet,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = read_rows(tmp_path / "out.jsonl")
    assert sorted(row["id"] for row in rows) == sorted(f"row-{i}" for i in range(500))
    assert (marks / "killed").exists()
    # two actors, and the one that replaced the killed one
    assert len(list(marks.glob("engine-*"))) == 3
    # the answers of one engine that nobody killed
    expected = {row["id"]: row["answer"] for row in read_rows(tmp_path / "expected.jsonl")}
    assert {row["id"]: row["answer"] for row in rows} == expected
