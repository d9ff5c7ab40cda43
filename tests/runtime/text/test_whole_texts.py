"""Texts to embed get the special tokens of the tokenizer's template, as the library adds them."""

import json

import pytest
import tokenizers
from word_pieces import write_word_pieces

from noria.runtime.embedding.texts import EncodedText
from noria.runtime.errors import RowError
from noria.runtime.text.load_tokenizer import load_tokenizer


@pytest.fixture
def word_pieces(tmp_path):
    """A directory with a tokenizer of BERT."""
    write_word_pieces(tmp_path)
    return tmp_path


def test_a_text_and_a_pair_have_the_ids_and_types_of_the_template(word_pieces):
    tokenizer = load_tokenizer(word_pieces)
    library = tokenizers.Tokenizer.from_file(str(word_pieces / "tokenizer.json"))
    texts = ["The Wheels turn", ("water", "the wheel turns"), "", "zzz [SEP] water"]
    found = tokenizer.encode_whole(texts)
    for text, ours in zip(texts, found, strict=True):
        expected = library.encode(*([text] if isinstance(text, str) else text))
        assert ours == EncodedText(tuple(expected.ids), expected.type_ids.count(0))
    assert found[1].num_first == 3 < len(found[1].ids)


def test_texts_and_pairs_are_cut_as_the_library_cuts_them(word_pieces):
    tokenizer = load_tokenizer(word_pieces)
    library = tokenizers.Tokenizer.from_file(str(word_pieces / "tokenizer.json"))
    texts = ["The Wheels turn water", ("water wheel", "the wheel turns by"), "", "water"]
    limits = [4, 6, 3, None]
    found = tokenizer.encode_whole(texts, limits)
    for text, limit, ours in zip(texts, limits, found, strict=True):
        given = [text] if isinstance(text, str) else text
        library.no_truncation()
        num_all = len(library.encode(*given).ids)
        if limit is not None:
            library.enable_truncation(limit)
        expected = library.encode(*given)
        assert ours == EncodedText(
            tuple(expected.ids), expected.type_ids.count(0), num_all - len(expected.ids)
        )
    assert [text.num_cut for text in found] == [3, 4, 0, 0]
    assert tokenizer.encode_whole(texts) == [
        each._replace(num_cut=0) for each in tokenizer.encode_whole(texts, [99] * 4)
    ]
    (error,) = tokenizer.encode_whole(["water"], [2])
    assert isinstance(error, RowError) and error.param == "truncate_prompt_tokens"


def test_word_pieces_are_decoded_as_words(word_pieces):
    tokenizer = load_tokenizer(word_pieces)
    assert tokenizer.decode([8, 5, 6, 7], skip_special_tokens=True) == "the wheels turn"


def test_a_text_that_is_no_unicode_is_an_error_of_its_own(word_pieces):
    good, bad = load_tokenizer(word_pieces).encode_whole(["water", ("water", "\ud800")])
    assert good.ids == (1, 4, 2) and isinstance(bad, RowError)


def test_settings_add_the_ends_that_the_template_does_not_have(word_pieces):
    file = json.loads((word_pieces / "tokenizer.json").read_text())
    (word_pieces / "tokenizer.json").write_text(json.dumps(file | {"post_processor": None}))
    (word_pieces / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": "[CLS]",
                "eos_token": "[SEP]",
                "add_bos_token": True,
                "add_eos_token": True,
            }
        )
    )
    tokenizer = load_tokenizer(word_pieces)
    text, ended = tokenizer.encode_whole(["water", "water [SEP]"])
    assert text == EncodedText((1, 4, 2), 3) and ended == EncodedText((1, 4, 2), 3)
    # the ends need room beside the first tokens
    (cut,) = tokenizer.encode_whole(["water the wheel turns"], [4])
    assert cut == EncodedText((1, 4, 8, 2), 4, num_cut=3)
    # prompts to continue never end
    assert tokenizer.encode("water", special_tokens=True) == [1, 4]
