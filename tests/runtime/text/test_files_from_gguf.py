"""The tokenizer files of a GGUF vocabulary are read as the same tokenizer."""

import pytest
from numerics_helpers import embedded_file

from noria.runtime.checkpoint.formats.gguf import GGUFFile
from noria.runtime.errors import InvalidTokenizer
from noria.runtime.text.gguf_vocabulary import files_from_gguf, tokenizer_from_gguf
from noria.runtime.text.load_tokenizer import load_tokenizer

TEXTS = (
    "The water wheel turns.",
    "  12 345,6\n\n\tx = [1, 2]",
    "<|im_start|>user\nhéllo wörld ☂ 東京<|im_end|>\n",
)


def test_the_files_of_the_embedded_model_encode_as_its_metadata(tmp_path):
    metadata = GGUFFile(embedded_file()).metadata
    for name, content in files_from_gguf(metadata).items():
        (tmp_path / name).write_bytes(content)
    wanted, got = tokenizer_from_gguf(metadata), load_tokenizer(tmp_path)
    assert wanted is not None and got is not None
    for text in TEXTS:
        for special_tokens in (False, True):
            ids = wanted.encode(text, special_tokens=special_tokens)
            assert got.encode(text, special_tokens=special_tokens) == ids
    for name in ("vocab_size", "bos_id", "eos_id", "add_bos", "named_tokens"):
        assert getattr(got, name) == getattr(wanted, name)
    assert got.chat_templates["default"].text == wanted.chat_templates["default"].text


def test_a_vocabulary_that_cannot_be_written_is_refused():
    assert files_from_gguf({}) == {}
    with pytest.raises(InvalidTokenizer, match="Start from the published directory"):
        files_from_gguf({"tokenizer.ggml.model": "llama"})
