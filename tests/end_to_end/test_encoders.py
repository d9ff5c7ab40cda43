"""Jobs with encoders from text to answer: vectors, classes and scores are those of transformers."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from command import Noria, write_lines
from embedder_cases import CLASSIFIER, EmbedderCase, reference_model, write_modules
from tolerances import FLOAT32_ELEMENTWISE
from word_pieces import WORDS, write_word_pieces

from noria.runtime import LLM

pytestmark = pytest.mark.reference

TEXTS = ["the water", "the wheels turn driven by the stream", "stone", "water wheel", ""]
EMBEDDER = EmbedderCase("minilm", "bert", "mean", {"vocab_size": len(WORDS)})
CLASSES = {"id2label": {0: "dry", 1: "wet", 2: "both"}, "label2id": {"dry": 0, "wet": 1, "both": 2}}


class Encoder:
    """A model on disk with a tokenizer, and the model of transformers."""

    def __init__(self, noria: Noria, directory, case: EmbedderCase):
        self.model = reference_model(case)
        self.model.save_pretrained(directory)
        self.tokenizer = write_word_pieces(directory)
        if case.architecture != CLASSIFIER:
            write_modules(directory, case)
        self.noria = Noria(noria.environment, directory, noria.servers)

    def outputs(self, *texts: str) -> np.ndarray:
        """Return the normed mean of the states of a text, or the outputs for a text or a pair."""
        import torch

        encoding = self.tokenizer.encode(*texts)
        ids, types = (torch.tensor([x]) for x in (encoding.ids, encoding.type_ids))
        with torch.no_grad():
            found = self.model(ids, token_type_ids=types)
        if hasattr(found, "logits"):
            return found.logits[0].numpy()
        vector = found.last_hidden_state[0].numpy().mean(axis=0)
        return vector / np.linalg.norm(vector)

    def answers(self, folder, rows, *options, expect: int = 0):
        source = write_lines(folder / "in.jsonl", rows)
        found, _ = self.noria.batch(source, folder / "out.jsonl", *options, expect=expect)
        return [row["response"]["body"] for row in found]


def row(number: int, url: str, **body):
    return {"custom_id": f"row {number}", "method": "POST", "url": url, "body": body}


def assert_close(ours, expected) -> None:
    np.testing.assert_allclose(ours, expected, rtol=0, atol=FLOAT32_ELEMENTWISE)


@pytest.fixture(scope="module")
def embedder(noria, tmp_path_factory) -> Encoder:
    return Encoder(noria, tmp_path_factory.mktemp("minilm"), EMBEDDER)


def test_long_texts_are_cut_as_in_sentence_transformers_or_refused(embedder, noria, tmp_path):
    limited = tmp_path / "limited"
    shutil.copytree(embedder.noria.model, limited)
    (limited / "sentence_bert_config.json").write_text('{"max_seq_length": 5}')
    cut = replace(embedder.noria, model=limited)
    source = write_lines(tmp_path / "in.jsonl", [row(0, "/v1/embeddings", input=TEXTS)])
    rows, manifest = cut.batch(source, tmp_path / "out.jsonl")
    num_cut = len(embedder.tokenizer.encode(TEXTS[1]).ids) - 5
    embedder.tokenizer.enable_truncation(5)
    try:
        for text, item in zip(TEXTS, rows[0]["response"]["body"]["data"], strict=True):
            assert_close(item["embedding"], embedder.outputs(text))
    finally:
        embedder.tokenizer.no_truncation()
    assert (manifest["texts_cut"], manifest["prompt_tokens_cut"]) == (1, num_cut)
    rows, _ = cut.batch(source, tmp_path / "strict.jsonl", "--strict-length", expect=1)
    message = rows[0]["response"]["body"]["error"]["message"]
    assert message.startswith("input[1]: expected at most 5 tokens, the max_seq_length")
    with LLM(str(limited), max_model_len=16, runner="pooling", dtype="float32") as llm:
        assert len(llm.embed(TEXTS[1])[0].prompt_token_ids) == 5


@pytest.fixture(scope="module")
def reranker(noria, tmp_path_factory) -> Encoder:
    options = {"vocab_size": len(WORDS), "num_labels": 1}
    case = EmbedderCase("reranker", "bert", "", options, architecture=CLASSIFIER)
    return Encoder(noria, tmp_path_factory.mktemp("reranker"), case)


@pytest.fixture(scope="module")
def classifier(noria, tmp_path_factory) -> Encoder:
    options = {"vocab_size": len(WORDS), **CLASSES}
    case = EmbedderCase("classifier", "bert", "", options, architecture=CLASSIFIER)
    return Encoder(noria, tmp_path_factory.mktemp("classifier"), case)


@pytest.mark.parametrize("layout", [(), ("--target", "cpu:2", "--layout", "data-parallel@data=2")])
def test_vectors_of_texts_are_those_of_transformers(embedder, tmp_path, layout):
    body = embedder.answers(tmp_path, [row(0, "/v1/embeddings", input=TEXTS)], *layout)[0]
    for text, item in zip(TEXTS, body["data"], strict=True):
        assert_close(item["embedding"], embedder.outputs(text))
    num_tokens = sum(len(embedder.tokenizer.encode(text).ids) for text in TEXTS)
    assert body["usage"]["prompt_tokens"] == num_tokens


def test_python_opens_an_encoder_for_vectors_without_being_asked(embedder):
    with LLM(model=str(embedder.noria.model), dtype="float32") as llm:
        outputs = llm.embed(TEXTS[:2])
    for text, output in zip(TEXTS, outputs, strict=False):
        assert_close(output.outputs.embedding, embedder.outputs(text))


TOKENS = [
    {"prompt": [4, 5], "max_tokens": 2},
    {"prompt": "water", "max_tokens": 0, "echo": True, "logprobs": 1},
    {"messages": [{"role": "user", "content": "water"}]},
]


def test_rows_that_generate_are_error_rows_of_an_encoder(embedder, reranker, tmp_path):
    def refusal(body) -> str:
        assert body["error"]["code"] == "invalid_request" and body["error"]["param"] == "url"
        return body["error"]["message"]

    for rows in ([TOKENS[0], {"input": TEXTS[0]}, *TOKENS[1:]], TOKENS):
        folder = tmp_path / str(len(rows))
        folder.mkdir()
        answers = embedder.answers(folder, rows, expect=1)
        assert len(answers) == len(rows)
        for line, body in zip(rows, answers, strict=True):
            if "input" in line:
                assert_close(body["data"][0]["embedding"], embedder.outputs(TEXTS[0]))
            else:
                said = refusal(body)
                assert "generates no tokens (it has no output head)" in said
                assert "Ask for /v1/embeddings" in said
    (body,) = reranker.answers(tmp_path, TOKENS[:1], expect=1)
    assert "Ask for /v1/classify" in refusal(body)


def test_a_plan_of_an_encoder_has_no_rows_that_generate(embedder, classifier, tmp_path):
    workload = write_lines(tmp_path / "tokens.jsonl", TOKENS)
    for encoder, url in ((embedder, "/v1/embeddings"), (classifier, "/v1/classify")):
        options = ("--model", encoder.noria.model, "--workload", workload)
        said = encoder.noria.refuse("plan", *options, "-o", tmp_path / "plan.toml", expect=3)
        assert "expected a model that generates tokens" in said and f"Give {url} rows" in said


def test_scores_of_pairs_are_the_probabilities_of_a_cross_encoder(reranker, tmp_path):
    def score(first: str, second: str) -> float:
        return float(1 / (1 + np.exp(-reranker.outputs(first, second)[0])))

    rows = [
        row(0, "/v1/score", text_1=TEXTS[0], text_2=TEXTS[1:4]),
        row(1, "/v1/score", text_1=TEXTS[:2], text_2=TEXTS[2:4], use_activation=False),
        row(2, "/v1/rerank", query=TEXTS[3], documents=TEXTS[:3]),
        row(3, "/v1/embeddings", input=TEXTS[0]),
    ]
    one, each, ranked, refused = reranker.answers(tmp_path, rows, expect=1)
    expected = [score(TEXTS[0], text) for text in TEXTS[1:4]]
    assert_close([item["score"] for item in one["data"]], expected)
    expected = [reranker.outputs(*pair)[0] for pair in zip(TEXTS[:2], TEXTS[2:4], strict=True)]
    assert_close([item["score"] for item in each["data"]], expected)
    scores = [score(TEXTS[3], text) for text in TEXTS[:3]]
    order = sorted(range(3), key=lambda i: -scores[i])
    assert [item["index"] for item in ranked["results"]] == order
    found = [item["relevance_score"] for item in ranked["results"]]
    assert_close(found, [scores[i] for i in order])
    assert "got a classifier" in refused["error"]["message"]


def test_classes_have_their_names_and_probabilities(classifier, tmp_path):
    rows = [
        row(0, "/v1/classify", input=TEXTS),
        row(1, "/v1/classify", input=TEXTS[0], use_activation=False),
        row(2, "/v1/score", text_1=TEXTS[0], text_2=TEXTS[1]),
    ]
    whole, plain, refused = classifier.answers(tmp_path, rows, expect=1)
    for text, item in zip(TEXTS, whole["data"], strict=True):
        exponentials = np.exp(classifier.outputs(text))
        assert_close(item["probs"], exponentials / exponentials.sum())
        best = int(np.argmax(item["probs"]))
        assert item["label"] == ["dry", "wet", "both"][best] and item["num_classes"] == 3
    assert_close(plain["data"][0]["probs"], classifier.outputs(TEXTS[0]))
    assert "one class for scores, got 3" in refused["error"]["message"]
