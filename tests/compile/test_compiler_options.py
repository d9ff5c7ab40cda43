"""An error of XLA is reported as an option's error only if it is about the option."""

import pytest

from noria.compile.compiler_options import (
    PLATFORM_OPTIONS,
    CompilerOptionRefused,
    naming_option,
    read_options,
    with_defaults,
)


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


def test_a_platform_has_defaults_that_a_plan_overrides_one_by_one():
    ((name, default),) = PLATFORM_OPTIONS["tpu"]["decode"].items()
    assert with_defaults({}, "tpu") == PLATFORM_OPTIONS["tpu"]
    given = {"prefill": {"xla_a": 1}, "decode": {"xla_a": 2}}
    assert with_defaults(given, "tpu") == {**given, "decode": {"xla_a": 2, name: default}}
    own = {"decode": {name: 0.5}}
    assert with_defaults(own, "tpu") == own
    assert with_defaults(given, "gpu") == given


def test_products_of_embeddings_in_float32_have_their_own_library_on_a_cpu():
    assert with_defaults({}, "cpu") == PLATFORM_OPTIONS["cpu"]
    assert with_defaults({}, "cpu", is_float32=False) == {}
    assert with_defaults({}, "tpu", is_float32=False) == PLATFORM_OPTIONS["tpu"]
