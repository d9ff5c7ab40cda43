"""A writer of small GGUF files for tests, which can also lie about any field."""

import math
import struct
from dataclasses import dataclass, field

import gguf
import numpy as np
from gguf import quants

SCALAR_LETTERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass
class Writer:
    """Collects bytes, and records the start and width of each header field."""

    data: bytearray = field(default_factory=bytearray)
    fields: list[tuple[str, int, int]] = field(default_factory=list)

    def put(self, what, letter, value):
        self.fields.append((what, len(self.data), struct.calcsize(letter)))
        self.data += struct.pack(f"<{letter}", value)

    def text(self, what, value):
        raw = value if isinstance(value, bytes) else value.encode()
        self.put(f"{what} length", "Q", len(raw))
        self.fields.append((what, len(self.data), len(raw)))
        self.data += raw

    def value(self, kind, value):
        self.put("value type", "I", kind)
        if kind == 8:
            self.text("text", value)
        elif kind == 9:
            inner, items = value
            self.put("element type", "I", inner)
            self.put("array length", "Q", len(items))
            for item in items:
                if inner == 8:
                    self.text("item", item)
                else:
                    self.put("item", SCALAR_LETTERS[inner], item)
        else:
            self.put("value", SCALAR_LETTERS[kind], value)


def build(metadata=(), tensors=(), *, version=3, magic=b"GGUF", alignment=32):
    """Return a file of metadata (key, kind, value) and tensors (name, shape, type, bytes)."""
    out = Writer()
    out.fields.append(("magic", 0, 4))
    out.data += magic
    out.put("version", "I", version)
    out.put("tensor count", "Q", len(tensors))
    out.put("key count", "Q", len(metadata))
    for key, kind, value in metadata:
        out.text("key", key)
        out.value(kind, value)
    offset = 0
    for name, shape, kind, data in tensors:
        out.text("tensor name", name)
        out.put("rank", "I", len(shape))
        for axis in reversed(shape):
            out.put("axis", "Q", axis)
        out.put("tensor type", "I", kind)
        out.put("offset", "Q", offset)
        offset = math.ceil((offset + len(data)) / alignment) * alignment
    for _, _, _, data in tensors:
        out.data += bytes(-len(out.data) % alignment) + data
    return out


def llama_metadata(vocab=("a", "b", "</s>")):
    """Return metadata of a tiny file in the form of published files."""
    return [
        ("general.architecture", 8, "llama"),
        ("general.name", 8, "Tiny"),
        ("llama.block_count", 4, 1),
        ("llama.rope.freq_base", 6, 10000.0),
        ("tokenizer.ggml.model", 8, "gpt2"),
        ("tokenizer.ggml.tokens", 9, (8, list(vocab))),
        ("tokenizer.ggml.token_type", 9, (5, [1] * len(vocab))),
        ("tokenizer.ggml.scores", 9, (6, [0.0] * len(vocab))),
        ("tokenizer.ggml.eos_token_id", 4, 2),
        ("tokenizer.ggml.add_bos_token", 7, 0),
        ("tokenizer.chat_template", 8, "{{ messages }}"),
    ]


def f32(name, array):
    array = np.asarray(array, "<f4")
    return name, array.shape, 0, array.tobytes()


def stored_rows(kind, shape):
    """Return a random tensor's bytes: quantised by gguf if it can, otherwise valid blocks."""
    rng = np.random.default_rng(sum(shape))
    number = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    try:
        data = quants.quantize(rng.standard_normal(shape, np.float32), number)
        return data.view(np.uint8)
    except NotImplementedError:
        data = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, block_bytes), np.uint8)
        # the scales are halves and must be finite: one or two at the front or the end of a block
        scales = rng.uniform(0.01, 1, (*data.shape[:-1], 2)).astype("<f2").view(np.uint8)
        ends = {"Q6_K": slice(-2, None), "Q3_K": slice(-2, None), "Q2_K": slice(-4, None)}
        place = ends.get(kind, slice(0, 4))
        if kind == "IQ1_M":  # the scale has four bits in each of the last four pairs of bytes
            data[..., -1] = data[..., -1] & 0x0F | 0x30
        else:
            data[..., place] = scales[..., : data[..., place].shape[-1]]
        return data.reshape(*shape[:-1], -1)
