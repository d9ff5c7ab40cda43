"""The columns of a table become requests, and carried cells stay with their rows."""

import csv
import datetime
import decimal
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
from fake_model import FakeModel, masked, run, settings
from faulty_disk import Crash, FaultyDisk

from noria.runtime.batch.merge import merge
from noria.runtime.batch.run import run_job
from noria.runtime.errors import InputError, UnusableFile
from noria.runtime.progress.progress import Progress
from noria.runtime.rows.columns import Columns
from noria.runtime.rows.part import Part
from noria.runtime.rows.row_files import open_rows

QUIET = Progress(is_quiet=True)
VARIABLES = Columns(are_variables=True)


def write(path: Path, columns: Mapping[str, Sequence[Any]]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table(columns), path)
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    return path


def requests(path: Path, columns: Columns) -> list[dict[str, Any]]:
    """The requests of a table, without their methods."""
    with open_rows(path, columns, path.parent, note=lambda message: None) as rows:
        records = [json.loads(line) for line in rows.file]
    assert {record.pop("method") for record in records} == {"POST"}
    return records


CHAT, TEXT = [{"role": "user", "content": "a"}], "a"
CELLS = {"prompt": [TEXT], "input": [TEXT], "text": [TEXT], "text_1": [TEXT], "text_2": ["b"]}


@pytest.mark.parametrize(
    ("columns", "url", "body"),
    [
        (Columns(), "completions", {"prompt": TEXT}),
        (Columns(("input",), generates=False), "embeddings", {"input": TEXT}),
        (Columns(("text_1", "text_2")), "score", {"text_1": TEXT, "text_2": "b"}),
        (Columns(("text",)), "completions", {"prompt": TEXT}),
        (Columns(("text",), url="/v1/embeddings"), "embeddings", {"input": TEXT}),
        (Columns(("text",), url="/v1/chat/completions"), "chat/completions", {"messages": CHAT}),
        (Columns(url="/v1/classify"), "classify", {"input": TEXT}),
        (
            Columns(("text", "text_2"), url="/v1/rerank"),
            "rerank",
            {"query": TEXT, "documents": "b"},
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_columns_are_the_contents_of_requests(tmp_path, suffix, columns, url, body):
    path = write(tmp_path / f"in.{suffix}", CELLS)
    expected = {"custom_id": "row-0", "url": f"/v1/{url}", "body": body}
    assert requests(path, columns) == [expected]


@pytest.mark.parametrize(
    ("names", "url"),
    [
        (("messages",), "chat/completions"),
        (("text_2", "text_1"), "score"),
        (("documents", "query"), "rerank"),
    ],
)
def test_usual_names_need_no_option(tmp_path, names, url):
    path = write(tmp_path / "in.csv", {name: ["a"] for name in names})
    assert [row["url"] for row in requests(path, Columns())] == [f"/v1/{url}"]


def test_inputs_are_for_vectors_only_if_the_model_generates_nothing(tmp_path):
    path = write(tmp_path / "in.csv", {"input": ["a"], "output": ["b"]})
    for columns in (Columns(generates=False), Columns(("input",), generates=False)):
        assert [row["url"] for row in requests(path, columns)] == ["/v1/embeddings"]
    assert [row["url"] for row in requests(path, Columns(("input",)))] == ["/v1/completions"]
    with pytest.raises(InputError, match="expected a column 'prompt', got input, output"):
        requests(path, Columns())


def test_ids_are_texts_and_rows_without_an_id_are_numbered(tmp_path):
    path = write(tmp_path / "in.parquet", {"key": [7, None, 8], "prompt": ["a"] * 3})
    ids = [row["custom_id"] for row in requests(path, Columns(id="key"))]
    assert ids == ["7", "row-1", "8"]
    said = []
    with open_rows(path, Columns(), tmp_path, note=said.append):
        pass
    assert "in.parquet: ids are row numbers; --id-column names a column of ids" in said


def test_templates_see_the_cells_of_all_columns_that_have_a_form_in_json(tmp_path):
    day = datetime.date(2026, 1, 31)
    cells = {
        "id": ["a", "b"],
        "day": [day, None],
        "at": [datetime.datetime(2026, 1, 31, 12), None],
        "price": [decimal.Decimal("1.50"), None],
        "count": [3.0, float("nan")],
        "tags": [["x"], None],
        "person": [{"name": "n", "born": day}, None],
        "image": [b"\xff", None],
    }
    path, said = write(tmp_path / "in.parquet", cells), []
    with open_rows(path, VARIABLES, tmp_path, note=said.append) as rows:
        first, second = (json.loads(line) for line in rows.file)
    assert said == ["in.parquet: columns that are not read: image"]
    assert first["custom_id"] == "a"
    assert first["body"] == {
        "id": "a",
        "day": "2026-01-31",
        "at": "2026-01-31T12:00:00",
        "price": "1.50",
        "count": 3,
        "tags": ["x"],
        "person": {"name": "n", "born": "2026-01-31"},
    }
    assert second["body"] == dict.fromkeys(first["body"]) | {"id": "b"}


@pytest.mark.parametrize(
    ("cells", "columns", "message"),
    [
        ({"text": ["a"]}, Columns(), "expected a column 'prompt', got text"),
        ({"text_1": ["a"]}, Columns(url="/v1/score"), "expected a column 'text_2', got text_1"),
        ({"a": ["a"]}, Columns(("b",)), "expected one column 'b', got 0 of it among a"),
        ({"prompt": ["a"]}, Columns(id="b"), "one column 'b', got 0 .* with --id-column"),
        ({"prompt": ["a"]}, Columns(carried={"x": "b"}), "column 'b', got 0 .* with --carry"),
        ({"a": ["a"]}, Columns(("a",), url="/v1/score"), "--prompt-column 2 times for /v1/score"),
        ({"prompt": [["a"]]}, Columns(), "column prompt: expected one text .* list<"),
        (
            {"tags": [["a"]]},
            Columns(("tags",), url="/v1/chat/completions"),
            "column tags: expected one text in each row for messages",
        ),
        (
            {"prompt": ["a"], "image": [b"a"]},
            Columns(carried={"image": "image"}),
            "--carry image: expected texts, .* got the type binary",
        ),
        ({"prompt": ["a"], "b": [float("inf")]}, Columns(carried={"b": "b"}), "row 1: .* finite"),
    ],
)
def test_a_table_without_the_columns_of_its_job_is_refused(tmp_path, cells, columns, message):
    path, model = write(tmp_path / "in.parquet", cells), FakeModel()
    with pytest.raises(InputError, match=message):
        run(path, tmp_path / "out.jsonl", model, columns=columns)
    assert not model.num_builds and [*tmp_path.iterdir()] == [path]


def test_columns_of_templates_have_names_of_their_own(tmp_path):
    (tmp_path / "in.csv").write_text("a,b,a\n1,2,3\n")
    with pytest.raises(InputError, match=r"got 'a' 2 times. Rename one"):
        requests(tmp_path / "in.csv", VARIABLES)


TABLE = {
    "id": ["a", "b", "a", "d", "e"],
    "prompt": ["one", "", "two", "nan", "three"],
    "label": [1, 2, 3, None, 5],
}
CARRIED = {
    "columns": Columns(carried={"gold": "label"}),
    "configuration": {"carried": '{"gold":0}'},
}


def gold(output: Path) -> list[Any]:
    return [json.loads(line)["carried"]["gold"] for line in output.read_text().splitlines()]


def test_rows_with_and_without_errors_have_their_carried_cells(tmp_path):
    source, output = write(tmp_path / "in.parquet", TABLE), tmp_path / "out.jsonl"
    assert run(source, output, **CARRIED) == 1
    assert gold(output) == TABLE["label"]
    errors, rows = tmp_path / "errors.jsonl", tmp_path / "rows.jsonl"
    run(source, rows, error_file=errors, **CARRIED)
    assert gold(rows) == [1, 5] and gold(errors) == [2, 3, None]


def test_carried_cells_are_columns_of_a_table_after_stops_and_in_parts(tmp_path):
    source, whole = write(tmp_path / "in.parquet", TABLE), tmp_path / "whole.parquet"
    counter = FaultyDisk(0)
    run(source, whole, disk=counter, **CARRIED)
    expected = [without_line(row) for row in parquet.read_table(whole).to_pylist()]
    assert [row["gold"] for row in expected] == TABLE["label"]
    assert parquet.read_schema(whole).names[:3] == ["custom_id", "gold", "text"]
    for at in range(1, counter.calls, 5):
        output = tmp_path / f"{at}.parquet"
        with pytest.raises(Crash):
            run(source, output, disk=FaultyDisk(at, Crash()), **CARRIED)
        run(source, output, **CARRIED)
        assert [without_line(row) for row in parquet.read_table(output).to_pylist()] == expected
    parts = [tmp_path / f"part{i}.jsonl" for i in range(2)]
    for i, part in enumerate(parts):
        run(source, part, part=Part(i, 2), **CARRIED)
    merge(parts, tmp_path / "merged.parquet", progress=QUIET)
    merged = parquet.read_table(tmp_path / "merged.parquet")
    assert [without_line(row) for row in merged.to_pylist()] == expected


def without_line(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "line"}


def test_an_update_takes_new_carried_cells_and_computes_nothing_again(tmp_path):
    source, output = write(tmp_path / "in.parquet", TABLE), tmp_path / "out.jsonl"
    run(source, output, **CARRIED)
    before = masked(output)
    write(source, TABLE | {"label": [6, 7, 8, 9, 10]})
    model = FakeModel()
    run(source, output, model, updates=True, **CARRIED)
    assert gold(output) == [6, 7, 8, 9, 10] and not model.generator.submitted
    write(source, TABLE)
    run(source, output, model, updates=True, **CARRIED)
    assert masked(output) == before


@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        ({"carried": '{"text": "text"}'}, "several for 'text'.* --carry COLUMN=NAME"),
        ({"form": '{"guided_json": {"properties": {"text": {}}}}'}, "'text'.* Rename the key"),
        (
            {"carried": '{"mood": "m"}', "form": '{"guided_json": {"properties": {"mood": {}}}}'},
            "several for 'mood'.* --carry COLUMN=NAME",
        ),
    ],
)
def test_columns_of_an_output_with_one_name_are_refused(tmp_path, configuration, message):
    source, model = write(tmp_path / "in.parquet", TABLE), FakeModel()
    with pytest.raises(UnusableFile, match=message):
        run(source, tmp_path / "out.parquet", model, configuration=configuration)
    assert not model.num_texts
    # lines have no columns
    assert run(source, tmp_path / "out.jsonl", configuration=configuration) == 1
    parts = [tmp_path / "part.jsonl"]
    run(source, parts[0], part=Part(0, 1), configuration=configuration)
    with pytest.raises(UnusableFile, match=message):
        merge(parts, tmp_path / "merged.parquet", progress=QUIET)


def test_messages_say_which_columns_are_not_read(tmp_path):
    source, said = write(tmp_path / "in.parquet", TABLE), io.StringIO()
    job = settings(source, tmp_path / "out.jsonl")
    run_job(job, FakeModel(), progress=Progress(stream=said))
    assert "columns that are not read: label" in said.getvalue()
    assert "row numbers" not in said.getvalue()
