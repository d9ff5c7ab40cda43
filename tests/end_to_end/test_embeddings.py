"""Embedding jobs from end to end: forms of requests, order, interruption, parts and bundles."""

import base64
import json
import tomllib

import numpy as np
import pytest
from command import Noria, read_rows, write_lines
from model_on_disk import EMBED, TEXT, write_model

from noria.runtime import LLM, StructuredOutputsParams
from noria.runtime.errors import RowError


def embeddings(custom_id: str, given: object, url: str = "/v1/embeddings", **body):
    """An OpenAI Batch line."""
    content = {"model": "m", "input": given, **body} if url == "/v1/embeddings" else body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": content}


IDS = [list(range(3, 3 + n)) for n in (7, 40, 2, 21, 13, 9, 60, 3)]
ROWS = [
    *(embeddings(f"ids-{i}", ids) for i, ids in enumerate(IDS)),
    embeddings("text", TEXT[0]),
    embeddings("texts", TEXT),
    embeddings("lists", [IDS[3], IDS[0]]),
    embeddings("base64", TEXT[0], encoding_format="base64"),
    embeddings("short", TEXT[0], dimensions=5),
    embeddings("again", TEXT[0]),
    # begins as the first row
    embeddings("cut", IDS[1], truncate_prompt_tokens=len(IDS[0])),
    {"id": "simple", "input": TEXT[1]},
    embeddings("score", None, "/v1/score", text_1=TEXT[0], text_2=TEXT[1:3]),
    embeddings("rerank", None, "/v1/rerank", query=TEXT[0], documents=TEXT, top_n=2),
    embeddings("long", [5] * 500),
    embeddings("unknown", [5, 4000]),
    embeddings("empty", ["", TEXT[0]]),
    embeddings("too-many", TEXT[0], dimensions=EMBED + 1),
    embeddings("no-classes", None, "/v1/classify", input=TEXT[0]),
    embeddings("empty-pair", None, "/v1/score", text_1=TEXT[0], text_2=[TEXT[1], ""]),
    embeddings("long-document", None, "/v1/rerank", query=TEXT[0], documents=["a", "a " * 200]),
]
ERRORS = {
    "long": "context_length_exceeded",
    "unknown": "invalid_token_id",
    "empty": "empty_prompt",
    "too-many": "invalid_request",
    "no-classes": "invalid_request",
    "empty-pair": "empty_prompt",
    "long-document": "context_length_exceeded",
}
PLACES = {
    "long": "input",
    "empty": "input[0]",
    "empty-pair": "text_2[1]",
    "long-document": "documents[1]",
}
"""The keys that errors of texts name."""


@pytest.fixture(scope="module")
def embedder(noria, tmp_path_factory) -> Noria:
    """The model of the other tests with the module files of an embedder."""
    model = tmp_path_factory.mktemp("embedder") / "model"
    write_model(model)
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": p} for kind, p in kinds]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": EMBED, "pooling_mode_lasttoken": True}
    (model / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return Noria(noria.environment, model, noria.servers)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("embeddings") / "in.jsonl", ROWS)


@pytest.fixture(scope="module")
def job(embedder, source):
    """The bodies of the answers by custom_id, and the manifest."""
    output = source.with_name("out.jsonl")
    rows, manifest = embedder.batch(source, output, expect=1)
    assert [row["custom_id"] for row in rows] == [row.get("custom_id", "simple") for row in ROWS]
    return {row["custom_id"]: row["response"]["body"] for row in rows}, manifest


def vectors(body) -> np.ndarray:
    assert body["object"] == "list"
    assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))
    assert all(item["object"] == "embedding" for item in body["data"])
    return np.array([item["embedding"] for item in body["data"]], np.float32)


def test_every_form_of_a_request_has_the_vectors_of_its_texts(job):
    bodies, manifest = job
    text = vectors(bodies["text"])
    assert text.shape == (1, EMBED)
    np.testing.assert_allclose(np.linalg.norm(text), 1, atol=1e-6)
    np.testing.assert_array_equal(vectors(bodies["texts"])[0], text[0])
    np.testing.assert_array_equal(vectors(bodies["texts"])[1], vectors(bodies["simple"])[0])
    np.testing.assert_array_equal(vectors(bodies["lists"])[0], vectors(bodies["ids-3"])[0])
    np.testing.assert_array_equal(vectors(bodies["lists"])[1], vectors(bodies["ids-0"])[0])
    np.testing.assert_array_equal(vectors(bodies["again"]), text)
    (item,) = bodies["base64"]["data"]
    decoded = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
    np.testing.assert_array_equal(decoded, text[0])
    short = text[:, :5] / np.linalg.norm(text[:, :5])
    np.testing.assert_allclose(vectors(bodies["short"]), short, atol=1e-6)
    np.testing.assert_array_equal(vectors(bodies["cut"]), vectors(bodies["ids-0"]))
    assert bodies["cut"]["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert manifest["prompt_tokens_cut"] == len(IDS[1]) - 7
    assert bodies["lists"]["usage"] == {"prompt_tokens": 28, "total_tokens": 28}


def test_scores_of_an_embedder_are_cosines(job):
    bodies, _ = job
    all_texts = vectors(bodies["texts"])
    scores = [item["score"] for item in bodies["score"]["data"]]
    np.testing.assert_allclose(scores, all_texts[1:3] @ all_texts[0], atol=1e-6)
    ranked = bodies["rerank"]["results"]
    assert len(ranked) == 2 and ranked[0]["index"] == 0
    assert ranked[0]["document"] == {"text": TEXT[0]}
    best, second = (item["relevance_score"] for item in ranked)
    assert best == pytest.approx(1) and second < best


def test_rows_that_cannot_be_answered_are_errors_by_name(job):
    bodies, manifest = job
    found = {name: body["error"]["code"] for name, body in bodies.items() if "error" in body}
    assert found == ERRORS
    for name, place in PLACES.items():
        error = bodies[name]["error"]
        assert error["param"] == place and f"{place}: " in error["message"]
    # rows that the model cannot answer are not run
    assert manifest["rows"]["repeated"] == 3 and manifest["compiles_during_run"] == 0


def test_the_plan_has_graphs_of_texts_alone(job):
    _, manifest = job
    buckets = tomllib.loads(manifest["plan"])["buckets"]
    assert buckets["embed"] is True and buckets["decode_slots"] == 0
    used = manifest["generator"]["buckets"]
    assert used["prefill"] and not used["decode"]
    assert all(use["flops"] > 0 for use in used["prefill"].values())


def answers(path) -> list[str]:
    """Return the answers without times and hashes of the job's configuration."""
    rows = [row["response"]["body"] for row in read_rows(path)]
    keys = ("id", "created")
    return [json.dumps({k: v for k, v in row.items() if k not in keys}) for row in rows]


def test_parts_and_other_orders_give_the_same_bytes(embedder, source, job, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(job[1]["plan"])
    backwards = write_lines(tmp_path / "back.jsonl", ROWS[::-1])
    embedder.batch(backwards, tmp_path / "back-out.jsonl", "--plan", plan, expect=1)
    expected = answers(source.with_name("out.jsonl"))
    assert answers(tmp_path / "back-out.jsonl") == expected[::-1]
    for part in ("0/2", "1/2"):
        name = f"part-{part[0]}.jsonl"
        options = ("--plan", plan, "--rows", part)
        embedder.batch(source, tmp_path / name, *options, expect=1)
    parts = (tmp_path / "part-0.jsonl", tmp_path / "part-1.jsonl")
    embedder.run("merge", *parts, "-o", tmp_path / "merged.jsonl", expect=1)
    assert answers(tmp_path / "merged.jsonl") == expected


def test_a_job_that_stops_at_an_error_goes_on_with_the_rows_that_are_left(
    embedder, source, job, tmp_path
):
    """The journal has the vectors of finished rows; the plan is that of the first run."""
    output = tmp_path / "out.jsonl"
    embedder.run(
        "batch", "-i", source, "-o", output, "--model", embedder.model, "--on-error", "raise",
        expect=1,
    )  # fmt: skip
    assert not output.exists()
    rows, manifest = embedder.batch(source, output, expect=1)
    assert answers(output) == answers(source.with_name("out.jsonl"))
    assert len(rows) == len(ROWS) and manifest["rows"]["errors"] == len(ERRORS)


def test_a_bundle_of_such_a_plan_needs_no_compile(embedder, source, job, tmp_path):
    (tmp_path / "plan.toml").write_text(job[1]["plan"])
    bundle, output = tmp_path / "bundle", tmp_path / "out.jsonl"
    embedder.run(
        "compile", "--model", embedder.model, "--plan", tmp_path / "plan.toml", "-o", bundle
    )
    options = ("-i", source, "-o", output, "--model", embedder.model, "--plan", bundle)
    said = embedder.run("batch", *options, expect=1).stderr
    assert "executables taken" in said and "compile [" not in said
    assert answers(output) == answers(source.with_name("out.jsonl"))


def test_the_planner_writes_the_plan_that_such_a_job_derives(embedder, source, job, tmp_path):
    path, output = tmp_path / "plan.toml", tmp_path / "out.jsonl"
    options = ("--model", embedder.model, "--workload", source, "-o", path, "--dtype", "float32")
    said = embedder.run_here("plan", *options)
    derived = tomllib.loads(job[1]["plan"])
    assert tomllib.loads(path.read_text()) == derived
    longest, texts = derived["buckets"]["prefill"][-1]
    assert f"{longest}x{texts} (tokens x texts)" in said and "4 rows refused" in said
    _, manifest = embedder.batch(source, output, "--plan", path, expect=1)
    assert manifest["plan"] == job[1]["plan"]
    assert answers(output) == answers(source.with_name("out.jsonl"))
    layout = tmp_path / "mine.toml"
    layout.write_text('[mesh]\ndata = 1\n[rules]\nbatch = "dat"\n')
    assert "the mesh has no axis 'dat'" in embedder.refuse("plan", *options, "--layout", layout)
    said = embedder.refuse("plan", *options, "--chunks", "always")
    assert "--chunks: expected none for vectors of texts" in said


def test_rows_of_two_kinds_or_a_plan_of_another_kind_are_refused(embedder, noria, job, tmp_path):
    tokens = {"prompt": [3, 4, 5], "max_tokens": 2}
    mixed = write_lines(tmp_path / "mixed.jsonl", [tokens, {"input": [3, 4]}])
    options = ("-o", tmp_path / "out.jsonl", "--model", embedder.model)
    said = embedder.refuse("batch", "-i", mixed, *options)
    assert "got 1 of 2 rows" in said and "run them as two jobs" in said
    (tmp_path / "plan.toml").write_text(job[1]["plan"])
    alone = write_lines(tmp_path / "tokens.jsonl", [tokens])
    options = (*options, "--plan", tmp_path / "plan.toml", "--restart")
    said = embedder.refuse("batch", "-i", alone, *options)
    assert "plan buckets.embed: expected false" in said


def test_such_a_job_runs_under_a_layout(embedder, source, job, tmp_path):
    layout = ("--target", "cpu:4", "--layout", "data-tensor@data=2,tensor=2")
    rows, _ = embedder.batch(source, tmp_path / "out.jsonl", *layout, expect=1)
    for row in rows:
        if row["custom_id"].startswith("ids"):
            expected = vectors(job[0][row["custom_id"]])
            np.testing.assert_allclose(vectors(row["response"]["body"]), expected, atol=1e-4)


def test_options_that_vectors_do_not_have_are_refused(embedder):
    options = {"structured_outputs": [StructuredOutputsParams(regex="a")], "max_model_len": 64}
    with pytest.raises(ValueError, match="expected none for vectors of texts"):
        LLM(model=str(embedder.model), runner="pooling", **options)


def test_python_gives_the_same_vectors(embedder, job):
    with LLM(model=str(embedder.model), runner="pooling", dtype="float32", max_model_len=64) as llm:
        (output,) = llm.embed(TEXT[0])
        expected = vectors(job[0]["text"])[0]
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-5)
        assert output.outputs.hidden_size == EMBED
        short, other = llm.embed([TEXT[0], {"prompt_token_ids": IDS[0]}], dimensions=5)
        assert short.outputs.embedding.shape == (5,) and other.prompt_token_ids == IDS[0]
        with pytest.raises(ValueError, match="Call embed"):
            llm.generate(TEXT[0])
        for dimensions in (33, 0, -1, True):
            with pytest.raises(RowError, match="expected a number from 1 to 32"):
                llm.embed(TEXT[0], dimensions=dimensions)
        with pytest.raises(RowError, match="64"):
            llm.embed([IDS[0] * 10])
