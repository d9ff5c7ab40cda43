"""The benchmark of loading compares two checkouts on one checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from numerics_helpers import ROOT

SMALL = (
    "--repeat 1 --files 2 --layers 1 --embed 128 --mlp 256 --query-heads 4 --kv-heads 2 "
    "--head-dim 32 --vocab 64"
)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_all_kinds_of_runs_are_measured_and_give_the_same_bits(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "bench_load.py", *SMALL.split()]
    command += ["--before", ROOT, "--work-dir", tmp_path / "work", "--output", tmp_path / "load"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "load.json").read_text())
    assert found["bytes"] == 2 * (2 * 64 * 128 + 3 * 128 + 128 * 128 * 3 + 3 * 128 * 256)
    kinds = ("plain read", "after", "before")
    assert set(found["runs"]) == {
        f"{kind}, {cache}" for kind in kinds for cache in ("cold", "warm")
    }
    page = (tmp_path / "load.md").read_text()
    assert page.count("\n| ") == 1 + 6 and "| plain read, cold |" in page
    assert not list((tmp_path / "work").iterdir())
