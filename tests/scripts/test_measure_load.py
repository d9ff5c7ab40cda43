"""Loading in four processes: each holds its own shards once, and the script notices any excess."""

import subprocess
import sys
from pathlib import Path

import pytest
from numerics_helpers import ROOT, script

MIB = 2**20
# Two token tables are most of this model: a loader that copies a parameter exceeds the bound
TABLES = "--layers 1 --embed 1024 --vocab 25013 --files 3"
FLOAT8 = "--layers 4 --vocab 1007 --files 3 --stored-dtype float8"


@pytest.fixture(scope="module")
def measure_load():
    return script("scripts/measure_load.py")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("options", [TABLES, FLOAT8])
def test_the_peak_of_each_process_stays_within_its_bound(options):
    command = [sys.executable, ROOT / "scripts" / "measure_load.py", *options.split()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split("|")[1:-1] for line in result.stdout.splitlines() if line.startswith("|")]
    for number, row in enumerate(rows[2:]):
        process, share, peak, _, bound, read, _ = map(float, row)
        assert process == number and share * 0.9 < peak < bound
        # only its own shards: copied heads are read once for all their copies
        assert read <= share
    assert len(rows) == 2 + 4


@pytest.mark.parametrize(("peak", "code"), [(146 * MIB, None), (147 * MIB, "expected at most 1.3")])
def test_a_peak_above_the_bound_fails(monkeypatch, capsys, measure_load, peak, code):
    row = measure_load.Row(100 * MIB, peak, 100 * MIB, 1.0)
    monkeypatch.setattr(measure_load, "write_checkpoint", lambda folder, options: 400 * MIB)
    monkeypatch.setattr(measure_load, "measure", lambda folder, options: [row])
    monkeypatch.setattr(sys, "argv", ["measure_load.py"])
    if code is None:
        measure_load.main()
    else:
        with pytest.raises(SystemExit, match=code):
            measure_load.main()
    assert f"| 0 | 100.0 | {peak / MIB:.1f} |" in capsys.readouterr().out
