"""Communication derived from rules, against published formulas, and its consequences."""

import math
import re
from collections import Counter
from pathlib import Path

import pytest
from alike import alike, changed
from decode_steps import step_of
from published_communication import FORMULAS, LayerSizes

from noria.modelzoo.config import DecoderConfig
from noria.runtime.checkpoint import open_model
from noria.runtime.files.layout_files import named_layout_tables
from noria.sharding.call import Call
from noria.sharding.communication import predict_collectives, sent_bytes
from noria.sharding.layout import Layout

ITEMSIZE = 2
ROOT = Path(__file__).resolve().parents[2]
CONFIG = DecoderConfig.alike(
    vocab_size=1024,
    embed=512,
    mlp=1536,
    num_query_heads=16,
    num_kv_heads=8,
    head_dim=64,
    windows=(None,) * 3,
    max_position=2048,
)
CALLS = {"prefill": Call("prefill", 8, 256, 256), "decode": step_of(64, 512)}
NUM_KV_HEADS = {
    "weight-stationary-1d-kv-copies": 2,
    "weight-stationary-1d-batch-attention": 4,
    "data-tensor-batch-attention": 2,
}

WRITTEN = {
    "data-parallel": (("data",), 2**21),
    "weight-stationary-1d-batch-attention": (("tensor",), 2**20),
    "weight-stationary-2d": (("data",), 2**19),
    "weight-gathered": (("data",), 2**19),
    "weight-gathered-all": (("data", "tensor"), 2**21),
    "data-tensor": (("data",), 2**19),
    "data-tensor-batch-attention": (("data", "tensor"), 2**19),
    "ring-data-expert": (("data",), 2**19),
}
"""Gathers of keys and values over the devices that split rows or heads, as each device has other
slots of the cache; published formulas leave them out. Each layout has the mesh axes, and the bytes
of 8 rows of 256 tokens with the heads and tokens that a device writes, 64 entries of 2 bytes."""


def layout_of(name: str) -> Layout:
    return Layout.from_table(named_layout_tables()[name])


@pytest.mark.parametrize("phase", CALLS)
@pytest.mark.parametrize("name", FORMULAS)
def test_named_layouts_send_what_the_published_formulas_say(name, phase):
    layout, call = layout_of(name), CALLS[phase]
    config = changed(CONFIG, num_kv_heads=NUM_KV_HEADS.get(name, alike(CONFIG).num_kv_heads))
    sizes = LayerSizes.of(config, layout, call.rows, call.tokens, ITEMSIZE)
    wanted = Counter()
    for one in FORMULAS[name][phase](sizes, layout.mesh.sizes):
        wanted[one.kind, one.mesh_axes, one.num_bytes] += config.num_layers * one.times
    if phase == "prefill" and name in WRITTEN:
        wanted["all-gather", *WRITTEN[name]] += 2 * config.num_layers
    found = predict_collectives(config, layout, call, ITEMSIZE)
    assert Counter({(e.kind, e.mesh_axes, e.num_bytes): e.times for e in found}) == wanted


def test_the_page_about_experts_has_what_a_prefill_call_sends():
    """The table of docs/experts.md, whose rows are checked by their arithmetic."""
    page = (ROOT / "docs/experts.md").read_text("utf-8")
    found = re.findall(r"^\| (.+?) \| (?:(.+?) )?\| ([\d,.]+) MB \|$", page, re.MULTILINE)
    *parts, (_, _, total) = [(what, of, float(mb.replace(",", ""))) for what, of, mb in found]
    sent = {
        what: 7 / 8 * 48 * math.prod(int(n.replace(",", "")) for n in of.split(" x ")) / 1e6
        for what, of, _ in parts
    }
    assert [megabytes for *_, megabytes in parts] == [round(x, 1) for x in sent.values()]
    with open_model(ROOT / "benchmarks/models/qwen3-30b-a3b", needs_weights=False) as files:
        config = files.spec.config
    call = Call("prefill", 16, 512, 512)
    predicted = predict_collectives(config, layout_of("expert-parallel"), call, ITEMSIZE)
    every = sum(sent_bytes(one.kind, one.num_bytes * one.times, 8) for one in predicted) / 1e6
    assert total == round(every, 1) == round(sum(sent.values()), 1)
    assert f"alone are {2 * sent['tokens to experts']:,.1f} MB" in page
