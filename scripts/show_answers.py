"""Print a finished batch file as text: each question with its answer or its error.

python scripts/show_answers.py in.jsonl out.jsonl
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main() -> None:
    questions = dict(_questions(Path(sys.argv[1])))
    for line in _lines(Path(sys.argv[2])):
        answer = json.loads(line)
        print(f"\n{questions.get(answer['custom_id'], 'a line without an id')}")
        print(f"    {_answer(answer)}")


def _lines(path: Path) -> Iterator[str]:
    # JSON Lines end with \n alone; splitlines would also split at U+2028 in a text
    return filter(str.strip, path.read_text(encoding="utf-8-sig").split("\n"))


def _questions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the id and the question of each line that can be read, in a body or without one."""
    for number, text in enumerate(_lines(path)):
        try:
            line = json.loads(text)
            body = line.get("body", line)
        except (ValueError, AttributeError):
            continue
        named = [line[key] for key in ("custom_id", "id") if line.get(key) is not None]
        yield str(*named[:1]) or f"row-{number}", _question(body)


def _question(body: Any) -> str:
    match body:
        case {"messages": [*_, {"content": content}]} | {"prompt": content} | {"input": content}:
            return content if isinstance(content, str) else _json(content)
    return _json(body)


def _answer(row: dict) -> str:
    body = (row["response"] or {}).get("body", {})
    if error := row["error"] or body.get("error"):
        return f"error {error['code']}: {error['message']}"
    if not body.get("choices"):
        return _json(body.get("data", body))[:200]
    choice = body["choices"][0]
    message = choice.get("message") or {"content": choice.get("text")}
    text = message["content"]
    if text is None:
        text = _json(message.get("tool_calls"))
    unfinished = " ..." if choice["finish_reason"] == "length" else ""
    return text.strip().replace("\n", "\n    ") + unfinished


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    main()
