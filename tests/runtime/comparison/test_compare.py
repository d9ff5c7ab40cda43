"""Compared figures are those of plain forward passes of both models over the same tokens."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_on_disk import write_model
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.abstract_model import AbstractModel
from noria.compile.graphs.comparison_steps import compare_step
from noria.compile.graphs.steps import NO_TOKEN
from noria.runtime.checkpoint import load_params, open_model
from noria.runtime.cli import main
from noria.runtime.comparison import compare as module
from noria.runtime.comparison.compare import ComparedModel, compare, forced_grid
from noria.runtime.errors import ConfigError, InputError
from noria.runtime.files import disk
from noria.runtime.files.layout_files import read_layout_table
from noria.runtime.rows.job_text import read_row_ids
from noria.sharding.layout import Layout

RNG = np.random.default_rng(0)
ROWS = [RNG.integers(3, 250, n).tolist() for n in (3, 20, 9, 4)]
LONGEST = 32


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Two models with one vocabulary and different weights."""
    folder = tmp_path_factory.mktemp("models")
    for name, mlp in (("first", 48), ("second", 40)):
        write_model(folder / name, mlp=mlp)
    return [folder / "first", folder / "second"]


class Plain:
    """A model that computes all log-probabilities of a row in one forward pass."""

    def __init__(self, folder: Path):
        with open_model(folder) as files:
            self._definition = AbstractModel(files.spec.config)
            abstract = self._definition.abstract_parameters(jnp.float32)
            sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            self._parameters = load_params(files.spec, files.tensors, abstract, sharding)
        self._forward = jax.jit(self._logprobs)

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """Return `[T, V]`."""
        tokens_1T = np.zeros((1, LONGEST), np.int32)
        tokens_1T[0, : len(ids)] = ids
        length_1 = np.array([len(ids)], np.int32)
        return np.asarray(self._forward(self._parameters, tokens_1T, length_1))[: len(ids)]

    def _logprobs(self, parameters, tokens_1T, length_1):
        decoder = self._definition.bind(parameters)
        x_BTD, _ = decoder.forward(tokens_1T, length_1)
        return jax.nn.log_softmax(decoder.logits(x_BTD[0]))


def plain_figures(models: list[Path], rows, max_tokens: int) -> np.ndarray:
    """Return the means over all tokens of the fields of `TokenFigures`."""
    reference, compared = map(Plain, models)
    found = []
    for row in rows:
        ids, start = list(row), len(row) if max_tokens else 1
        for _ in range(max_tokens):
            ids.append(int(reference.logprobs(ids)[-1].argmax()))
        p_TV, q_TV = reference.logprobs(ids), compared.logprobs(ids)
        for t in range(start, len(ids)):
            p_V, q_V = p_TV[t - 1].astype(np.float64), q_TV[t - 1].astype(np.float64)
            divergence = (np.exp(p_V) * (p_V - q_V)).sum()
            same = float(p_V.argmax() == q_V.argmax())
            gap = p_V.max() - p_V[q_V.argmax()]
            found.append([divergence, same, p_V[ids[t]], q_V[ids[t]], gap])
    return np.array(found)


@pytest.mark.parametrize("max_tokens", [5, 0], ids=["answers", "rows"])
def test_figures_are_those_of_plain_forward_passes(models, max_tokens):
    sides = [ComparedModel(str(path)) for path in models]
    comparison = compare(sides, ROWS, max_tokens=max_tokens, dtype="float32", target="cpu", slots=3)
    wanted = plain_figures(models, ROWS, max_tokens)
    (figures,) = comparison.figures
    assert comparison.num_tokens == len(wanted) and comparison.num_rows == len(ROWS)
    got = [
        figures.divergence.mean,
        figures.agreement.mean,
        -np.log(figures.reference_perplexity.mean),
        -np.log(figures.perplexity.mean),
    ]
    scale = max(1.0, wanted[:, 0].mean())
    np.testing.assert_allclose(
        [*got, figures.widest_gap],
        [*wanted[:, :4].mean(0), wanted[:, 4].max()],
        atol=FLOAT32_MODEL_LOGPROB * scale,
        rtol=0,
    )
    assert figures.divergence.mean > 0.1 and figures.divergence.error


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("data-tensor@data=2,tensor=2", marks=pytest.mark.slow),
        # it divides the length of prompts, too
        "ring@sequence=4",
    ],
)
def test_figures_do_not_depend_on_the_layout(models, layout):
    """The longest row has 22 tokens, which do not divide over four devices."""
    sides = [ComparedModel(str(path)) for path in models]
    options = {"max_tokens": 2, "dtype": "float32", "slots": 3}
    (wanted,) = compare(sides, ROWS, target="cpu", **options).figures
    (figures,) = compare(sides, ROWS, target="cpu:4", layout=layout, **options).figures
    assert figures.divergence.mean == pytest.approx(wanted.divergence.mean, rel=1e-4)
    assert figures.perplexity.mean == pytest.approx(wanted.perplexity.mean, rel=1e-4)


@pytest.mark.parametrize(
    ("target", "layout"),
    [
        ("cpu", None),
        # rows are split, and each device has the pages of its own
        ("cpu:4", "data-tensor-batch-attention@data=2,tensor=2"),
    ],
)
def test_figures_of_a_cache_in_pages_are_those_of_slots(models, target, layout):
    sides = [ComparedModel(str(models[0])), ComparedModel(str(models[0]), {"cache": "int8"})]
    options = {"max_tokens": 4, "dtype": "float32", "slots": 3}
    (wanted,) = compare(sides, ROWS, target="cpu", **options).figures
    pages = ["buckets.page=8"]
    (figures,) = compare(
        sides, ROWS, target=target, layout=layout, overrides=pages, **options
    ).figures
    # codes of the same entries in both, but for what rounds to another code
    assert figures.divergence.mean == pytest.approx(wanted.divergence.mean, rel=0.05)
    assert figures.divergence.mean > 1e-6
    assert figures.perplexity.mean == pytest.approx(wanted.perplexity.mean, rel=1e-4)


def test_a_model_does_not_differ_from_itself(models):
    sides = [ComparedModel(str(models[0]))] * 2
    comparison = compare(sides, ROWS, max_tokens=3, dtype="float32", target="cpu", slots=4)
    (same,) = comparison.figures
    assert same.divergence.mean == same.widest_gap == 0.0 and same.agreement.mean == 1.0
    assert same.perplexity == same.reference_perplexity


def test_a_step_compares_the_vocabulary_and_forces_one_token():
    rng = np.random.default_rng(0)
    reference_BV, compared_BV = rng.normal(size=(2, 3, 7)).astype(np.float32)
    reference_BV[0, 2] = -np.inf  # an impossible token adds nothing to the divergence
    token_B = np.array([NO_TOKEN, 4, NO_TOKEN], np.int32)
    chosen = compare_step(reference_BV, compared_BV, token_B, vocab_size=6)
    p_BV, q_BV = (
        x[:, :6] - np.log(np.exp(x[:, :6]).sum(1))[:, None] for x in (reference_BV, compared_BV)
    )
    best_B = p_BV.argmax(1)
    np.testing.assert_array_equal(chosen.token_B, [best_B[0], 4, best_B[2]])
    is_possible_BV = np.isfinite(p_BV)
    terms_BV = np.exp(p_BV) * (np.where(is_possible_BV, p_BV, 0) - q_BV)
    np.testing.assert_allclose(chosen.figures.divergence_B, terms_BV.sum(1), atol=1e-5)
    np.testing.assert_array_equal(chosen.figures.agrees_B, best_B == q_BV.argmax(1))
    rows = np.arange(3), np.asarray(chosen.token_B)
    np.testing.assert_allclose(chosen.figures.reference_logprob_B, p_BV[rows], atol=1e-5)
    np.testing.assert_allclose(chosen.figures.compared_logprob_B, q_BV[rows], atol=1e-5)
    other_B = q_BV.argmax(1)
    gap_B = p_BV[np.arange(3), best_B] - p_BV[np.arange(3), other_B]
    np.testing.assert_allclose(chosen.figures.gap_B, gap_B, atol=1e-5)
    for forced_BV in (chosen.reference_forced_BV, chosen.compared_forced_BV):
        assert forced_BV.shape == (3, 7)
        np.testing.assert_array_equal(np.isfinite(forced_BV).sum(1), 1)
        np.testing.assert_array_equal(np.argmax(forced_BV, 1), chosen.token_B)


def test_the_name_of_a_model_has_no_formats_of_its_checkpoint():
    published = {"*.mlp.down": {"codes": "int8", "scales": "float32"}}
    model = ComparedModel("m", {"weights": "as_published", "published": published})
    assert str(model) == "m weights=as_published"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in ROWS[:2]))
    return path


def run(*arguments: object) -> int:
    return main(["compare", *map(str, arguments), "--dtype", "float32", "--target", "cpu"])


def test_the_command_writes_the_table_the_figures_and_a_picture(models, prompts, tmp_path, capsys):
    numbers = ["--numbers", "float", "--numbers", "weights=int4,group=8"]
    options = ["-i", prompts, "-o", tmp_path / "report", "--max-tokens", 2, "--quiet"]
    assert run("--model", models[0], *numbers, *options) == 0
    report = json.loads((tmp_path / "report" / "compare.json").read_text())
    assert report["reference"]["numbers"] == {"dtype": "float32"}
    (compared,) = report["compared"]
    assert compared["numbers"] == {"dtype": "float32", "weights": "int4", "group": 8}
    assert compared["divergence"]["mean"] > 0
    table = (tmp_path / "report" / "compare.md").read_text()
    assert table.count("\n| ") == 3 and table.strip() in capsys.readouterr().out
    assert (tmp_path / "report" / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "expected two models or more"),
        (["--numbers", "int8"], "expected two models or more"),
        (["--numbers", "int8"] * 3 + ["--against", "SECOND"], "expected two models or more"),
        (["--numbers", "float", "--numbers", "int3"], "expected one of float, int8, float8, int4"),
        (["--against", "OTHER"], "tokens of the reference"),
        (
            ["--against", "SECOND", "--set", "buckets.page=24"],
            "buckets.page: expected a power of two, got 24",
        ),
        (
            ["--against", "SECOND", "--set", "buckets.steps_per_call=4"],
            "--set buckets: expected no settings of buckets",
        ),
        (
            ["--against", "SECOND", "--max-tokens", "4000"],
            "answer included. Give shorter rows, or a smaller --max-tokens.",
        ),
        (["--against", "SECOND", "--max-tokens", "-1"], "--max-tokens: expected at least 0"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    models, prompts, options, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(module, "build", lambda *given: None)
    write_model(tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 200}))
    names = {"SECOND": models[1], "OTHER": tmp_path / "other"}
    options = [names.get(option, option) for option in options]
    rest = ["-i", prompts, "-o", tmp_path / "report", "--quiet"]
    assert run("--model", models[0], *options, *rest) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("numbers", ["weights=int4,group=7", "int8:-1", "numbers"])
def test_the_last_model_is_checked_before_the_first_is_loaded(
    models, prompts, numbers, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(module.OpenedModel, "load", lambda *given: pytest.fail("loaded"))
    write_model(tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 200}))
    others = ["--against", models[1], "--against", models[1]]
    given = ["--numbers", "float", "--numbers", "int8", "--numbers", numbers]
    if numbers == "numbers":
        others, given = ["--against", models[1], "--against", tmp_path / "other"], []
    rest = ["-i", prompts, "-o", tmp_path / "report", "--quiet"]
    assert run("--model", models[0], *others, *given, *rest) == 2
    assert "expected" in capsys.readouterr().err


def test_the_table_is_printed_even_if_no_file_can_be_written(
    models, prompts, tmp_path, capsys, monkeypatch
):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "replace_file", full)
    numbers = ["--numbers", "float", "--numbers", "int8"]
    options = ["-i", prompts, "-o", tmp_path / "report", "--max-tokens", 1, "--quiet"]
    assert run("--model", models[0], *numbers, *options) == 2
    said = capsys.readouterr()
    assert "| model | divergence |" in said.out and "No space left" in said.err


@pytest.mark.parametrize("name", ["ring", "ring-tensor", "sequence-parallel", "gpu-host"])
def test_rows_of_any_length_fit_a_grid_that_the_layout_divides(name):
    layout = Layout.from_table(read_layout_table(name))
    layout = layout.with_mesh(layout.mesh.fitted(4))
    for length in (29, 30, 31):
        grid = forced_grid([length], length + 2, 3, layout)
        assert grid.prefill[-1].length >= length and grid.max_length >= length + 2


def test_an_illegal_layout_is_refused_with_its_findings(models, prompts, tmp_path, capsys):
    layout = tmp_path / "mine.toml"
    layout.write_text('[mesh]\ndata = 1\n[rules]\nbatch = "dat"\n')
    rest = ["-i", prompts, "-o", tmp_path / "report", "--layout", layout, "--quiet"]
    assert run("--model", models[0], "--against", models[1], *rest) == 2
    assert "the mesh has no axis 'dat'" in capsys.readouterr().err


@pytest.mark.parametrize("row", [[], [5, 10**6], [-1], "a text", [0.5]])
def test_rows_that_are_no_tokens_of_the_models_are_refused(models, row):
    sides = [ComparedModel(str(model)) for model in models]
    with pytest.raises(ConfigError, match=r"expected rows of token ids from 0 to \d+, got"):
        compare(sides, [[5, 6], row], dtype="float32", target="cpu")


def test_the_name_of_a_model_alone_is_refused(models):
    sides = [ComparedModel(str(models[0])), str(models[1])]
    with pytest.raises(ConfigError, match=r"^models\[1\]: expected a ComparedModel, got '"):
        compare(sides, [[5, 6]], dtype="float32", target="cpu")


def test_rows_without_prompts_are_refused(models, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": [5]}\n{"input": [[5, 6], [7]]}\n')
    message = r"in.jsonl: line 2: expected rows with prompts, got embedding rows, .* Give rows with"
    with open_model(models[0]) as files, pytest.raises(InputError, match=message):
        read_row_ids(path, files)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "a", "prompt": [5]}', "line 2: expected a new custom_id, got 'a'"),
        ('{"prompt": [5], "temperature": NaN}', "line 2: expected finite numbers, got NaN"),
        ('{"prompt": [5.5]}', "line 2: prompt: expected token ids, got 5.5"),
    ],
)
def test_the_place_of_a_wrong_row_is_named_once(models, line, message, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"id": "a", "prompt": [5]}}\n{line}\n')
    with open_model(models[0]) as files, pytest.raises(InputError) as error:
        read_row_ids(path, files)
    assert str(error.value).startswith(f"{path}: {message}")
