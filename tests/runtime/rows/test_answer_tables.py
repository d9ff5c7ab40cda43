"""Parquet outputs have columns for the parts of answers, with types that fit all values."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from noria.runtime.rows.answer_tables import AddedColumns
from noria.runtime.rows.row_files import encoded

VECTOR = [0.5, -1.25]


def line(body: dict[str, Any] | None, **others: Any) -> bytes:
    response = {"status_code": 200, "request_id": "r", "body": body}
    record = {"id": "i", "custom_id": "a", "response": response, "error": None, **others}
    return json.dumps(record).encode() + b"\n"


def chat(text: str | None, **others: Any) -> bytes:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    choice = {"index": 0, "message": {"content": text}, "finish_reason": "stop", "logprobs": None}
    return line({"choices": [choice], "usage": usage}, **others)


def table_of(path: Path, lines: list[bytes], added: AddedColumns) -> pyarrow.Table:
    path.write_bytes(b"".join(encoded(path, lambda: iter(lines), added)))
    return parquet.read_table(path)


def test_parts_of_answers_of_every_kind_are_columns(tmp_path):
    packed = base64.b64encode(struct.pack("<2f", *VECTOR)).decode()
    completion = {"text": "x", "logprobs": {"token_logprobs": [None, -0.5]}}
    tokens = {"message": {"content": "y"}, "logprobs": {"content": [{"logprob": -2.0}]}}
    items = {
        "text": chat("hello"),
        "score": line({"choices": [completion]}),
        "chat": line({"choices": [tokens]}),
        "vector": line({"data": [{"embedding": VECTOR}, {"embedding": [0, 0]}]}),
        "packed": line({"data": [{"embedding": packed}]}),
        "pairs": line({"data": [{"score": 0.25}, {"score": 0.5}]}),
        "ranked": line({"results": [{"index": 1, "relevance_score": 0.75}]}),
        "classes": line({"data": [{"label": "x", "probs": [0.25, 0.75]}]}),
        "error": line({"error": {"code": "empty_prompt", "message": "none"}}),
    }
    table = table_of(tmp_path / "a.parquet", [*items.values()], AddedColumns())
    rows = dict(zip(items, table.to_pylist(), strict=True))
    assert rows["text"]["text"] == "hello" and rows["text"]["completion_tokens"] == 2
    assert rows["score"]["token_logprobs"] == [None, -0.5]
    assert rows["chat"]["token_logprobs"] == [-2.0]
    assert rows["vector"]["embedding"] == rows["packed"]["embedding"] == VECTOR
    scores = [rows[name]["scores"] for name in ("pairs", "ranked", "classes", "text")]
    assert scores == [[0.25, 0.5], [0.75], [0.25, 0.75], None]
    assert rows["error"]["error_code"] == "empty_prompt"
    for name in ("token_logprobs", "embedding", "scores"):
        assert table.schema.field(name).type == pyarrow.list_(pyarrow.float32())


@pytest.mark.parametrize(
    ("values", "arrow_type", "expected"),
    [
        ([1, None, 2], pyarrow.int64(), [1, None, 2]),
        ([1, 2.5], pyarrow.float64(), [1.0, 2.5]),
        ([True, False], pyarrow.bool_(), [True, False]),
        (["a", None], pyarrow.string(), ["a", None]),
        ([None, None], pyarrow.string(), [None, None]),
        ([["a"], [], None], pyarrow.list_(pyarrow.string()), [["a"], [], None]),
        ([[1], [2.5]], pyarrow.list_(pyarrow.float64()), [[1.0], [2.5]]),
        ([1, "a", [2]], pyarrow.string(), ["1", "a", "[2]"]),
        ([1, True], pyarrow.string(), ["1", "true"]),
        ([{"é": 1}, None], pyarrow.string(), ['{"é": 1}', None]),
        ([[{"a": 1}], ["b"]], pyarrow.list_(pyarrow.string()), [['{"a": 1}'], ["b"]]),
        ([2**63, 1], pyarrow.string(), [str(2**63), "1"]),
        ([-(2**63)], pyarrow.int64(), [-(2**63)]),
    ],
)
def test_a_column_has_the_type_of_all_its_values(tmp_path, values, arrow_type, expected):
    lines = [chat(json.dumps({"f": v}), carried={"c": v}) for v in values]
    table = table_of(tmp_path / "a.parquet", lines, AddedColumns(("c",), ("f",)))
    for name in ("c", "f"):
        assert table.schema.field(name).type == arrow_type
        assert table.column(name).to_pylist() == expected
    assert table.schema.names[:4] == ["custom_id", "c", "text", "f"]


def test_answers_that_are_no_objects_have_no_fields(tmp_path):
    lines = [chat(text, carried={}) for text in ('{"f": "x"}', "[1]", "no json", "", None)]
    lines.append(line({"error": {"code": "c", "message": "m"}}))
    table = table_of(tmp_path / "a.parquet", lines, AddedColumns((), ("f", "g")))
    assert table.column("f").to_pylist() == ["x", None, None, None, None, None]
    assert table.column("g").to_pylist() == [None] * 6


def test_columns_are_those_of_the_form_of_the_last_stage(tmp_path):
    schema = {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"b": {}, "a": {}}}}}
    form = {"structured_outputs": {"json": schema}}
    assert AddedColumns.of({"form": json.dumps(form)}).fields == ("b", "a")
    stages = [{"name": "x", **form}, {"name": "y", "guided_json": {"properties": {"c": {}}}}]
    pipeline = {"pipeline": json.dumps({"stages": stages}), "carried": '{"d": "e"}'}
    assert AddedColumns.of(pipeline) == AddedColumns(("d",), ("c",))
    for other in ({"guided_choice": ["a"]}, {"guided_json": {"$ref": "#"}}, {"guided_json": True}):
        assert AddedColumns.of({"form": json.dumps(other)}) == AddedColumns()
