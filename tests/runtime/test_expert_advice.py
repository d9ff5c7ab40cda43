"""`noria experts`: figures of several runs together, the cheapest dispatch, refusals."""

import json
import tomllib

import pytest

from noria.modelzoo.moe.config import Dispatch
from noria.modelzoo.moe.use import FACTORS
from noria.runtime import cli
from noria.runtime.expert_advice import PhaseUse, report


def use(dropped: list[float], rows: list[int], lossless_rows: int) -> PhaseUse:
    return PhaseUse(
        1000,
        dict(zip(FACTORS, dropped, strict=True)),
        dict(zip(FACTORS, rows, strict=True)),
        lossless_rows,
    )


DROPPED = [0.2, 0.1, 0.03, 0.001, 0.0, 0.0]
ROWS = [1000, 1300, 1500, 2000, 3000, 4000]


@pytest.mark.parametrize(
    ("max_dropped", "lossless_rows", "expected"),
    [
        (0.03, 1800, Dispatch("capacity", 1.5)),
        (0.029, 2100, Dispatch("capacity", 2.0)),
        (0.029, 2000, Dispatch("lossless")),
        (0.0, 3001, Dispatch("capacity", 3.0)),
    ],
)
def test_the_smallest_factor_within_the_bound_is_advised_unless_lossless_takes_no_more_rows(
    max_dropped, lossless_rows, expected
):
    dispatch, reason = use(DROPPED, ROWS, lossless_rows).advise(max_dropped)
    assert dispatch == expected
    assert ("no dearer" in reason) == (expected.kind == "lossless")


def test_without_a_factor_within_the_bound_lossless_is_advised():
    dispatch, reason = use([0.2] * 6, ROWS, 9999).advise(0.1)
    assert dispatch == Dispatch() and "no factor" in reason


def section(choices: int, drops: float, rows: int) -> dict:
    phase = {
        "dispatch": "lossless",
        "choices": choices,
        "rows": rows,
        "would_drop": {str(factor): drops for factor in FACTORS},
        "would_set_aside_rows": {str(factor): int(factor * choices) for factor in FACTORS},
        "lossless_rows_at_most": 2 * choices,
    }
    sizes = {"num_experts": 8, "num_chosen": 2}
    return {**sizes, "overflow": "error", "model": "m", "decode": phase}


def manifest(path, *sections, model="m"):
    runs = [{"generator": {"experts": of_run}} for of_run in sections]
    path.write_text(
        json.dumps(
            {
                "model": model,
                "configuration": {"model": f"{model} sha256:0"},
                **(runs[0] if len(runs) == 1 else {"parts": runs}),
            }
        )
    )
    return str(path)


def test_runs_are_put_together_by_their_choices(tmp_path, capsys):
    """10 % of 100 choices and 0 % of 300 are 2.5 % of 400; parts of a merge count as runs."""
    runs = [section(100, 0.1, 150), section(300, 0.0, 550)]
    merged = manifest(tmp_path / "merged.json", *runs)
    apart = [manifest(tmp_path / f"{i}.json", run) for i, run in enumerate(runs)]
    assert cli.main(["experts", merged, "--max-dropped", "0.03"]) == 0
    said = capsys.readouterr().out
    assert cli.main(["experts", *apart, "--max-dropped", "0.03"]) == 0
    assert capsys.readouterr().out == said
    lines = said.splitlines()
    assert "decode: 400 choices" in lines and "prefill: no choices" in lines
    assert "  capacity 1.25    2.500%           1.25" in lines
    assert "  lossless         0.000%           1.75" in lines
    tables = tomllib.loads(said[said.index("\n#") :])["experts"]
    assert tables == {"decode": {"dispatch": "capacity", "capacity_factor": 1.0}}


def test_of_lossless_a_bound_is_known_where_a_run_was_not():
    """150 rows of one run, and at most 200 of the other: 350 of 200 choices, so 2.0 is dearer."""
    lossy = section(100, 0.1, 100)
    lossy["decode"] |= {"dispatch": "capacity"}
    lossy["decode"]["would_drop"] |= {"2.0": 0.0}
    lossless = section(100, 0.1, 150)
    lossless["decode"]["would_drop"] |= {"2.0": 0.0}
    said = report([lossless, lossy], 0.0)
    assert "  lossless         0.000%        <= 1.75" in said.splitlines()
    assert "capacity 2.0 sets aside 2.00 rows a choice, lossless runs <= 1.75" in said
    assert tomllib.loads(said[said.index("\n#") :])["experts"]["decode"] == {"dispatch": "lossless"}


def test_what_is_no_manifest_of_one_model_with_experts_is_refused(tmp_path, capsys):
    good = manifest(tmp_path / "good.json", section(100, 0.0, 150))
    other = manifest(tmp_path / "other.json", section(100, 0.0, 150), model="n")
    texts = {
        "dense": '{"model": "smollm2", "generator": {"padding": {}}}',
        "resumed": '{"model": "m", "generator": {}}',
        "list": "[1]",
        "output": '{"id": 1}\n{"id": 2}\n',
    }
    files = {name: tmp_path / name for name in texts}
    for name, text in texts.items():
        files[name].write_text(text)
    for arguments, message in [
        ([files["dense"]], "expected the manifest of a model with experts, got that of smollm2"),
        ([good, files["resumed"]], "resumed: expected a manifest with the statistics of a run"),
        ([files["list"]], "list: expected a manifest with the statistics of a run"),
        ([files["output"]], "output: expected a manifest, got no JSON"),
        ([tmp_path / "none"], "none"),
        ([good, other], "expected runs of one model, got m sha256:0, n sha256:0. Ask for each"),
        ([good, "--max-dropped", "1"], "--max-dropped: expected a share from 0 to below 1"),
        ([good, "--max-dropped", "nan"], "--max-dropped: expected a share"),
    ]:
        assert cli.main(["experts", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
