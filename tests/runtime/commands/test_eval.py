"""`noria eval`: options that would lose results are refused before any task runs."""

import pytest

from noria.runtime import cli


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-o", "{folder}/file"), "expected a folder, got the file"),
        (("--log-samples",), "--log-samples: expected --output beside it"),
    ],
)
def test_results_without_a_place_are_refused(tmp_path, capsys, options, message):
    (tmp_path / "file").write_text("")
    given = [option.format(folder=tmp_path) for option in options]
    assert cli.main(["eval", "--model", "no/such/model", "--tasks", "any", *given]) == 2
    assert message in capsys.readouterr().err
