"""The devices that a plan may run on, and the platforms that jax may start."""

from types import SimpleNamespace

import jax
import pytest
import tokenizers
from model_on_disk import write_model
from tiny import GRID

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.compile.targets import Target, find_target
from noria.runtime.checkpoint import GenerationDefaults, open_model
from noria.runtime.devices.backends import prepare_jax
from noria.runtime.errors import InvalidConfig
from noria.runtime.plans.plan_checks import check_layout, check_target
from noria.runtime.session import LoadOptions, eos_ids, load_model


def plan_for(target: str) -> Plan:
    return Plan(target, PlannedModel("tiny", ""), Numbers("bfloat16"), GRID)


def present(name: str, platform: str, count: int) -> Target:
    return Target(name, platform, tuple(range(count)), is_present=True)


@pytest.mark.parametrize(
    ("planned", "found"),
    [
        ("tpu:v5e:2x4", present("tpu:8", "tpu", 8)),
        ("gpu:h100:8", present("gpu:8", "gpu", 8)),
        ("cpu", present("cpu", "cpu", 1)),
    ],
)
def test_a_plan_for_a_topology_runs_on_as_many_devices_of_its_platform(planned, found):
    check_target(plan_for(planned), found)


@pytest.mark.parametrize(
    ("planned", "found"),
    [
        ("tpu:v5e:2x4", present("tpu:4", "tpu", 4)),
        ("tpu:v5e:2x4", present("cpu:8", "cpu", 8)),
        ("cpu", present("cpu:2", "cpu", 2)),
    ],
)
def test_a_plan_for_other_devices_is_refused_by_name(planned, found):
    with pytest.raises(ValueError, match=f"expected {found.name}, got {planned}"):
        check_target(plan_for(planned), found)


@pytest.mark.parametrize(
    ("target", "starts"),
    [
        ("cpu", {"jax_platforms": "cpu"}),
        ("gpu:h100:8", {}),
        ("tpu:v5e:2x4", {}),
        ("gpu:8", {}),
        ("tpu", {}),
    ],
)
def test_jax_starts_no_other_backend_for_what_is_not_to_run_on_one(target, starts, monkeypatch):
    set_by_us = {}
    values = {"jax_platforms": None, "jax_num_cpu_devices": 0}
    config = SimpleNamespace(values=values, update=set_by_us.__setitem__)
    monkeypatch.setattr(jax, "config", config)
    prepare_jax(target)
    assert set_by_us == starts


@pytest.mark.parametrize("groups", [1, 2, None])
def test_slots_in_groups_need_the_layout_that_has_them(groups):
    """On one device all slots take pages of one pool."""
    grid = BucketGrid(64, ((16, 1),), 4, slot_groups=groups)
    one = present("cpu", "cpu", 1)
    if groups != 2:
        check_layout(None, None, one, grid)
        return
    with pytest.raises(ValueError, match=r"slot_groups: without a layout, expected 1, .* got 2"):
        check_layout(None, None, one, grid)


def files_of(*end_ids: int, vocab_size: int = 100):
    spec = SimpleNamespace(config=SimpleNamespace(vocab_size=vocab_size))
    defaults = GenerationDefaults(tuple(end_ids), eos_source="config.json: eos_token_id")
    return SimpleNamespace(name="tiny", generation_defaults=defaults, spec=spec)


def tokenizer_of(**changes):
    return SimpleNamespace(**{"eos_id": 7, "bos_id": 1, "add_bos": True} | changes)


def test_every_end_token_of_the_files_counts_and_else_that_of_the_tokenizer():
    assert eos_ids(files_of(2, 99), tokenizer_of()) == (2, 99)
    assert eos_ids(files_of(), tokenizer_of()) == (7,)
    assert eos_ids(files_of(), tokenizer_of(eos_id=None, bos_id=None, add_bos=False)) == ()
    assert eos_ids(files_of(), None) == ()


@pytest.mark.parametrize(
    ("ends", "tokenizer", "where"),
    [
        ((2, 100), tokenizer_of(), "config.json: eos_token_id"),
        ((100,), None, "config.json: eos_token_id"),
        ((), tokenizer_of(eos_id=100), "the tokenizer's eos_token"),
        ((2,), tokenizer_of(bos_id=100), "the tokenizer's bos_token"),
    ],
)
def test_a_tokenizer_of_another_model_is_refused_by_the_ids_that_this_one_lacks(
    ends, tokenizer, where
):
    message = rf"tiny: .*model's 100 ids, got \[100\] in {where}.*one model"
    with pytest.raises(InvalidConfig, match=message):
        eos_ids(files_of(*ends), tokenizer)


def test_tokens_beyond_the_embedding_are_named_once_as_the_model_is_loaded(tmp_path):
    vocab_size = write_model(tmp_path / "tiny")
    path = tmp_path / "tiny" / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    target, said = find_target("cpu"), []
    with open_model(str(path.parent)) as files:
        load_model(files, target, LoadOptions("float32"), say=said.append)
    assert not said
    backend.add_special_tokens(["<image>", "<audio>"])
    backend.save(str(path))
    with open_model(str(path.parent)) as files:
        model = load_model(files, target, LoadOptions("float32"), say=said.append)
    assert said == [
        f"tokenizer: 2 tokens beyond the {vocab_size} ids of the model, such as '<image>' "
        f"({vocab_size}); rows that need such a token end as errors"
    ]
    assert model.tokenizer is not None
    assert model.tokenizer.encode("<image>", special_tokens=True) == [vocab_size]
