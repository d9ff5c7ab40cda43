"""A chat template that cannot show the rows of a job is an error of the job."""

import json

from model_on_disk import write_model

from noria.runtime import cli, session


def test_a_template_that_loses_texts_ends_the_job_before_weights_are_loaded(
    tmp_path, capfd, monkeypatch
):
    folder, source = tmp_path / "model", tmp_path / "in.jsonl"
    write_model(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.text }}{% endfor %}")
    rows = [{"prompt": "the water"}, {"messages": [{"role": "user", "content": "hello"}]}]
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setattr(session, "load_model", None)
    arguments = ["batch", "-i", str(source), "-o", str(tmp_path / "out"), "--model", str(folder)]
    assert cli.main(arguments) == 3
    error = capfd.readouterr().err
    assert "chat_template.jinja: expected a template that shows the text of a user's" in error
    assert not (tmp_path / "out").exists()
