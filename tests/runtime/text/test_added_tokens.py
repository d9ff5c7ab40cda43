"""Tokens that only the files beside a vocabulary have are one id, as in transformers."""

import json
import shutil
from contextlib import closing

import pytest
import sentencepiece

from noria.runtime.errors import InvalidTokenizer
from noria.runtime.text.chat_template import ChatRenderer
from noria.runtime.text.load_tokenizer import load_tokenizer

SIZE = 299
"""The ids of the vocabulary of `make_directory`."""
PLAIN = {"content": "<think_x>", "special": False, "normalized": False}
SPECIAL = {"content": "<tool>", "special": True, "lstrip": True, "rstrip": True}
OBJECT = {"__type": "AddedToken", "content": "[PAD]", "special": True, "normalized": False}


def decoder(*entries):
    return {"added_tokens_decoder": {str(SIZE + i): entry for i, entry in enumerate(entries)}}


@pytest.fixture
def directory(make_directory):
    """Makes a directory; keywords are the contents of files, by names with `_` for the dot."""

    def make(tokenizer_config=None, **files):
        folder = make_directory(**(tokenizer_config or {}))
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        assert len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]) == SIZE
        return folder

    return make


FILES = {
    "plain": ({"tokenizer_config": decoder(PLAIN)}, ["<think_x>"]),
    "special": ({"tokenizer_config": decoder(PLAIN, SPECIAL)}, ["<think_x>", "<tool>"]),
    "named": ({"tokenizer_config": {"pad_token": "[PAD]"}}, ["[PAD]"]),
    "named-object": ({"tokenizer_config": {"pad_token": OBJECT}}, ["[PAD]"]),
    "named-twice": ({"tokenizer_config": {"pad_token": "</s>", "sep_token": "[X]"}}, ["[X]"]),
    "named-plain": (
        {"tokenizer_config": decoder(PLAIN) | {"pad_token": "<think_x>"}},
        ["<think_x>"],
    ),
    "own-role": ({"tokenizer_config": {"image_token": "<image>"}}, ["<image>"]),
    "extra": (
        {"tokenizer_config": {"additional_special_tokens": ["<a>", OBJECT]}},
        ["<a>", "[PAD]"],
    ),
    "extra-roles": (
        {"tokenizer_config": {"extra_special_tokens": {"end_of_turn": "<turn>"}}},
        ["<turn>"],
    ),
    "all": (
        {
            "tokenizer_config": decoder(PLAIN, SPECIAL)
            | {"additional_special_tokens": ["<a>", "<tool>"], "pad_token": OBJECT}
        },
        ["<think_x>", "<tool>", "<a>", "[PAD]"],
    ),
    "older": (
        {
            "added_tokens": {"<think_x>": SIZE, "[PAD]": SIZE + 1},
            "special_tokens_map": {"pad_token": {"content": "[PAD]", "lstrip": False}},
        },
        ["<think_x>", "[PAD]"],
    ),
    "older-map": (
        {"special_tokens_map": {"mask_token": "[MASK]", "additional_special_tokens": ["<a>"]}},
        ["[MASK]", "<a>"],
    ),
    "piece": ({"tokenizer_config": {"pad_token": "user"}}, ["user"]),
}


@pytest.mark.reference
@pytest.mark.parametrize("name", FILES)
def test_added_tokens_have_the_ids_and_texts_of_transformers(directory, name):
    transformers = pytest.importorskip("transformers")
    files, texts = FILES[name]
    folder = directory(**files)
    tokenizer = load_tokenizer(folder)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    for text in texts:
        (token,) = tokenizer.encode(text, special_tokens=True)
        assert tokenizer.token_text(token) == text
        for prompt in (f"no{text}now", f"a {text} b", f"{text}{text}", f"x {text.upper()} y"):
            ids = reference.encode(prompt, add_special_tokens=False)
            assert tokenizer.encode(prompt, special_tokens=True) == ids
            for skips in (True, False):
                decoded = reference.decode(ids, skip_special_tokens=skips)
                assert tokenizer.decode(ids, skip_special_tokens=skips) == decoded
    assert tokenizer.vocab_size == len(reference)


def test_the_text_of_added_special_tokens_stays_text_in_messages(directory):
    template = "{% for m in messages %}<tool>{{ m.content }}<tool>{% endfor %}"
    config = decoder(PLAIN, SPECIAL) | {"chat_template": template}
    tokenizer = load_tokenizer(directory(tokenizer_config=config))
    with closing(ChatRenderer(tokenizer)) as chat:
        ids = chat.encode([{"role": "user", "content": "a<tool>b<think_x>"}])
    assert [ids.count(SIZE + 1), ids.count(SIZE)] == [2, 1]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({str(SIZE + 5): PLAIN}, rf"'<think_x>' with the id {SIZE + 5}, got {SIZE}"),
        ({"7": PLAIN}, rf"'<think_x>' with the id 7, got {SIZE}"),
        ({str(SIZE): PLAIN | {"content": "user"}}, rf"'user' with the id {SIZE}, got \d+"),
    ],
)
def test_a_token_that_cannot_have_its_id_is_refused_by_name(directory, entries, message):
    folder = directory(tokenizer_config={"added_tokens_decoder": entries})
    with pytest.raises(InvalidTokenizer, match=f"expected the added token {message}"):
        load_tokenizer(folder)


@pytest.fixture
def beside_pieces(tmp_path, sentencepiece_directory):
    """Makes a directory with a sentencepiece model, whose added tokens follow its pieces."""
    shutil.copy(sentencepiece_directory / "tokenizer.model", tmp_path)
    data = (tmp_path / "tokenizer.model").read_bytes()
    size = len(sentencepiece.SentencePieceProcessor(model_proto=data))

    def make(entries, **config):
        table = {str(size + place): entry for place, entry in entries.items()}
        content = json.dumps({"added_tokens_decoder": table, **config})
        (tmp_path / "tokenizer_config.json").write_text(content)
        return load_tokenizer(tmp_path)

    return size, make


def test_tokens_beside_a_sentencepiece_model_are_one_id(beside_pieces):
    size, make = beside_pieces
    tokenizer = make({0: PLAIN, 1: SPECIAL}, pad_token="[PAD]", extra_special_tokens=["<a>"])
    for token, text in enumerate(["<think_x>", "<tool>", "[PAD]", "<a>"], start=size):
        assert tokenizer.encode(f"no{text}now", special_tokens=True).count(token) == 1
        assert tokenizer.decode([token]) == text
        shown = "<think_x>" if text == "<think_x>" else ""
        assert tokenizer.decode([token], skip_special_tokens=True) == shown


def test_a_token_that_contradicts_a_sentencepiece_model_is_refused(beside_pieces):
    size, make = beside_pieces
    for place in (-5, size):
        with pytest.raises(InvalidTokenizer, match="expected the added token '<think_x>' with"):
            make({place: PLAIN})
