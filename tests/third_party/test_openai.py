"""Output lines of jobs, parsed by the types of the package openai."""

import pytest
from command import chat, completion, write_lines

openai_types = pytest.importorskip("openai.types", reason="needs openai")

pytestmark = pytest.mark.third_party
FORM = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"enum": ["a", "b"]}}}
ROWS = [
    chat("plain", "wheel", max_tokens=4),
    chat("logprobs", "wheel", max_tokens=4, logprobs=True, top_logprobs=2),
    chat("samples", "wheel", max_tokens=4, n=3, temperature=0.7, seed=1),
    chat("form", "wheel", max_tokens=8, response_format=FORM),
    completion("text", "the water wheel", max_tokens=4, logprobs=2),
    completion("score", "the water wheel", max_tokens=0, echo=True, logprobs=1),
    completion("stop", "the water wheel", max_tokens=9, stop=["e"]),
    completion("bad", "x", top_p=7),
    chat("long", "wheel " * 400, max_tokens=4),
]


def test_every_answer_is_of_the_published_types(noria, tmp_path):
    from openai.types import Completion
    from openai.types.chat import ChatCompletion
    from openai.types.shared import ErrorObject

    rows, _ = noria.batch(
        write_lines(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl", expect=1
    )
    assert len(rows) == len(ROWS)
    answered = 0
    for asked, row in zip(ROWS, rows, strict=True):
        if row["error"] is not None or "error" in row["response"]["body"]:
            error = row["error"] or row["response"]["body"]["error"]
            ErrorObject.model_validate({"type": "", "param": None, **error}, strict=True)
            continue
        body = row["response"]["body"]
        kind = ChatCompletion if asked["url"].endswith("chat/completions") else Completion
        if asked["body"].get("echo"):
            # as in OpenAI's own answers, the first token has none; the types do not say so
            logprobs = body["choices"][0]["logprobs"]
            assert logprobs["token_logprobs"].pop(0) is logprobs["top_logprobs"].pop(0) is None
        parsed = kind.model_validate(body, strict=True)
        assert len(parsed.choices) == len(body["choices"])
        answered += 1
    assert answered == len(ROWS) - 2
