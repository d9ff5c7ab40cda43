"""Print a finished batch file as text: each question with its answer or its error.

python scripts/show_answers.py in.jsonl out.jsonl
"""

import json
import sys
from pathlib import Path


def main() -> None:
    questions, answers = (_rows(Path(name)) for name in sys.argv[1:3])
    for custom_id, line in questions.items():
        print(f"\n{_question(line['body'])}")
        print(f"    {_answer(answers[custom_id])}")


def _rows(path: Path) -> dict[str, dict]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return {row["custom_id"]: row for row in map(json.loads, lines)}


def _question(body: dict) -> str:
    return body["messages"][-1]["content"] if "messages" in body else str(body["prompt"])


def _answer(row: dict) -> str:
    error = row["error"] or row["response"]["body"].get("error")
    if error:
        return f"error {error['code']}: {error['message']}"
    choice = row["response"]["body"]["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    unfinished = " ..." if choice["finish_reason"] == "length" else ""
    return text.strip().replace("\n", "\n    ") + unfinished


if __name__ == "__main__":
    main()
