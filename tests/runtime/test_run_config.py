"""Configuration tables are read strictly, with errors that name the key."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from noria.runtime.run_config import ConfigError, apply_overrides, from_table, read_toml


@dataclass(frozen=True)
class Buckets:
    max_length: int
    prefill: tuple[tuple[int, int], ...] = ()
    share: float = 0.5
    pinned: bool = True

    def __post_init__(self):
        if self.max_length < 1:
            raise ValueError("max_length: expected at least 1")


@dataclass(frozen=True)
class Config:
    buckets: Buckets
    target: str = "cpu"
    rules: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    seed: int | None = None


def test_tables_become_nested_dataclasses():
    table = {
        "buckets": {"max_length": 8, "prefill": [[4, 2], [8, 1]], "share": 1},
        "rules": {"batch": "data", "mlp": ["data", "tensor"]},
    }
    assert from_table(Config, table) == Config(
        Buckets(8, ((4, 2), (8, 1)), 1.0), rules={"batch": "data", "mlp": ("data", "tensor")}
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"buckets": {"max_lenght": 8}},
            r"buckets.max_lenght: unknown key; buckets has max_length",
        ),
        ({"buckets": {}}, r"buckets.max_length: expected a value"),
        ({"buckets": {"max_length": 0}}, r"buckets: max_length: expected at least 1"),
        ({"buckets": {"max_length": True}}, r"buckets.max_length: expected int, got True"),
        ({"buckets": {"max_length": "8"}}, r"buckets.max_length: expected int"),
        ({"buckets": {"max_length": 8, "prefill": [[1]]}}, r"prefill\[0\]: expected 2 values"),
        ({"buckets": {"max_length": 8, "pinned": 1}}, r"pinned: expected bool"),
        ({"buckets": 5}, r"buckets: expected a table"),
        ({"buckets": {"max_length": 8}, "seed": "x"}, r"seed: expected int"),
        ({"buckets": {"max_length": 8}, "rules": {"a": 5}}, r"rules.a: expected str"),
    ],
)
def test_a_wrong_table_is_refused_by_the_name_of_its_key(table, message):
    with pytest.raises(ConfigError, match=message):
        from_table(Config, table)


def test_overrides_are_toml_or_bare_words_and_leave_the_table_alone():
    table = {"buckets": {"max_length": 8}}
    result = apply_overrides(
        table, ["buckets.prefill=[[4, 2]]", "target=tpu:v5e:2x4", "seed=3", 'rules.a="x y"']
    )
    assert result == {
        "buckets": {"max_length": 8, "prefill": [[4, 2]]},
        "target": "tpu:v5e:2x4",
        "seed": 3,
        "rules": {"a": "x y"},
    }
    assert table == {"buckets": {"max_length": 8}}


@pytest.mark.parametrize("override", ["a", "=1", "a..b=1", "a=[1", "a=1\nb=2", "x.y=1", "a="])
def test_an_override_that_cannot_be_read_is_refused(override):
    with pytest.raises(ConfigError, match="--set"):
        apply_overrides({"x": 1}, [override])


def test_a_file_that_is_not_toml_is_refused_by_name(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("a = ")
    with pytest.raises(ConfigError, match=r"plan\.toml"):
        read_toml(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path / "absent.toml")
