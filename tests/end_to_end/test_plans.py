"""`noria plan` through the command: its plans run, and it reproduces a run's counts exactly."""

import base64
import html
import json
import random
import re
import tomllib

import pytest
from command import answer, completion, read_manifest, read_rows, write_lines

PADDING = (
    "real_tokens",
    "computed_tokens",
    "prefill_padding_tokens",
    "idle_slot_tokens",
    "overshoot_tokens",
)


@pytest.fixture(scope="module")
def source(noria, tmp_path_factory):
    rng = random.Random(7)
    rows = [
        completion(
            f"row-{i}",
            [rng.randrange(3, 250) for _ in range(rng.randint(1, 80))],
            temperature=1.0,
            seed=i,
            max_tokens=rng.randint(1, 40),
            stop=["e"] if i % 3 == 0 else None,
            # some rows meet these ids, and end before their limit
            stop_token_ids=list(range(5, 25)) if i % 3 == 1 else [],
        )
        for i in range(80)
    ]
    rows[5]["body"] |= {"echo": True, "max_tokens": 0, "logprobs": 1}
    return write_lines(tmp_path_factory.mktemp("plans") / "in.jsonl", rows)


def plan(noria, source, *arguments):
    """The plan's path and its report."""
    folder = source.parent / f"report-{len(list(source.parent.iterdir()))}"
    path = folder.with_suffix(".toml")
    options = ("--model", noria.model, "--workload", source, "-o", path, "--report", folder)
    said = noria.run_here("plan", *options, *arguments)
    return path, json.loads((folder / "report.json").read_text("utf-8")), said


@pytest.fixture(scope="module")
def planned(noria, source):
    return plan(noria, source, "--max-prefill-graphs", "3", "--chunks", "never")


@pytest.fixture(scope="module")
def output(noria, source, planned):
    """The output of a job under the plan."""
    path = source.with_name("out.jsonl")
    arguments = ("-i", source, "-o", path, "--model", noria.model, "--plan", planned[0])
    noria.run("batch", *arguments)
    return path


def test_a_plan_runs_as_it_is_and_its_prefill_padding_is_as_predicted(planned, output):
    _, report, _ = planned
    manifest = read_manifest(output)
    assert manifest["rows"]["ok"] == 80
    assert manifest["compiles_during_run"] == 0
    used = manifest["generator"]["buckets"]["prefill"].values()
    assert report["predicted"]["prefill_computed_tokens"] == sum(u["computed_tokens"] for u in used)
    assert report["plan"] == manifest["plan"]


def test_a_plan_names_its_evidence_and_what_it_predicts(planned):
    _, report, summary = planned
    evidence, predicted = report["evidence"], report["predicted"]
    assert tomllib.loads(report["plan"])["evidence"]["costs"] == evidence["costs"]
    assert evidence["costs"].startswith("measured two cores")
    assert f"evidence   {evidence['costs']}" in summary
    rows, tokens = (report["workload"][key] for key in ("rows", "expected_output_tokens"))
    seconds = predicted["run_seconds"]
    assert evidence["run_seconds"] == pytest.approx(seconds, rel=1e-3)
    assert evidence["output_tokens_per_second"] == pytest.approx(tokens / seconds, rel=1e-3)
    assert evidence["rows_per_hour"] == pytest.approx(3600 * rows / seconds, rel=1e-3)
    assert "output tokens/s and" in summary and "price" not in summary


def test_hardware_with_a_price_gives_a_plan_its_price(noria, source):
    table = source.with_name("priced.toml")
    peaks = "flops = {float32 = 1e12}\nmemory_bytes = 1e10\nmemory_rate = 1e11\nlink_rate = 1e10"
    table.write_text(f'[cpu]\nsource = "mine"\n{peaks}\nwraps = []\nprice_per_hour = 3600\n')
    _, report, summary = plan(noria, source, "--hardware", table, "--chunks", "never")
    seconds = report["predicted"]["run_seconds"] + report["predicted"]["build_seconds"]
    assert report["evidence"]["price"] == pytest.approx(seconds, rel=1e-3)
    assert f"; price {report['evidence']['price']:.4g} with the build" in summary


def test_a_job_goes_on_with_a_plan_that_differs_in_its_evidence_alone(
    noria, source, planned, output
):
    other = source.with_name("other-evidence.toml")
    text = planned[0].read_text("utf-8")
    other.write_text(text.replace('costs = "measured', 'costs = "measured again'), "utf-8")
    before = output.read_bytes()
    arguments = ("-i", source, "-o", output, "--model", noria.model, "--plan", other)
    noria.run("batch", *arguments)
    assert output.read_bytes() == before


def test_a_plan_with_scanned_layers_runs_and_gives_the_same_answers(noria, source, output):
    path, report, _ = plan(
        noria, source, "--max-prefill-graphs", "3", "--scan-layers", "--chunks", "never"
    )
    assert "scan_layers = true" in report["plan"]
    assert "chunk" not in report["plan"]
    rows, manifest = noria.batch(source, source.with_name("scanned.jsonl"), "--plan", path)
    assert manifest["compiles_during_run"] == 0
    assert [answer(row) for row in rows] == [answer(row) for row in read_rows(output)]


def test_given_the_outputs_of_a_run_its_padding_is_known_exactly(noria, source, output):
    _, report, _ = plan(noria, source, "--from-output", output)
    ran = read_manifest(output)["generator"]["padding"]
    known = report["comparison"]["plan of the run"]
    assert {name: known[name] for name in PADDING} == {name: ran[name] for name in PADDING}
    assert ran["recomputed_tokens"] == 0
    assert ran["overshoot_tokens"] > 0
    assert report["predicted"]["run_seconds"] <= known["run_seconds"]


def test_the_summary_names_every_graph_and_says_that_it_predicts(planned):
    _, report, summary = planned
    names = {graph["graph"] for graph in report["graphs"]}
    for length, batch in report["predicted"]["prefill"]:
        # one row is scored
        assert {f"prefill {length}x{batch}", f"prefill {length}x{batch} scored"} <= names
    assert sum(name.startswith("decode") for name in names) == 1
    assert all(name in summary for name in names)
    for graph in report["graphs"]:
        first = graph["first_call_seconds"] * bool(graph["calls"])
        assert first or not graph["calls"]
        wanted = graph["calls"] * graph["seconds"] + first
        assert graph["total_seconds"] == pytest.approx(wanted)
    assert "predicted" in summary
    assert "powers of two" in summary


def test_the_page_is_whole_without_network_and_shows_summary_and_plan(planned):
    path, _, summary = planned
    page = path.with_suffix("").joinpath("report.html").read_text("utf-8")
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)
    pictures = [base64.b64decode(found) for found in re.findall(r"base64,([^\"]*)", page)]
    assert len(pictures) == 4
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert "padded to the next line" in page
    assert html.escape(summary.partition("\nplan: ")[0]) in page
    assert html.escape(path.read_text("utf-8")) in page


@pytest.mark.slow
def test_layouts_are_put_in_the_order_of_their_compiled_graphs(noria, source):
    layouts = "data-parallel@data=2 data-tensor@data=1,tensor=2"
    options = ("--target", "cpu:2", "--layout", layouts, "--tries", "1", "--quiet")
    _, report, summary = plan(noria, source, *options, "--compile-layouts", "2")
    searched = report["layouts"]
    assert {one["name"] for one in searched} == {"data-parallel", "data-tensor"}
    seconds = [one["compiled_seconds"] for one in searched]
    assert seconds == sorted(seconds)
    assert all(one["compiled"]["decode"]["factor"] > 0.99 for one in searched)
    assert f'layout = "{searched[0]["name"]}"' in report["plan"]
    assert "as compiled s" in summary
    compiled = {one["graph"]: one["compiled"] for one in report["graphs"] if one["compiled"]}
    assert {name.split()[0] for name in compiled} == {"prefill", "decode"}
    for found in compiled.values():
        assert found["bytes_moved"] > found["bytes_needed"] > 0
        assert f"x{found['bytes_moved'] / found['bytes_needed']:.2f}" in summary
    assert "MB sent along tensor" in summary or searched[0]["name"] == "data-parallel"


def test_a_table_of_lengths_is_a_workload_for_hardware_that_is_not_there(noria, source):
    table = source.with_name("lengths.csv")
    rows = ["prompt_tokens,output_tokens", *(f"{i % 60 + 1},{i % 20 + 1}" for i in range(300))]
    table.write_text("\n".join(rows) + "\n")
    chunks = ("--chunks", "always", "--max-padding", "2")
    path, report, summary = plan(noria, table, "--target", "tpu:v5e:1x1", *chunks)
    predicted = report["predicted"]
    assert predicted["prefill_computed_tokens"] <= 2 * predicted["prefill_real_tokens"]
    assert 'target = "tpu:v5e:1x1"' in report["plan"]
    assert 'dtype = "bfloat16"' in report["plan"]
    assert "chunk = " in report["plan"]
    assert report["hardware"]["name"] == "v5e"
    assert "evidence   compiler's cycles" in summary
    assert 'costs = "compiler\'s cycles, reads of pages assumed"' in report["plan"]
    page = path.with_suffix("").joinpath("report.html").read_text("utf-8")
    sizes = " and ".join(map(str, predicted["chunk"]))
    assert f"in chunks of {sizes} tokens, and padded by at most {predicted['chunk'][0] - 1}" in page


def test_terminal_and_file_say_the_same_of_every_grid_and_of_rows_left_out(noria, source):
    table = source.with_name("one-too-long.csv")
    table.write_text("prompt_tokens,output_tokens\n" + "40,9\n" * 30 + "99999,1\n")
    _, report, summary = plan(noria, table)
    assert report["workload"]["refused"] == 1
    assert "left out: 1 row that no plan can serve" in summary
    for name, grid in {"this plan": report["predicted"], **report["comparison"]}.items():
        cells = [name, str(grid["graphs"]), f"{grid['prefill_padding']:.1%}"]
        cells += [f"{grid['idle_slots']:.1%}", f"{grid['run_seconds']:.1f}"]
        assert re.search(r"\s+".join(map(re.escape, cells)), summary)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prompt,output\n1,2\n", "prompt_tokens"),
        ("prompt_tokens,output_tokens\n1,x\n", "line 2"),
        ("prompt_tokens,output_tokens\n0,4\n", "line 2"),
        ("prompt_tokens,output_tokens,max_tokens\n5,4,3\n", "line 2"),
        ("prompt_tokens,output_tokens\n", "at least one row"),
    ],
)
def test_a_table_that_cannot_be_is_refused_by_line(noria, source, content, message):
    table = source.with_name("wrong.csv")
    table.write_text(content)
    arguments = ("--model", noria.model, "--workload", table, "-o", source.with_name("no.toml"))
    assert message in noria.refuse("plan", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "tpu:v9:2x2"), "v5e"),
        (("--target", "h100"), "v5e"),
        (("--max-memory-gb", "0.0001"), "GB more than"),
        (("--expected-output", "0"), "--expected-output"),
        (("--max-padding", "0.9"), "--max-padding: expected at least 1"),
        (("--max-padding", "1.0001"), "got at least"),
        (("--layout", "data-parallel@data=2"), "devices"),
        (("--calibration", __file__), "expected a calibration in JSON, got: "),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_remedy(noria, source, arguments, message):
    options = ("--model", noria.model, "--workload", source, "-o", source.with_name("no.toml"))
    assert message in noria.refuse("plan", *options, *arguments)
    assert not source.with_name("no.toml").exists()


def test_the_best_layout_of_several_devices_is_chosen_and_the_others_ranked(noria, source):
    path, report, summary = plan(noria, source, "--target", "cpu:4", "--tries", "2")
    written = tomllib.loads(path.read_text("utf-8"))
    ranked = [one for one in report["layouts"] if one["rank"] is not None]
    assert written["layout"] == ranked[0]["name"]
    assert len(ranked) > 5
    seconds = [one["seconds"] for one in ranked]
    assert seconds == sorted(seconds)
    for one in ranked:
        assert one["bound"] <= one["seconds"]
        assert sum(one["seconds_by_cause"].values()) == pytest.approx(one["run_seconds"])
        assert one["binds"] == max(one["seconds_by_cause"], key=one["seconds_by_cause"].get)
        assert one["memory_bytes"]["weights"] and one["memory_bytes"]["working"]
    assert any("along" in cause for one in ranked for cause in one["seconds_by_cause"])
    assert report["search"]["simulated"] >= len(ranked)
    assert "why        " in summary and "outside    not searched" in summary
    page = path.with_suffix("").joinpath("report.html").read_text("utf-8")
    assert "Layouts by cause of their seconds" in page
    refused = [one for one in report["layouts"] if one["rank"] is None]
    assert refused and all(one["findings"] for one in refused)
    assert f"{written['layout']} (" in summary
    output = source.with_name("on-four.jsonl")
    arguments = ("-i", source, "-o", output, "--model", noria.model, "--plan", path)
    noria.run("batch", *arguments)
    assert read_manifest(output)["rows"]["ok"] == 80


def test_a_job_in_which_rows_were_refused_can_be_planned_again(noria, source):
    rows = [completion(f"ok-{i}", [5, 6, 7], max_tokens=4) for i in range(6)]
    rows += [completion("long", list(range(3, 120)), max_tokens=4)]
    job = write_lines(source.with_name("refused.jsonl"), rows)
    path, _, _ = plan(noria, write_lines(source.with_name("short.jsonl"), rows[:6]))
    done = source.with_name("refused-out.jsonl")
    arguments = ("-i", job, "-o", done, "--model", noria.model, "--plan", path)
    noria.run("batch", *arguments, expect=1)
    _, report, _ = plan(noria, job, "--from-output", done)
    known = report["comparison"]["plan of the run"]
    ran = read_manifest(done)["generator"]["padding"]
    assert {name: known[name] for name in PADDING} == {name: ran[name] for name in PADDING}
    assert report["workload"]["refused"] == 1


def test_lengths_are_known_from_merged_parts_and_learned_from_one(noria, source, output):
    whole = read_manifest(output)["output_tokens"]
    parts = [source.with_name(f"part{i}.jsonl") for i in range(2)]
    for i, part in enumerate(parts):
        options = ("-i", source, "-o", part, "--model", noria.model, "--dtype", "float32")
        noria.run("batch", *options, "--rows", f"{i}/2")
    merged = source.with_name("merged.jsonl")
    noria.run("merge", *parts, "-o", merged)
    _, report, _ = plan(noria, source, "--from-output", merged, "--chunks", "never")
    assert report["workload"]["expected_output_tokens"] == whole
    assert "plan of the run" in report["comparison"]
    _, report, _ = plan(noria, source, "--from-output", parts[0], "--chunks", "never")
    assert report["workload"]["rows"] == 80 and "plan of the run" not in report["comparison"]
    learned = report["workload"]["expected_output_tokens"]
    assert abs(learned - whole) < 0.25 * whole


def test_lengths_are_learned_from_the_output_of_another_job(noria, source, output):
    other = write_lines(source.with_name("other.jsonl"), [completion("a", [5, 6], max_tokens=99)])
    _, report, _ = plan(noria, other, "--from-output", output, "--chunks", "never")
    assert 0 < report["workload"]["expected_output_tokens"] <= 40


@pytest.mark.slow
def test_a_calibration_is_made_on_the_target_and_used_for_no_other(noria, source):
    path = source.with_name("calibration.json")
    result = noria.run("bench", "--model", noria.model, "--calibration", path)
    assert "median error" in result.stdout
    found = json.loads(path.read_text("utf-8"))
    assert all(kind["factors"] for kind in found["kinds"].values())
    _, report, summary = plan(noria, source, "--calibration", path)
    assert report["calibration"] == found
    assert "evidence   calibration calibration.json" in summary
    arguments = ("--model", noria.model, "--workload", source, "-o", source.with_name("no.toml"))
    arguments += ("--calibration", path, "--dtype", "bfloat16")
    assert "Calibrate again" in noria.refuse("plan", *arguments)
