"""Jobs with stages whose input or output is a table or compressed."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest
from fake_model import FakeModel, settings
from faulty_disk import Crash, FaultyDisk

from noria.runtime.batch.merge import merge
from noria.runtime.errors import ConfigError, InputError
from noria.runtime.files.disk import digest_file
from noria.runtime.files.manifest import read_manifest
from noria.runtime.progress.progress import Progress
from noria.runtime.rows.columns import Columns
from noria.runtime.rows.part import Part
from noria.runtime.rows.row_files import output_lines
from noria.runtime.stages.pipeline_file import read_pipeline
from noria.runtime.stages.run_stages import run_stages
from noria.runtime.stages.staged_model import StagedModel

STAGES = """
[[stages]]
name = "draft"
max_tokens = 16
prompt = "{{ row['a text'] }}"

[[stages]]
name = "revise"
max_tokens = 4
prompt = "{{ row['a text'] }}: {{ draft.answer }} {{ row.topic }}"
"""
CELLS = {
    "key": ["k0", "k1", "k1", "k3", "k4"],
    "a text": ["one", "two", "three", "nan", "five"],
    "topic": ["x", "y", "z", "u", None],
}
CODES = [None, None, "duplicate_custom_id", "nonfinite_logits", "template_error"]
COLUMNS = Columns(id="key", carried={"about": "topic"})


def run(source: Path, output: Path, model=None, disk=None, text=STAGES, **changes) -> int:
    path = source.with_name("stages.toml")
    path.write_text(text)
    pipeline = read_pipeline(path)
    configuration = {"model": "fake", "pipeline": pipeline.text, "carried": '{"about": "topic"}'}
    return run_stages(
        settings(source, output, **{"configuration": configuration, "columns": COLUMNS, **changes}),
        StagedModel(model or FakeModel(), 0, lambda: 512),
        pipeline,
        keeps_stages=False,
        progress=Progress(is_quiet=True),
        disk=disk,
    )


@pytest.fixture
def source(tmp_path) -> Path:
    parquet.write_table(pyarrow.table(CELLS), tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


def rows_of(path: Path) -> list[dict]:
    """The rows of an output, without the time at which they ran."""
    with path.open("rb") as file:
        rows = [json.loads(line) for line in output_lines(path, file)]
    for row in rows:
        ((row["response"] or {}).get("body") or {}).pop("created", None)
    return rows


def test_templates_read_columns_and_every_row_has_its_id_and_its_carried_cells(source, tmp_path):
    output = tmp_path / "out.parquet"
    assert run(source, output) == 1
    table = parquet.read_table(output).to_pylist()
    assert [row["custom_id"] for row in table] == CELLS["key"]
    assert [row["about"] for row in table] == CELLS["topic"]
    assert [row["error_code"] for row in table] == CODES
    assert "row 3: expected a new custom_id, got 'k1', the id of row 2" in table[2]["error_message"]
    assert "expected a text or a number to write, got null" in table[4]["error_message"]
    described = read_manifest(output)["input"]
    assert described["rows"] == 5 and described["sha256"] == digest_file(source).sha256


def test_a_crash_at_any_disk_operation_changes_nothing_in_the_end(source, tmp_path):
    counter = FaultyDisk(0)
    run(source, tmp_path / "whole.parquet", disk=counter)
    for at in range(1, counter.calls + 1, 17):
        output = tmp_path / f"{at}.parquet"
        with pytest.raises(Crash):
            run(source, output, disk=FaultyDisk(at, Crash()))
        assert run(source, output) == 1
        assert rows_of(output) == rows_of(tmp_path / "whole.parquet"), f"after operation {at}"


def test_parts_merge_to_the_output_of_the_whole_job(source, tmp_path):
    parts = [tmp_path / f"part{i}.jsonl.gz" for i in range(2)]
    for i, part in enumerate(parts):
        run(source, part, part=Part(i, 2))
    run(source, tmp_path / "whole.parquet")
    merge(parts, tmp_path / "merged.parquet", progress=Progress(is_quiet=True))
    assert rows_of(tmp_path / "merged.parquet") == rows_of(tmp_path / "whole.parquet")
    whole, merged = (parquet.read_table(tmp_path / f"{n}.parquet") for n in ("whole", "merged"))
    assert merged.drop_columns("line") == whole.drop_columns("line")


def test_a_complete_job_of_a_table_does_nothing(source, tmp_path):
    output, model = tmp_path / "out.parquet", FakeModel()
    run(source, output)
    before = output.read_bytes()
    assert run(source, output, model) == 1
    assert model.num_texts == 0 and output.read_bytes() == before


def test_compressed_lines_have_the_answers_of_plain_lines(tmp_path):
    lines = b"".join(
        json.dumps({"id": f"k{i}", "a text": f"text {i}", "topic": "t"}).encode() + b"\n"
        for i in range(4)
    )
    (tmp_path / "in.jsonl").write_bytes(lines)
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(lines))
    for name in ("in.jsonl", "in.jsonl.gz"):
        changes = {"columns": Columns(), "configuration": {"model": "fake"}}
        assert run(tmp_path / name, tmp_path / f"out.{name}", **changes) == 0
    # ids of lines are hashes of the input's bytes too
    plain, packed = (
        [row["response"]["body"]["choices"] for row in rows_of(tmp_path / f"out.{name}")]
        for name in ("in.jsonl", "in.jsonl.gz")
    )
    assert plain == packed and len(plain) == 4


def test_lines_have_no_columns_and_a_missing_column_leaves_no_folder(source, tmp_path):
    (tmp_path / "in.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match=r"expected a table .* --carry, got JSON Lines"):
        run(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(InputError, match="expected one column 'gone', got 0"):
        run(source, tmp_path / "out.jsonl", columns=Columns(id="gone"))
    assert not (tmp_path / "out.jsonl.stages").exists()


@pytest.mark.parametrize(
    ("written", "missing"),
    [
        ("{{ row.gone }}", "row.gone"),
        ("a {{ row['a gone'] }}", "row.a gone"),
        (
            "{{ row.gone | default('x') }}{% if row.gone is defined %}{{ row.gone }}{% endif %}",
            None,
        ),
        ("{% for a in [1] %}{% break %}{% endfor %}", None),
        ("{% set row = {'gone': 'x'} %}{{ row.gone }}", None),
    ],
)
def test_a_template_that_writes_a_missing_column_is_refused_before_the_build(
    source, tmp_path, written, missing
):
    text, model = STAGES.replace("{{ row.topic }}", written), FakeModel()
    output = tmp_path / "out.jsonl"
    if missing is None:
        assert run(source, output, model, text=text) == 1
        return
    message = rf"stage revise: prompt: expected columns .* \(key, a text, topic\), got '{missing}'"
    with pytest.raises(ConfigError, match=message):
        run(source, output, model, text=text)
    assert not model.num_texts and not (tmp_path / "out.jsonl.stages").exists()
