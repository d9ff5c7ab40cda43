"""`noria eval` on a local task, compared with the harness's own backend for transformers."""

import json
import random
import re

import pytest
from command import write_lines
from model_on_disk import write_model

pytest.importorskip("lm_eval", reason="needs lm-eval")

pytestmark = pytest.mark.third_party
NUM_ITEMS = 200
WORDS = "the water wheel turns buckets of fixed size driven by the stream".split()  # noqa: SIM905
LOADED = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1.0}}
TASKS = {
    "wheel_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "wheel_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "wheel_answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["t", "\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with the files of three tasks of 200 items each."""
    # With this seed the two most likely tokens of each step differ by 2e-3 or more in float64, so
    # that both backends choose the same.
    folder, rng = tmp_path_factory.mktemp("tasks"), random.Random(10)

    def words(low: int, high: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))

    items = [
        {"question": words(3, 9), "choices": [words(1, 3) for _ in range(3)], "gold": i % 3}
        for i in range(NUM_ITEMS)
    ]
    write_lines(folder / "items.jsonl", items)
    data = {"data_files": {"test": str(folder / "items.jsonl")}}
    for name, task in TASKS.items():
        content = {"task": name, "dataset_kwargs": data, **LOADED, **task}
        # YAML reads JSON
        (folder / f"{name}.yaml").write_text(json.dumps(content))
    return folder


def results_in(folder) -> dict:
    (path,) = folder.rglob("results_*.json")
    return json.loads(path.read_text())


def metrics(results: dict) -> dict[str, float]:
    return {
        f"{task} {name}": value
        for task, figures in results["results"].items()
        for name, value in figures.items()
        if isinstance(value, float) and "stderr" not in name
    }


def test_metrics_equal_those_of_the_backend_for_transformers(tasks, tmp_path, capsys):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from noria.runtime.cli import main

    model, output = tmp_path / "model", tmp_path / "results"
    write_model(model)
    options = ("--max-length", "127", "--slots", "8", "--dtype", "float32", "--log-samples")
    arguments = ["eval", "--model", str(model), "--tasks", ",".join(TASKS), *options]
    assert main([*arguments, "--include-path", str(tasks), "-o", str(output)]) == 0
    assert "wheel_choice" in capsys.readouterr().out
    ours = results_in(output)
    theirs = simple_evaluate(
        "hf",
        {"pretrained": str(model), "dtype": "float32", "max_length": 126},
        list(TASKS),
        task_manager=TaskManager(include_path=str(tasks)),
        batch_size=16,
        device="cpu",
    )
    expected = metrics(theirs)
    assert len(expected) == 5
    assert metrics(ours) == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert ours["config"]["model"] == "noria"
    for task in TASKS:
        (path,) = output.rglob(f"samples_{task}_*.jsonl")
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(samples) == NUM_ITEMS
        by_id = {sample["doc_id"]: sample for sample in theirs["samples"][task]}
        for sample in samples:
            own, other = sample["filtered_resps"], by_id[sample["doc_id"]]["filtered_resps"]
            assert numbers(own) == pytest.approx(numbers(other), rel=1e-3, abs=1e-3)
            if task == "wheel_answer":
                assert own == other


def numbers(responses: object) -> list[float]:
    """All numbers of a response, in order."""
    return [float(text) for text in re.findall(r"-?\d+\.\d+", json.dumps(responses))]


def test_a_task_that_asks_for_something_unknown_is_refused(tasks, tmp_path, capsys):
    from noria.runtime.cli import main
    from noria.runtime.errors import ConfigError
    from noria.runtime.evaluation.harness_model import sampling_of

    arguments = ["eval", "--model", str(tmp_path), "--include-path", str(tasks), "--tasks"]
    assert main([*arguments, "wheel_choice,no_such_task"]) == 2
    assert "got no_such_task" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="got num_beams"):
        sampling_of({"until": ["a"], "num_beams": 4})
    sampled = sampling_of({"until": "a", "do_sample": True, "temperature": 0.5, "top_k": 3})
    assert (sampled.stop, sampled.temperature, sampled.top_k) == (("a",), 0.5, 3)
    assert sampled.max_tokens == 256
    assert sampling_of({"until": ["", "b"], "temperature": 0.5, "do_sample": False}).stop == ("b",)
