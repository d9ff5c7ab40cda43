"""The table of capacities: shares of a known batch, and routing with the stated distribution."""

import json

import numpy as np
import pytest
from numerics_helpers import script

from noria.modelzoo.moe_config import LOSSLESS, Dispatch
from noria.runtime import cli

CAPACITY = script("scripts/expert_capacity.py")


@pytest.mark.parametrize(
    ("dispatch", "dropped", "padded"),
    [
        # 16 choices of 4 experts, 10 of them of the first expert, in tiles of 4 rows
        (Dispatch("capacity", 1.0), 6 / 16, 6 / 16),
        (Dispatch("capacity", 2.0), 2 / 16, 18 / 32),
        (LOSSLESS, 0, 1 - 16 / (12 + 3 * 4)),
    ],
)
def test_shares_are_those_of_the_rows(dispatch, dropped, padded):
    expert_MZ = np.repeat([0, 1, 2, 3], [10, 2, 2, 2]).astype(np.int32)[:, None]
    assert CAPACITY.shares(expert_MZ, 4, dispatch) == pytest.approx((dropped, padded))


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_choices_are_distinct_and_follow_the_law_they_state(skew):
    rng = np.random.default_rng(0)
    expert_MZ = CAPACITY.random_choices(rng, 40_000, 8, 2, skew)
    assert (expert_MZ[:, 0] != expert_MZ[:, 1]).all()
    weights = np.arange(1.0, 9.0) ** -skew
    found = np.bincount(expert_MZ[:, 0], minlength=8) / len(expert_MZ)
    np.testing.assert_allclose(found, weights / weights.sum(), atol=0.01)


@pytest.mark.slow
def test_a_trained_mixture_learns_and_runs_as_a_job(tmp_path, monkeypatch, capsys):
    train = script("scripts/train_mixture.py")
    arguments = ["train_mixture.py", str(tmp_path), "--steps", "120", "--rows", "3"]
    monkeypatch.setattr("sys.argv", arguments)
    train.main()
    losses = [float(line.split()[2]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] - 0.5
    files = ["-i", tmp_path / "prompts.jsonl", "-o", tmp_path / "out.jsonl"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cli.main(["batch", *map(str, files), "--model", str(tmp_path / "model")]) == 0
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["generator"]["experts"]["num_experts"] == 8
