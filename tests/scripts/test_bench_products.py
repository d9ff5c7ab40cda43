"""The rates of products are measured for every dtype and every side."""

import subprocess
import sys

from cpu_kernels import NEEDS_NUMBA
from numerics_helpers import ROOT

pytestmark = list(NEEDS_NUMBA)


def test_rates_of_all_sides_are_on_the_page(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "bench_products.py"]
    command += ["--shapes", "1024x2048", "--rows", "3", "--output", tmp_path / "page.md"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    rows = [line for line in (tmp_path / "page.md").read_text().splitlines() if "1024 x" in line]
    assert [row.split(" | ")[0] for row in rows][:2] == ["| float32", "| bfloat16"]
    for row in rows:
        *_, noria, xla, torch, ratio = row.strip(" |").split(" | ")
        assert min(map(float, (noria, xla, torch))) > 0
        assert abs(float(ratio) - float(noria) / max(float(xla), float(torch))) < 0.1
