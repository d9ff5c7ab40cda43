"""Layouts by name and by file: the named layouts are legal, and files are read as written."""

import subprocess
import sys
import tomllib
from importlib import resources

import pytest

from noria import sharding
from noria.compile.abstract_model import model_sizes
from noria.modelzoo.config import DecoderConfig
from noria.runtime.errors import ConfigError
from noria.runtime.files.layout_files import (
    named_layout_tables,
    read_layout,
    read_layout_table,
    split_spellings,
)
from noria.sharding.layout import Layout
from noria.sharding.legality import check

NAMES = tuple(named_layout_tables())
CONFIG = DecoderConfig.alike(
    vocab_size=32000,
    embed=512,
    mlp=1536,
    num_query_heads=16,
    num_kv_heads=8,
    head_dim=64,
    windows=(None,) * 2,
    max_position=4096,
)
OWN = """
max_replicated = 0.1

[mesh]
tensor = 4
data = 2

[rules]
batch = "data"
mlp = ["tensor"]
vocab = ["data", "tensor"]
kv_heads = ""

[decode.rules]
attention_batch = ["data", "tensor"]
"""


def test_the_layouts_that_ship_are_known():
    assert set(NAMES) == {
        "data-parallel",
        "data-tensor",
        "data-tensor-batch-attention",
        "embed-parallel",
        "expert-parallel",
        "expert-stationary",
        "expert-tensor",
        "gpu-host",
        "ring",
        "ring-data-expert",
        "ring-tensor",
        "sequence-parallel",
        "v5e-host",
        "v5p-slice",
        "weight-gathered",
        "weight-gathered-all",
        "weight-stationary-1d",
        "weight-stationary-1d-batch-attention",
        "weight-stationary-1d-kv-copies",
        "weight-stationary-2d",
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_that_ships_says_when_it_wins_and_what_it_is_called(name):
    text = (resources.files(sharding) / "layouts" / f"{name}.toml").read_text("utf-8")
    comment = "".join(line for line in text.splitlines() if line.startswith("#"))
    assert text.startswith("# ")
    assert "wins" in comment.lower()
    assert tomllib.loads(text)["name"] == name


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_that_ships_is_legal_on_its_own_mesh(name):
    layout = Layout.from_table(read_layout_table(name))
    assert layout.name == name
    assert layout.mesh.num_devices == 8
    assert check(layout, model_sizes(CONFIG, 8)) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_survives_its_tables(name):
    layout = Layout.from_table(read_layout_table(name))
    assert Layout.from_table(layout.to_table()) == layout


def test_a_layout_of_ones_own_is_read_with_all_that_its_file_says(tmp_path):
    path = tmp_path / "me@home" / "own.toml"
    path.parent.mkdir()
    path.write_text(OWN, encoding="utf-8")
    layout = Layout.from_table(read_layout_table(str(path)))
    assert layout.name == str(path)
    assert layout.max_replicated == 0.1
    assert layout.mesh.axes == (("tensor", 4), ("data", 2))
    assert layout.rules.table == {
        "batch": ("data",),
        "mlp": ("tensor",),
        "vocab": ("data", "tensor"),
        "kv_heads": (),
    }
    assert (layout.prefill, layout.decode) == ({}, {"attention_batch": ("data", "tensor")})
    assert Layout.from_table(layout.to_table()) == layout


def test_a_mesh_after_the_name_takes_the_place_of_its_own_in_the_order_written(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN, encoding="utf-8")
    for name in ("data-tensor", str(path)):
        table = read_layout_table(f"{name}@tensor=2,data=4")
        assert list(table["mesh"].items()) == [("tensor", 2), ("data", 4)]
        assert table["rules"] == read_layout_table(name)["rules"]


def test_a_name_without_a_mesh_is_fitted_to_the_devices_and_nothing_else_is(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN, encoding="utf-8")
    assert read_layout("v5e-host", 4).mesh.sizes == {"tensor": 4}
    assert read_layout("data-tensor", 6).mesh.num_devices == 6
    for spelling in ("data-tensor", "data-tensor@tensor=2,data=4", str(path)):
        same = Layout.from_table(read_layout_table(spelling), spelling)
        fitted = read_layout(spelling, 1 if spelling == "data-tensor" else 4)
        assert fitted.to_table() == same.to_table()


@pytest.mark.parametrize(
    "mesh", ["", "data", "data=", "data=-1", "data=2.0", "data=2,data=4", "data=2;tensor=4", "=2"]
)
def test_a_mesh_that_cannot_be_read_is_refused(mesh):
    spelling = f"data-tensor@{mesh}"
    with pytest.raises(ConfigError) as refused:
        read_layout_table(spelling)
    assert str(refused.value) == (
        f"layout {spelling}: expected a mesh such as data=2,tensor=4 after the @, got {mesh!r}."
    )


@pytest.mark.parametrize("spelling", ["data-tensr", "", "data-tensor.tml", "data-tensr@data=8"])
def test_a_name_that_no_layout_has_is_refused_with_those_that_there_are(spelling):
    name = spelling.partition("@")[0]
    with pytest.raises(ConfigError) as refused:
        read_layout_table(spelling)
    assert str(refused.value) == (
        f"layout: expected a .toml file or one of {', '.join(NAMES)}, got {name!r}."
    )


@pytest.mark.parametrize(("text", "message"), [(None, "absent.toml"), ("[mesh", "absent.toml")])
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "absent.toml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_layout_table(str(path))


def test_reading_layouts_imports_no_jax():
    """The command refuses a wrong name immediately."""
    code = (
        "import sys; from noria.runtime.files.layout_files import read_layout_table; "
        "read_layout_table('data-tensor'); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_whose_paths_have_spaces_can_be_asked_for_alone_and_with_others(tmp_path):
    path = tmp_path / "my layout.toml"
    path.write_text("", encoding="utf-8")
    assert split_spellings(str(path)) == [str(path)]
    assert split_spellings(f"ring data-tensor@data=4,tensor=2 '{path}'") == [
        "ring",
        "data-tensor@data=4,tensor=2",
        str(path),
    ]
    with pytest.raises(ConfigError, match='expected names or files, got "ring \'a"'):
        split_spellings("ring 'a")
