"""The measurement of attention to pages, in a tiny form: it has figures, and sees changed bits."""

import json
from argparse import Namespace

import numpy as np
from numerics_helpers import script

OPTIONS = Namespace(kv_heads=1, group=2, head_dim=8, page=8, dtype="float32")


def test_a_mix_has_its_figures_and_a_line(run, tmp_path):
    bench = script("scripts/bench_pages_device.py")
    sizes = "--mixes", "3x10", "--kv-heads", 1, "--group", 2, "--head-dim", 8, "--page", 8
    output = tmp_path / "pages"
    run("bench_pages_device.py", *sizes, "--dtype", "float32", "--output", output)
    (figures,) = json.loads(output.with_suffix(".json").read_text())["rows"]
    assert figures["kernel"] == "xla" and figures["seconds"] > 0 and figures["has_own_bits"]
    live = int(bench.Mix(3, 10).lengths().sum()) * 8 * 2 * 4
    assert np.isclose(figures["live_bytes_per_second"] * figures["seconds"], live)
    assert figures["largest_difference"] < 1e-5
    page = output.with_suffix(".md").read_text()
    assert page.count("| 3 | 10 | xla |") == 1 and page.count("| yes |") == 1


def test_a_kernel_whose_rows_change_each_other_is_seen():
    bench = script("scripts/bench_pages_device.py")
    pool = bench.Pool(bench.Mix(3, 10), OPTIONS)

    def shared(q_BTKGH, k_PKSH, v_PKSH, rows):
        del v_PKSH
        return q_BTKGH + k_PKSH[rows.page_BN].sum(), q_BTKGH * np.arange(len(q_BTKGH)).max()

    def in_place(q_BTKGH, k_PKSH, v_PKSH, rows):
        del k_PKSH, v_PKSH
        return q_BTKGH * np.arange(len(q_BTKGH))[:, None, None, None, None], rows.first_B

    rows = np.arange(3)
    assert not pool.has_own_bits(shared, rows) and not pool.has_own_bits(in_place, rows)
