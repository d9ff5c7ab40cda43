"""Plans that keep the codes of GGUF files: a format for each parameter, exact for its tensors."""

import re

import gguf
import numpy as np
import pytest
from gguf_writer import build, f32, llama_metadata, stored_rows
from laid_out import VOCAB, LaidOut, layout_of
from test_published_weights import KEEP, ON_DEVICES, forward, load, numbers_of
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.plan import Numbers
from noria.modelzoo.weights.weight_formats import BYTE_DTYPES
from noria.runtime.checkpoint import open_model
from noria.runtime.checkpoint.description import describe
from noria.runtime.checkpoint.formats.gguf_codes import CODES
from noria.runtime.checkpoint.published_numbers import keep_published

GGML_TYPES = gguf.GGMLQuantizationType
EMBED, KEYS = 256, 64
SHAPES = {
    "token_embd": (VOCAB, EMBED),
    "output": (VOCAB, EMBED),
    "blk.0.attn_q": (EMBED, EMBED),
    "blk.0.attn_k": (KEYS, EMBED),
    "blk.0.attn_v": (KEYS, EMBED),
    "blk.0.attn_output": (EMBED, EMBED),
    "blk.0.ffn_gate": (EMBED, EMBED),
    "blk.0.ffn_up": (EMBED, EMBED),
    "blk.0.ffn_down": (EMBED, EMBED),
}
NORMS = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
SIZES = {
    "embedding_length": EMBED,
    "feed_forward_length": EMBED,
    "context_length": 64,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
}
Q4_K_M = {"blk.0.attn_v": "Q6_K", "blk.0.ffn_down": "Q6_K", "output": "Q6_K"}
"""The types of llama.cpp's mix of this name, where they differ from Q4_K."""


def saved(path, kind: str, others: dict[str, str], head_norm: float = 1.0):
    """Write a small Llama whose matrices have a type, except those in `others`."""
    metadata = [*llama_metadata([f"token{i}" for i in range(VOCAB)])]
    metadata += [(f"llama.{key}", 4, value) for key, value in SIZES.items()]
    metadata += [("llama.attention.layer_norm_rms_epsilon", 6, 1e-5)]
    norms = dict.fromkeys(NORMS, 1.0) | {"output_norm": head_norm}
    tensors = [f32(f"{norm}.weight", np.full(EMBED, weight)) for norm, weight in norms.items()]
    for name, shape in SHAPES.items():
        of_name = others.get(name, kind)
        number = int(gguf.GGMLQuantizationType[of_name])
        data = np.ascontiguousarray(stored_rows(of_name, shape))
        tensors.append((f"{name}.weight", shape, number, data.tobytes()))
    path.write_bytes(build(metadata, tensors).data)
    return path


def formats_of(path) -> dict[str, str]:
    with open_model(path) as files:
        rules = keep_published(KEEP, files).weight_rules
        found = LaidOut(files.spec.config, weight_rules=rules).definition.quantisations
    return {name: str(quantisation.format) for name, quantisation in found.items()}


@pytest.mark.parametrize("kind", CODES)
def test_a_plan_keeps_the_codes_of_each_type(tmp_path, kind):
    path = saved(tmp_path / "m.gguf", kind, {})
    kept, plain = load(path), load(path, Numbers("float32"))
    form = CODES[kind].format
    assert {str(x.format) for x in kept.definition.quantisations.values()} == {str(form)}
    assert len(kept.definition.quantisations) == 6
    assert kept.parameters["layers.0.mlp.down"].dtype == BYTE_DTYPES[form.codes]
    found = numbers_of(kept)
    for name, values in numbers_of(plain).items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_a_mix_of_types_has_a_format_for_each_parameter(tmp_path):
    k4 = "uint4 in groups of 32 with offsets, scales in float32"
    k6 = "int8 in groups of 16, scales in float32"
    assert formats_of(saved(tmp_path / "m.gguf", "Q4_K", Q4_K_M)) == {
        "embedding.table": k4,
        # values of Q6_K beside queries and keys of Q4_K
        "layers.0.attention.qkv": "int8 in groups of 16 with offsets, scales in float32",
        "layers.0.attention.output": k4,
        "layers.0.mlp.gate_up": k4,
        "layers.0.mlp.down": k6,
        "head.table": k6,
    }


def test_a_parameter_with_a_float_part_is_float(tmp_path):
    found = formats_of(
        saved(tmp_path / "m.gguf", "Q8_0", {"blk.0.attn_v": "F16", "token_embd": "F32"})
    )
    missing = {"layers.0.attention.qkv", "embedding.table"}
    assert len(found) == 4 and not missing & found.keys()


@pytest.mark.parametrize("layout", [None, ON_DEVICES], ids=["one device", "8 devices"])
def test_a_mix_of_types_loads_exactly_on_devices(tmp_path, layout):
    """Queries and keys of Llama have another order of rows in GGUF."""
    path = saved(tmp_path / "m.gguf", "Q4_K", Q4_K_M)
    with open_model(path) as files:
        laid = LaidOut(files.spec.config, layout and layout_of(layout))
    kept, plain = (load(path, numbers, laid) for numbers in (KEEP, Numbers("float32")))
    found = numbers_of(kept)
    for name, values in numbers_of(plain).items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    if layout is None:
        answers = [forward(x.config, x.weight_rules)(x.parameters) for x in (kept, plain)]
        np.testing.assert_allclose(*answers, rtol=0, atol=FLOAT32_MODEL_LOGPROB)


def test_the_embedded_model_keeps_its_codes():
    with open_model("smollm2") as files:
        found = keep_published(KEEP, files).published
        numbers = files.tensors.read("blk.3.ffn_down.weight", (slice(0, 64), slice(0, 512)))
        codes, scales, offsets = (
            files.tensors.part(part).read("blk.3.ffn_down.weight", (slice(0, 64), slice(0, 512)))
            for part in ("codes", "scales", "offsets")
        )
    np.testing.assert_array_equal(codes * scales + offsets, numbers)
    q4_1 = {"codes": "uint4", "group": 32, "scales": "float16", "offsets": True}
    assert found["layers.*.mlp.down"] == q4_1 and found["layers.*.attention.output"] == q4_1


def test_the_report_says_what_a_plan_would_keep(tmp_path):
    with open_model(saved(tmp_path / "m.gguf", "Q4_K", Q4_K_M)) as files:
        text = describe(files)
    kept = r"uint4 with offsets \(blocks of 32\) in 6, int8 \(blocks of 16\) in 3, float in 3"
    assert re.search(rf"as published +{kept}", text)


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ3_S", "IQ4_NL", "IQ4_XS", "MXFP4", "TQ1_0"])
def test_log_probabilities_are_those_of_transformers_which_reads_the_same_file(tmp_path, kind):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rows = gguf.quants.dequantize(stored_rows(kind, SHAPES["output"]), GGML_TYPES[kind])
    # logits of a usual size, whatever the scales of the blocks
    head_norm = float(2 / (rows.std() * EMBED**0.5))
    path = saved(tmp_path / "m.gguf", kind, {}, head_norm)
    loaded = load(path, Numbers("float32"))
    found = forward(loaded.config, loaded.weight_rules)(loaded.parameters)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    )
    with torch.no_grad():
        logits = model.eval()(torch.arange(3, 11)[None]).logits[0]
    expected = torch.log_softmax(logits, -1).numpy()
    assert expected.std() > 1
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=FLOAT32_MODEL_LOGPROB)
