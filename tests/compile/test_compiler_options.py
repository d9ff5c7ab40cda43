"""Errors of XLA are those of an option only where they are about it."""

import pytest

from noria.compile.compiler_options import CompilerOptionRefused, naming_option, read_options


def test_the_option_with_the_longest_name_is_named():
    with (
        pytest.raises(CompilerOptionRefused, match=r"plan compiler\.decode\.xla_a_b: .* got 2"),
        naming_option("decode span 64", {"xla_a": 1, "xla_a_b": 2}),
    ):
        raise RuntimeError("INVALID_ARGUMENT: No such compile option: 'xla_a_b'")


@pytest.mark.parametrize("problem", ["other", "RESOURCE_EXHAUSTED: raise xla_a"])
def test_other_errors_stay_as_they_are(problem):
    with (
        pytest.raises(RuntimeError, match=problem) as caught,
        naming_option("decode span 64", {"xla_a": 1}),
    ):
        raise RuntimeError(problem)
    assert not isinstance(caught.value, CompilerOptionRefused)


def test_any_integer_is_a_value():
    table = {"decode": {"xla_a": 10**400}}
    assert read_options(table) == table
