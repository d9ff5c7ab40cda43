"""Prompts of rows become token ids: the last ones alone if the row asks for it."""

import json

import pytest

from noria.runtime.errors import RowError
from noria.runtime.files.strict_json import Line
from noria.runtime.rows.lines import BatchRow, read_row
from noria.runtime.rows.prompt_encoder import PromptEncoder
from noria.runtime.text.load_tokenizer import load_tokenizer

TEXT = "the water wheel turns, driven by the stream"
MAX_LENGTH = 20


def row(**body) -> BatchRow:
    found = read_row(Line(1, 0, json.dumps({"max_tokens": 4, **body}).encode()), 0)
    assert isinstance(found, BatchRow), found
    return found


def encode(encoder: PromptEncoder, **body) -> list[int]:
    (ids,) = encoder([row(**body)])
    if isinstance(ids, RowError):
        raise ids
    return list(ids)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate(["<s>", "</s>", *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    return folder


def encoder_of(directory, *, add_bos: bool) -> PromptEncoder:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    text = json.dumps(config | {"add_bos_token": add_bos})
    (directory / "tokenizer_config.json").write_text(text)
    return PromptEncoder(load_tokenizer(directory), max_length=lambda: MAX_LENGTH)


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("kept", [1, 2, 7, 20])
def test_the_last_tokens_of_a_text_are_those_of_a_left_truncation(directory, add_bos, kept):
    encoder = encoder_of(directory, add_bos=add_bos)
    whole = encode(encoder, prompt=TEXT)
    assert (whole[0] == 0) is add_bos and len(whole) > MAX_LENGTH
    expected = [*whole[:1], *whole[len(whole) - kept + 1 :]] if add_bos else whole[-kept:]
    found = encode(encoder, prompt=TEXT, truncate_prompt_tokens=kept)
    assert found == expected and len(found) == kept


def test_ids_are_cut_as_they_are_and_shorter_prompts_stay(directory):
    encoder = encoder_of(directory, add_bos=True)
    assert encode(encoder, prompt=[0, 7, 8, 9], truncate_prompt_tokens=2) == [8, 9]
    assert encode(encoder, prompt=[0, 7, 8, 9], truncate_prompt_tokens=4) == [0, 7, 8, 9]
    assert encode(encoder, prompt="ab", truncate_prompt_tokens=9) == encode(encoder, prompt="ab")


def test_minus_one_leaves_room_for_the_answer(directory):
    encoder, ids = encoder_of(directory, add_bos=False), list(range(2, 40))

    def length(**body) -> int:
        return len(encode(encoder, prompt=ids, truncate_prompt_tokens=-1, **body))

    assert length() == MAX_LENGTH - 4
    assert length(max_tokens=None) == MAX_LENGTH - 1
    assert length(max_tokens=None, min_tokens=6) == MAX_LENGTH - 6
    assert length(max_tokens=0, echo=True, logprobs=1) == MAX_LENGTH
    with pytest.raises(RowError, match=f"expected -1 or at most {MAX_LENGTH}, the maximum length"):
        encode(encoder, prompt=ids, truncate_prompt_tokens=MAX_LENGTH + 1)
