"""Inputs and outputs in other formats than plain lines have the same rows."""

import csv
import gzip
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet as parquet
import pytest
import zstandard
from fake_model import FakeModel, masked, run, settings, write_input
from faulty_disk import Crash, FaultyDisk

from noria.runtime.batch.merge import merge
from noria.runtime.batch.run import run_job
from noria.runtime.errors import InputError, UnusableFile
from noria.runtime.files import compression
from noria.runtime.files.disk import digest_file
from noria.runtime.progress.progress import Progress
from noria.runtime.rows import row_files
from noria.runtime.rows.answer_tables import AddedColumns
from noria.runtime.rows.columns import Columns
from noria.runtime.rows.part import Part
from noria.runtime.rows.results import error_of_line
from noria.runtime.rows.row_files import encoded, open_rows, output_lines, table_of

QUIET = Progress(is_quiet=True)
PROMPTS = ['say "hello", twice', "two\nlines", "é\u2028ü", "nan", "plain"] * 5
DEFAULT_COLUMNS = Columns()
COMPRESS = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def write_csv(path: Path, delimiter: str = ",") -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow(["label", "id", "prompt"])
    writer.writerows([i % 2, f"q{i}", prompt] for i, prompt in enumerate(PROMPTS))
    content = b"\xef\xbb\xbf" + text.getvalue().encode()
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(content))


def write_parquet(path: Path, **columns) -> None:
    table = {"id": [f"q{i}" for i in range(len(PROMPTS))], "prompt": PROMPTS, "label": PROMPTS}
    # several groups of rows
    parquet.write_table(pyarrow.table(table | columns), path, row_group_size=7)


TABLES = {
    "in.csv": write_csv,
    "in.csv.gz": write_csv,
    "in.tsv": lambda path: write_csv(path, "\t"),
    "in.parquet": write_parquet,
}


def lines_of(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        return list(output_lines(path, file))


def rows_of(path: Path, columns: Columns = DEFAULT_COLUMNS) -> list[dict[str, object]]:
    """The ids and the bodies of the requests into which an input is converted."""
    with open_rows(path, columns, path.parent, note=lambda message: None) as rows:
        records = [json.loads(line) for line in rows.file]
    return [{"id": record["custom_id"], **record["body"]} for record in records]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_the_answers_of_its_prompts_as_lines(tmp_path, name):
    rows = [{"id": f"q{i}", "prompt": prompt} for i, prompt in enumerate(PROMPTS)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    TABLES[name](tmp_path / name)
    run(tmp_path / "in.jsonl", tmp_path / "lines.jsonl")
    said = io.StringIO()
    job = settings(tmp_path / name, tmp_path / "out.jsonl")
    assert run_job(job, FakeModel(), progress=Progress(stream=said)) == 1
    assert masked(tmp_path / "out.jsonl") == masked(tmp_path / "lines.jsonl")
    assert "columns that are not read: label" in said.getvalue()
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["input"]["name"] == name and manifest["input"]["rows"] == len(PROMPTS)
    # the fingerprint is that of the table, so a finished job is known without reading its rows
    assert manifest["input"]["sha256"] == digest_file(tmp_path / name).sha256
    model = FakeModel()
    assert run(tmp_path / name, tmp_path / "out.jsonl", model) == 1
    assert not model.num_texts


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_lines_have_the_same_answers_after_every_stop(tmp_path, suffix):
    source = write_input(tmp_path / "in.jsonl")
    packed = tmp_path / f"in.jsonl{suffix}"
    half = source.stat().st_size // 2
    halves = source.read_bytes()[:half], source.read_bytes()[half:]
    packed.write_bytes(b"".join(map(COMPRESS[suffix], halves)))
    run(source, tmp_path / "whole.jsonl")
    counter = FaultyDisk(0)
    run(packed, tmp_path / "count.jsonl", disk=counter)
    for at in range(1, counter.calls, counter.calls // 12):
        output = tmp_path / f"{at}.jsonl"
        with pytest.raises(Crash):
            run(packed, output, disk=FaultyDisk(at, Crash()))
        assert run(packed, output) == 1
        assert masked(output) == masked(tmp_path / "whole.jsonl")
    assert not list(tmp_path.glob("*.journal"))


@pytest.mark.parametrize("name", ["out.jsonl.gz", "out.jsonl.zst", "out.parquet"])
def test_an_output_of_any_format_has_the_lines_and_merges(tmp_path, name):
    source = write_input(tmp_path / "in.jsonl")
    run(source, tmp_path / "plain.jsonl")
    parts = [tmp_path / f"part{i}{name.removeprefix('out')}" for i in range(3)]
    for i, part in enumerate(parts):
        run(source, part, part=Part(i, 3))
    output, errors = tmp_path / name, tmp_path / f"errors.{name}"
    assert merge(parts, output, error_file=errors, progress=QUIET) == 1
    # the same command finds its own bytes again
    before = output.stat().st_mtime_ns
    assert merge(parts, output, error_file=errors, progress=QUIET) == 1
    assert output.stat().st_mtime_ns == before
    (tmp_path / "lines").write_bytes(b"".join(lines_of(output) + lines_of(errors)))
    assert sorted(masked(tmp_path / "lines").split(b"\n")) == sorted(
        masked(tmp_path / "plain.jsonl").split(b"\n")
    )
    if name == "out.parquet":
        table = parquet.read_table(output).to_pylist()
        assert [row["custom_id"] for row in table][:2] == ["q0", "q1"]
        assert all(row["text"] and row["finish_reason"] == "stop" for row in table)
        assert {row["error_code"] for row in parquet.read_table(errors).to_pylist()} >= {
            "invalid_json",
            "nonfinite_logits",
        }


def test_token_ids_and_messages_are_columns_too(tmp_path):
    # keys that some messages or parts lack are null in others
    parts = [{"type": "text", "text": "a", "image_url": None}]
    messages = [[{"role": "user", "content": parts, "name": None}] for _ in PROMPTS]
    write_parquet(tmp_path / "in.parquet", messages=messages, ids=[[1, 2]] * len(PROMPTS))
    for column, key, value in [
        (
            "messages",
            "messages",
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        ),
        ("ids", "prompt", [1, 2]),
    ]:
        first, *_ = rows_of(tmp_path / "in.parquet", Columns((column,), "label"))
        assert first == {"id": PROMPTS[0], key: value}


@pytest.mark.parametrize(
    "columns", [Columns(("text",)), Columns(id="key"), Columns(carried={"a": "a"})]
)
@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_lines_have_no_columns(tmp_path, name, columns):
    (tmp_path / name).write_text('{"prompt": "a"}\n')
    job = settings(tmp_path / name, tmp_path / "out.jsonl", columns=columns)
    with pytest.raises(InputError, match=r"expected a table .* got JSON Lines"):
        run_job(job, FakeModel(), progress=Progress(stream=io.StringIO()))


def test_a_text_of_messages_is_a_conversation_and_no_prompt(tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    texts = [json.dumps(chat), "Hello", '[],"prompt":"a"', "[NaN]"]
    with (tmp_path / "in.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["messages"], *([text] for text in texts)])
    parquet.write_table(pyarrow.table({"messages": texts}), tmp_path / "in.parquet")
    expected = [{"id": f"row-{i}", "messages": v} for i, v in enumerate([chat, *texts[1:]])]
    assert rows_of(tmp_path / "in.csv") == rows_of(tmp_path / "in.parquet") == expected
    assert rows_of(tmp_path / "in.csv", Columns(("messages",))) == expected
    (tmp_path / "other.csv").write_text('text\n"[]"\n')
    assert rows_of(tmp_path / "other.csv", Columns(("text",))) == [{"id": "row-0", "prompt": "[]"}]
    run(tmp_path / "in.csv", tmp_path / "out.jsonl")
    errors = [error_of_line(line) for line in lines_of(tmp_path / "out.jsonl")[1:]]
    assert [error and error.param for error in errors] == ["messages"] * 3


def test_conversations_that_are_missing_or_empty_are_no_prompts(tmp_path):
    chats = [[{"role": "user", "content": "a"}], None, [], [None]]
    parquet.write_table(pyarrow.table({"messages": chats}), tmp_path / "in.parquet")
    assert rows_of(tmp_path / "in.parquet") == [
        {"id": f"row-{i}", "messages": chat} for i, chat in enumerate(chats)
    ]


def test_a_column_of_floats_has_integers_and_nulls(tmp_path):
    table = {"id": [1.0, float("nan"), 2.5], "prompt": ["a", "b", "c"]}
    parquet.write_table(pyarrow.table(table), tmp_path / "in.parquet")
    assert rows_of(tmp_path / "in.parquet") == [
        {"id": "1", "prompt": "a"},
        {"id": "row-1", "prompt": "b"},
        {"id": 2.5, "prompt": "c"},
    ]


def test_a_damaged_page_of_a_table_is_an_error_of_the_input(tmp_path):
    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"prompt": [f"{i:1000}" for i in range(99)]}), path)
    content = bytearray(path.read_bytes())
    content[100:200] = b"x" * 100
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"in.parquet: expected Parquet, got"):
        rows_of(path)


def test_a_row_of_a_table_that_cannot_run_is_an_error_row(tmp_path):
    (tmp_path / "in.csv").write_text("id,prompt\na,\n,text\nb,text\n")
    assert run(tmp_path / "in.csv", tmp_path / "out.jsonl") == 1
    rows = [json.loads(line) for line in lines_of(tmp_path / "out.jsonl")]
    assert [row["custom_id"] for row in rows] == ["a", None, "b"]
    assert rows[2]["response"]["status_code"] == 200


def test_errors_in_a_table_name_its_rows(tmp_path, capsys):
    table = {"id": ["a", "a", "c"], "prompt": ["two\nlines", "text", ""]}
    with (tmp_path / "in.csv").open("w", newline="") as file:
        csv.writer(file).writerows([table, *zip(*table.values(), strict=True)])
    parquet.write_table(pyarrow.table(table), tmp_path / "in.parquet")
    for name in ("in.csv", "in.parquet"):
        output = tmp_path / f"{name}.jsonl"
        job = settings(tmp_path / name, output)
        assert run_job(job, FakeModel(), progress=Progress()) == 1
        (double, empty) = map(error_of_line, lines_of(output)[1:])
        assert double.message.startswith(
            "row 2: expected a new custom_id, got 'a', the id of row 1"
        )
        assert empty.code == "empty_prompt"
        said = capsys.readouterr().err
        assert "row 'a' (row 2): duplicate_custom_id: expected a new" in said and "line" not in said


def test_a_value_of_a_table_without_a_json_form_names_its_row(tmp_path):
    times = pyarrow.array([None, 1], pyarrow.timestamp("ns"))
    for prompts in ([None, b"bytes"], [1.0, float("inf")], times):
        parquet.write_table(pyarrow.table({"prompt": prompts}), tmp_path / "in.parquet")
        with pytest.raises(InputError, match="row 2: expected texts, token ids or messages"):
            run(tmp_path / "in.parquet", tmp_path / "out.jsonl")


def test_the_last_suffix_says_how_cells_are_separated(tmp_path):
    (tmp_path / "in.tsv.csv").write_text("id,prompt\n1,a\n")
    (tmp_path / "in.csv.tsv").write_text("id\tprompt\n1\ta\n")
    for name in ("in.tsv.csv", "in.csv.tsv"):
        assert rows_of(tmp_path / name) == [{"id": "1", "prompt": "a"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("in.csv", b"id,text\n1,a\n", "expected a column 'prompt', got id, text. Name the column"),
        ("in.csv", b"prompt,prompt\n1,a\n", "expected one column 'prompt', got 2"),
        ("in.csv", b"id,prompt\n\n1,a,b\n", r"row 1 \(line 3\): expected 2 cells, .*, got 3"),
        ("in.csv", b"id,prompt\n1,\xff\n", r"expected UTF-8, .* after row 0 \(line 0\)"),
        ("in.csv", b'id,prompt\n1,a\n1,"a"b\n', r"row 2 \(line 3\): expected CSV"),
        ("in.parquet", b"PAR1 no", r"expected Parquet, got .*[^.]\. Write the table again\."),
        ("in.jsonl.gz", b"plain", "expected gzip, as its name says"),
        ("in.jsonl.zst", b"plain", "expected Zstandard, as its name says"),
        ("in.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-3], "cut off"),
        ("in.jsonl.zst", COMPRESS[".zst"](b"{}" * 99)[:-3], "cut off"),
        ("in.jsonl.gz", b"", "cut off"),
        ("in.jsonl.zst", b"", "cut off"),
        ("in.jsonl.gz", gzip.compress(b"{}", mtime=0) + b"rest", "expected gzip"),
        ("in.jsonl.gz", gzip.compress(b'[{"a": 1},\n{"a": 2}]', mtime=0), "got a JSON array"),
        ("in.parquet.gz", b"", "Leave the second suffix out"),
    ],
)
def test_a_damaged_or_wrong_input_is_refused_before_any_row(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    model = FakeModel()
    with pytest.raises(UnusableFile, match=message):
        run(tmp_path / name, tmp_path / "out.jsonl", model)
    assert not model.num_builds and [path.name for path in tmp_path.iterdir()] == [name]


def test_zeros_after_a_compressed_file_are_no_damage(tmp_path):
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}') + bytes(600))
    assert run(tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl") == 0


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("piece", [1, 7, 10**6])
def test_content_of_any_size_comes_back_from_its_compressed_form(
    tmp_path, monkeypatch, suffix, piece
):
    monkeypatch.setattr(compression, "_PIECE_BYTES", piece)
    path = tmp_path / f"a{suffix}"
    chunks = [b"", b"a", os.urandom(3000), b"b" * 100000]
    path.write_bytes(b"".join(encoded(path, lambda: chunks, AddedColumns())))
    assert b"".join(encoded(path, lambda: chunks, AddedColumns())) == path.read_bytes()
    with path.open("rb") as file:
        assert compression.decompressed(path, file).read() == b"".join(chunks)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    source = write_input(tmp_path / "in.jsonl")
    for package, name, extra in [
        ("pyarrow.parquet", "out.parquet", r"noria\[parquet\]"),
        ("zstandard", "out.jsonl.zst", r"noria\[zstd\]"),
    ]:
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(UnusableFile, match=f"{name}: Expected the package.*{extra}"):
            run(source, tmp_path / name)
    with pytest.raises(UnusableFile, match=r"out.csv: expected .jsonl, .*Choose another suffix"):
        run(source, tmp_path / "out.csv")
    with pytest.raises(UnusableFile, match=r"got \.tsv, which cannot hold"):
        run(source, tmp_path / "out.tsv.gz")


def test_a_disk_without_room_for_the_lines_is_named(tmp_path, monkeypatch):
    write_csv(tmp_path / "in.csv")
    monkeypatch.setattr(
        row_files.os, "fstatvfs", lambda fd: SimpleNamespace(f_bavail=1, f_frsize=10)
    )
    with pytest.raises(InputError, match="expected room for its lines on the disk of the output"):
        run(tmp_path / "in.csv", tmp_path / "out.jsonl")
    # most of a Parquet table may be in columns that are not read
    write_parquet(tmp_path / "in.parquet")
    assert rows_of(tmp_path / "in.parquet")[0] == {"id": "q0", "prompt": PROMPTS[0]}


def test_a_disk_with_exactly_the_room_for_the_lines_is_accepted(tmp_path, monkeypatch):
    write_csv(tmp_path / "in.csv")
    room = SimpleNamespace(f_bavail=(tmp_path / "in.csv").stat().st_size, f_frsize=1)
    monkeypatch.setattr(row_files.os, "fstatvfs", lambda fd: room)
    assert rows_of(tmp_path / "in.csv")[0] == {"id": "q0", "prompt": PROMPTS[0]}


def test_the_limit_of_csv_cells_is_afterwards_that_of_before(tmp_path):
    write_csv(tmp_path / "in.csv")
    before = csv.field_size_limit(12_345)
    assert rows_of(tmp_path / "in.csv")
    assert csv.field_size_limit(before) == 12_345


def test_the_format_is_that_of_the_name():
    names = {"a.JSONL": "lines", "a.csv.GZ": "csv", "a": "lines", "a.b.tsv": "csv", "x.gz": "lines"}
    assert {name: table_of(Path(name)) for name in names} == names
