"""The embedded model, as the quickstart and the README show it."""

from command import chat, read_rows, write_lines

CAPITAL = "The capital of France is Paris."
CAPITAL_IDS = [504, 3575, 282, 4649, 314, 7042, 30]
END_ID = 2


def test_the_capital_of_france(noria, tmp_path):
    question = chat("capital", "Name the capital of France.", temperature=0, max_tokens=48)
    source = write_lines(tmp_path / "in.jsonl", [question])
    output = tmp_path / "out.jsonl"
    done = noria.without_server().run("batch", "-i", source, "-o", output, "--model", "smollm2")
    (row,) = read_rows(output)
    (choice,) = row["response"]["body"]["choices"]
    assert choice["message"]["content"] == CAPITAL
    assert choice["finish_reason"] == "stop"
    assert "Traceback" not in done.stderr


def test_the_python_surface_gives_the_same_ids():
    """The plan has few graphs, and loops over layers, so that it compiles in a few seconds."""
    from noria.compile.grids.bucket_grid import BucketGrid
    from noria.compile.plan import Numbers, Plan, PlannedModel
    from noria.runtime import LLM, SamplingParams

    model = PlannedModel("smollm2", "", scan_layers=True)
    grid = BucketGrid(64, ((48, 1),), 1, page=16)
    llm = LLM(model="smollm2", plan=Plan("cpu", model, Numbers("bfloat16"), grid))
    conversation = [{"role": "user", "content": "Name the capital of France."}]
    (output,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=16))
    assert output.outputs[0].token_ids == [*CAPITAL_IDS, END_ID]
    assert output.outputs[0].text == CAPITAL
    llm.close()


def test_inspect_and_doctor_report(noria):
    report = noria.run_here("inspect", "smollm2")
    assert "llama" in report
    assert "134515008" in report.replace(",", "").replace("_", "")
    assert "jax" in noria.without_server().run("doctor").stdout
