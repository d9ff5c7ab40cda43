"""Unreadable configuration is refused with the name of the file or the option."""

import pytest

from noria.runtime.errors import ConfigError
from noria.runtime.files.run_config import apply_overrides, read_toml


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


@pytest.mark.parametrize(
    "override", ["a", "=1", "a..b=1", "a=[1", "a=1\nb=2", "x.y=1", "a=", "a=" + "1" * 5000]
)
def test_an_override_that_cannot_be_read_is_refused(override):
    with pytest.raises(ConfigError, match="--set"):
        apply_overrides({"x": 1}, [override])


def test_a_file_that_is_not_toml_is_refused_by_name(tmp_path):
    path = tmp_path / "plan.toml"
    for text in ("a = ", "a = " + "1" * 5000):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"plan\.toml"):
            read_toml(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path / "absent.toml")
