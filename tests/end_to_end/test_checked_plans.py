"""Plans edited by hand: `noria plan --check` predicts what a job with them then does."""

import json

import pytest
from command import completion, plan_text, read_manifest, write_lines

BUCKETS = {
    "max_length": "112",
    "prefill": "[[112, 4]]",
    "decode_slots": "6",
    "steps_per_call": "8",
    "chunk": "[16]",
}
EDITS = {
    "as it was": {},
    "one slot": {"decode_slots": "1"},
    "more slots than rows": {"decode_slots": "40"},
    "one step a call": {"steps_per_call": "1"},
    "two chunks": {"chunk": "[16, 32]", "prefill": "[[112, 4, 2]]"},
    "large calls": {"prefill": "[[112, 16]]"},
    "decode after every call": {"chunks_per_decode": "1"},
    "whole prompts": {"chunk": None, "prefill": "[[48, 3], [96, 2]]"},
    "few pages": {"page": "16", "pages": "20"},
    "long rows": {"max_length": "128", "prefill": "[[128, 4]]"},
}
IN_EVERY_RUN = "as it was", "one step a call", "whole prompts", "few pages"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    rows = [
        completion(
            f"row-{i}",
            [3 + (7 * i + j) % 200 for j in range(5 + 11 * i % 80)],
            max_tokens=3 + 5 * i % 20,
            ignore_eos=True,
            temperature=0,
        )
        for i in range(20)
    ]
    return write_lines(tmp_path_factory.mktemp("checked") / "in.jsonl", rows)


def edited(changes: dict[str, str | None]) -> str:
    keys = BUCKETS | changes
    return "".join(f"{key} = {value}\n" for key, value in keys.items() if value is not None)


@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.slow)
        for name in EDITS
    ],
)
def test_a_checked_plan_does_what_is_predicted(noria, source, tmp_path, name):
    plan, output, report = tmp_path / "plan.toml", tmp_path / "out.jsonl", tmp_path / "report"
    plan.write_text(plan_text(edited(EDITS[name])))
    model = ("--model", noria.model)
    said = noria.run_here("plan", *model, "--workload", source, "--check", plan, "--report", report)
    assert f"plan: {plan}" in said and "the planner" in said
    predicted = json.loads((report / "report.json").read_text("utf-8"))
    noria.run("batch", *model, "-i", source, "-o", output, "--plan", plan)
    used = read_manifest(output)["generator"]
    prefill, decode = used["buckets"]["prefill"], used["buckets"]["decode"]
    wanted = {
        f"prefill {name}": (use["calls"], use["real_tokens"], use["computed_tokens"])
        for name, use in prefill.items()
    }
    (use,) = decode.values()
    wanted["decode"] = use["calls"], use["emitted_tokens"], use["computed_tokens"]
    found = {
        graph["graph"]: (graph["calls"], graph["real_tokens"], graph["computed_tokens"])
        for graph in predicted["graphs"]
        if graph["calls"]
    }
    assert found == wanted
    assert predicted["graphs"][-1]["steps"] == use["steps"] >= use["calls"]
    figures, padding = predicted["predicted"], used["padding"]
    computed = sum(use["computed_tokens"] for use in prefill.values())
    assert figures["prefill_padding"] == pytest.approx(padding["prefill_padding_tokens"] / computed)


def test_the_keys_that_differ_from_the_planners_choice_are_named_with_their_cost(
    noria, source, tmp_path
):
    plan, report = tmp_path / "plan.toml", tmp_path / "report"
    plan.write_text(plan_text(edited({"decode_slots": "1", "steps_per_call": "1"})))
    arguments = ("plan", "--model", noria.model, "--workload", source, "--check", plan)
    said = noria.run_here(*arguments, "--report", report)
    choice = json.loads((report / "report.json").read_text("utf-8"))["choice"]
    given, own = choice["differences"]["decode_slots"]
    assert given == 1 < own and f"buckets.decode_slots: 1 here, {own} there" in said
    assert f"({choice['run_seconds']:.1f} s), from which it differs in" in said
    assert "beside --check" in noria.refuse(*arguments, "--page", "16")
    assert "beside --check" in noria.refuse(*arguments, "-o", tmp_path / "other.toml")
    assert "got neither" in noria.refuse(*arguments[:-2])
    plan.write_text(plan_text(edited({"max_length": "16", "prefill": "[[16, 4]]"})))
    assert "left out: 18 rows that this plan cannot serve" in noria.run_here(*arguments)
    plan.write_text(plan_text("max_length = 4\nprefill = [[4, 4]]\ndecode_slots = 2\n"))
    assert "for rows of at most 4 tokens" in noria.refuse(*arguments)
