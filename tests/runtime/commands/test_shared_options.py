"""Options that several subcommands have: number formats, and their errors."""

import pytest

from noria.runtime.commands.shared_options import read_numbers
from noria.runtime.errors import ConfigError


@pytest.mark.parametrize("text", ["", "int4:", "int4:64:2", "weights=int8,", "=int8"])
def test_numbers_that_cannot_be_read_name_their_own_option(text):
    with pytest.raises(ConfigError, match=f"^--numbers {text}: expected a format such as int8"):
        read_numbers(text)
