"""The answers of a batch file as text: lines of every form, and answers without text."""

import json
import sys

from numerics_helpers import script


def test_lines_of_every_form_are_shown_with_their_answers(tmp_path, monkeypatch, capsys):
    lines = [
        '{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "Why\u2028?"}]}}',
        "",
        '{"prompt": "The wheel"}',
        '{"id": 7, "prompt": [5, 6]}',
        "{",
        '{"input": "a text"}',
    ]

    def answer(custom_id, body=None, error=None):
        return {"custom_id": custom_id, "response": body and {"body": body}, "error": error}

    calls = [{"function": {"name": "f"}}]
    message = {"content": None, "tool_calls": calls}
    refused = {"code": "invalid_json", "message": "no"}
    answers = [
        answer("a", {"choices": [{"message": message, "finish_reason": "tool_calls"}]}),
        answer("row-1", {"choices": [{"text": " turns\nfast", "finish_reason": "length"}]}),
        answer("7", {"error": {"code": "nonfinite_logits", "message": "NaN"}}),
        answer(None, error=refused),
        answer("row-4", {"data": [{"embedding": [0.5]}]}),
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    (tmp_path / "out.jsonl").write_text("\n".join(map(json.dumps, answers)))
    paths = [str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")]
    monkeypatch.setattr(sys, "argv", ["show_answers.py", *paths])
    script("scripts/show_answers.py").main()
    assert capsys.readouterr().out.split("\n\n") == [
        f"\nWhy\u2028?\n    {json.dumps(calls)}",
        "The wheel\n    turns\n    fast ...",
        "[5, 6]\n    error nonfinite_logits: NaN",
        "a line without an id\n    error invalid_json: no",
        'a text\n    [{"embedding": [0.5]}]\n',
    ]
