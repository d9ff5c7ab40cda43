"""Encoding and decoding equal the libraries' and the published files', for every format."""

import json
import random
import re
import subprocess
import sys
import time
import unicodedata

import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from noria.runtime.errors import InvalidTokenizer, RowError
from noria.runtime.text import gguf_vocabulary
from noria.runtime.text.load_tokenizer import load_tokenizer
from noria.runtime.text.special_tokens import SpecialTokens
from noria.runtime.text.tokenizer import Tokenizer

TEXTS = [
    "",
    "hello world",
    "  two  spaces ",
    "It's 12345 o'clock;\tDON'T\r\n\n  go",
    "日本語と한국어 и русский, a\u0301 ½ «q»",
    "🙂🏽‍🚀 <b>x</b> {}",
    "\u2028\x00\x7f \u00a0end",
]
CAPITAL = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def random_ids(tokenizer: Tokenizer, count: int = 200) -> list[list[int]]:
    draw = random.Random(0)
    return [
        [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(12))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("text", TEXTS)
def test_json_tokenizer_encodes_as_its_library(deepseek, deepseek_directory, text):
    library = tokenizers.Tokenizer.from_file(str(deepseek_directory / "tokenizer.json"))
    expected = library.encode(text, add_special_tokens=False).ids
    assert deepseek.encode(text, special_tokens=True) == expected
    assert deepseek.decode(expected, skip_special_tokens=True) == text


@pytest.mark.parametrize("skip", [True, False])
def test_json_tokenizer_decodes_any_ids_as_its_library(deepseek, deepseek_directory, skip):
    library = tokenizers.Tokenizer.from_file(str(deepseek_directory / "tokenizer.json"))
    for ids in random_ids(deepseek):
        expected = library.decode(ids, skip_special_tokens=skip)
        assert deepseek.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_tokenizer_encodes_as_its_library(mistral, sentencepiece_directory, text):
    path = str(sentencepiece_directory / "tokenizer.model")
    library = sentencepiece.SentencePieceProcessor(model_file=path)
    expected = library.encode(text)
    assert mistral.encode(text, special_tokens=False) == expected
    assert mistral.encode(text) == [mistral.bos_id, *expected]
    assert mistral.decode(expected, skip_special_tokens=True) == library.decode(expected)


def test_sentencepiece_tokenizer_decodes_any_ids_as_its_library(mistral, sentencepiece_directory):
    path = str(sentencepiece_directory / "tokenizer.model")
    library = sentencepiece.SentencePieceProcessor(model_file=path)
    for ids in random_ids(mistral):
        expected = library.decode(known := [token for token in ids if token])
        # the libraries differ in the number of U+FFFD for a broken character
        if "\ufffd" not in expected:
            assert mistral.decode(known, skip_special_tokens=True) == expected


def gguf_of_sentencepiece(library) -> dict[str, object]:
    def type_of(token: int) -> int:
        if library.is_unknown(token):
            return 2
        return 3 if library.is_control(token) else 6 if library.is_byte(token) else 1

    ids = range(library.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [library.id_to_piece(token) for token in ids],
        "tokenizer.ggml.scores": [library.get_score(token) for token in ids],
        "tokenizer.ggml.token_type": [type_of(token) for token in ids],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_gguf_scores_give_the_ids_of_the_sentencepiece_model(mistral, sentencepiece_directory):
    path = str(sentencepiece_directory / "tokenizer.model")
    library = sentencepiece.SentencePieceProcessor(model_file=path)
    from_gguf = load_tokenizer(gguf_of_sentencepiece(library))
    assert from_gguf is not None
    for text in [*TEXTS, "<s>[INST] hi [/INST]"]:
        for special in (True, False):
            ids = mistral.encode(text, special_tokens=special)
            assert from_gguf.encode(text, special_tokens=special) == ids
            assert from_gguf.decode(ids, skip_special_tokens=False) == mistral.decode(
                ids, skip_special_tokens=False
            )


def test_json_form_of_a_sentencepiece_model_gives_its_ids_and_texts(
    tmp_path, mistral, sentencepiece_directory
):
    # the usual conversion: merges are all ways to make a piece of two, best score first
    path = str(sentencepiece_directory / "tokenizer.model")
    library = sentencepiece.SentencePieceProcessor(model_file=path)
    pieces = [library.id_to_piece(token) for token in range(library.get_piece_size())]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    merges = [
        (-library.get_score(vocab[piece]), vocab[piece], left, right)
        for piece in pieces
        for left, right in ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        if left in vocab and right in vocab
    ]
    merges = [(left, right) for *_, left, right in sorted(merges, key=lambda merge: merge[:2])]
    model = tokenizers.models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([pieces[token] for token in sorted(mistral.special_ids)])
    backend.save(str(tmp_path / "tokenizer.json"))
    converted = load_tokenizer(tmp_path)
    assert converted is not None
    for text in [*TEXTS, "<s>[INST] hi [/INST]"]:
        ids = mistral.encode(text, special_tokens=False)
        assert converted.encode(text, special_tokens=False) == ids
        assert converted.decode(ids, skip_special_tokens=True) == text
    for ids in random_ids(converted):
        for skip in (True, False):
            decoded = converted.decode(ids, skip_special_tokens=skip)
            assert decoded == mistral.decode(ids, skip_special_tokens=skip)
            expected = backend.decode(ids, skip_special_tokens=skip)
            assert decoded == expected or "\ufffd" in expected


@pytest.fixture(scope="module")
def gguf_of_deepseek(deepseek_directory) -> dict[str, object]:
    file = json.loads((deepseek_directory / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = dict(file["model"]["vocab"])
    added = {entry["content"]: entry for entry in file["added_tokens"]}
    tokens |= {text: entry["id"] for text, entry in added.items()}
    ordered = sorted(tokens, key=lambda text: tokens[text])
    types = [1 if t not in added else 3 if added[t]["special"] else 4 for t in ordered]
    merges = [m if isinstance(m, str) else " ".join(m) for m in file["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "deepseek-v3",
        "tokenizer.ggml.tokens": ordered,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def test_gguf_merges_give_the_ids_of_the_json_tokenizer(deepseek, gguf_of_deepseek):
    from_gguf = load_tokenizer(gguf_of_deepseek | {"tokenizer.ggml.add_bos_token": False})
    assert from_gguf is not None
    for text in [*TEXTS, "a<｜end▁of▁sentence｜>b"]:
        for special in (True, False):
            ids = deepseek.encode(text, special_tokens=special)
            assert from_gguf.encode(text, special_tokens=special) == ids


def test_embedded_vocabulary_gives_the_known_ids(smollm2):
    ids = smollm2.encode(CAPITAL, special_tokens=True)
    assert ids[0] == 1 and ids[-4:] == [1, 520, 9531, 198]
    assert smollm2.decode(ids, skip_special_tokens=False) == CAPITAL
    answer = [504, 3575, 282, 4649, 314, 7042, 30]
    assert smollm2.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert smollm2.encode("The capital of France is Paris.", special_tokens=True) == answer


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("smollm", "it's 123  ok", ["it", "'s", " ", "1", "2", "3", " ", " ok"]),
        ("gpt-2", "it's 123  ok", ["it", "'s", " 123", " ", " ok"]),
        ("default", "it's 1234", ["it", "'", "s", " ", "123", "4"]),
        ("llama-bpe", "IT'S 1234\n\nok", ["IT", "'S", " ", "123", "4", "\n\n", "ok"]),
        ("qwen2", "IT'S 12", ["IT", "'S", " ", "1", "2"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("gpt-4o", "it's HelloWorld 1234", ["it's", " ", "Hello", "World", " ", "123", "4"]),
        ("dbrx", "IT'S 1234\n\nok", ["IT", "'S", " ", "123", "4", "\n\n", "ok"]),
        ("llama3", "IT'S 1234", ["IT", "'S", " ", "123", "4"]),
        ("llama-v3", "IT'S 1234", ["IT", "'S", " ", "123", "4"]),
        ("deepseek-r1-qwen", "IT'S 12", ["IT", "'S", " ", "1", "2"]),
        ("olmo", "it's 123  ok", ["it", "'s", " 123", " ", " ok"]),
        ("starcoder", "it's 123  ok", ["it", "'s", " ", "1", "2", "3", " ", " ok"]),
        ("refact", "it's 123  ok", ["it", "'s", " ", "1", "2", "3", " ", " ok"]),
        ("command-r", "it's 123  ok", ["it", "'s", " ", "1", "2", "3", " ", " ok"]),
        ("smaug-bpe", "IT'S 1234", ["IT", "'S", " ", "123", "4"]),
        ("deepseek-llm", "it's 123  ok", ["it", "'", "s", " ", "1", "2", "3", " ", " ok"]),
        ("deepseek-coder", "it's 123  ok", ["it", "'", "s", " ", "1", "2", "3", " ", " ok"]),
        ("deepseek-v3", "it's 1234 ok", ["it", "'s", " ", "123", "4", " ok"]),
    ],
)
def test_each_named_word_rule_cuts_as_its_family(pre, text, words):
    # every run of characters between two cuts merges into one token: the ids show the cuts
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    merged: dict[str, None] = {}
    merges: dict[str, None] = {}
    words_by_rank = ["IT", "'S", "it's", "it", "'s", " 123", "123", " ok", "ok", "\n\n"]
    for word in [*words_by_rank, "Hello", "World"]:
        visible = word.replace(" ", "Ġ").replace("\n", "Ċ")
        for end in range(2, len(visible) + 1):
            merges[f"{visible[: end - 1]} {visible[end - 1]}"] = None
            merged[visible[:end]] = None
    tokenizer = load_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": list(dict.fromkeys([*sorted(alphabet), *merged])),
            "tokenizer.ggml.merges": list(merges),
        }
    )
    assert tokenizer is not None
    ids = tokenizer.encode(text, special_tokens=True)
    assert [tokenizer.token_text(token) for token in ids] == words


DEEPSEEK_TEXTS = (
    "It's 2,024 années: 中文，日本語 3.5x!\r\n\tdef f(x):  return x**2  \n\n",
    "Ünïcode ǅ ΆΩΩ ʔa ªº ꭰ 𐐀 𝐀 한국어 ١٢٣ Ⅷ ½ ~~ «q» ‘x’ 。、",
    "  two  spaces   at the end  ",
)


def test_words_of_deepseek_are_those_of_the_published_rules():
    """The rules are those of the tokenizer.json of deepseek-llm-7b and deepseek-coder-6.7b."""
    library, split = tokenizers.pre_tokenizers, tokenizers.pre_tokenizers.Split
    cased = gguf_vocabulary._CASED_LETTERS
    rules = {
        "deepseek-llm": [f"\\s?[{cased}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$"],
        "deepseek-coder": [r"\s?\p{L}+", r"\s?\p{P}+"],
    }
    for name, own in rules.items():
        patterns = ["[\r\n]", *own, "[一-龥ࠀ-一가-퟿]+"]
        splits = [split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
        published = library.Sequence([*splits, library.Digits(individual_digits=True)])
        ours = library.Sequence(
            [
                split(tokenizers.Regex(pattern), "isolated")
                for pattern in gguf_vocabulary._PRE_TOKENIZERS[name].patterns
            ]
        )
        for text in DEEPSEEK_TEXTS:
            assert ours.pre_tokenize_str(text) == published.pre_tokenize_str(text)
    words = [word for word, _ in ours.pre_tokenize_str("a中b ʔc")]
    assert words == ["a", "中", "b", " ʔc"]


def test_cased_letters_of_deepseek_are_runs_of_unicode():
    cased = re.compile(f"[{gguf_vocabulary._CASED_LETTERS}]")
    for code in range(0x1D000):
        letter = unicodedata.category(chr(code)) in ("Lu", "Ll", "Lt")
        assert letter or not cased.match(chr(code)), hex(code)


@pytest.mark.parametrize(
    ("pre", "adds"),
    [
        ("gpt-2", False),
        ("smollm", False),
        ("qwen2", False),
        ("llama-bpe", True),
        ("deepseek-r1-qwen", False),
        ("llama3", True),
        ("dbrx", False),
        ("gpt-4o", False),
    ],
)
def test_prompts_begin_with_bos_as_in_the_family_if_gguf_metadata_do_not_say(pre, adds):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["<s>", "a"],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
    }
    tokenizer = load_tokenizer(metadata)
    assert tokenizer is not None and tokenizer.add_bos is adds


def test_composed_form_is_used_where_the_family_does():
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": alphabet,
        "tokenizer.ggml.merges": [],
    }
    composed = dict.fromkeys(("qwen2", "deepseek-r1-qwen", "command-r", "olmo"), "\u00e1")
    for pre, text in {**composed, "smollm": "a\u0301", "refact": "a\u0301"}.items():
        tokenizer = load_tokenizer(metadata | {"tokenizer.ggml.pre": pre})
        assert tokenizer is not None
        ids = tokenizer.encode("a\u0301", special_tokens=True)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, r"expected 'gpt2' or 'llama', got 'bert'"),
        ({"tokenizer.ggml.pre": "my-words"}, r"expected one of .*'smollm'.*got 'my-words'"),
        ({"tokenizer.ggml.tokens": []}, "got an empty one"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "got 'a' twice"),
        ({"tokenizer.ggml.tokens": "abc"}, "expected a list, got str"),
        ({"tokenizer.ggml.tokens": ["a", 1]}, "expected strings, got 1"),
        ({"tokenizer.ggml.token_type": [1]}, "expected 2 entries, one for each token, got 1"),
        ({"tokenizer.ggml.token_type": [1, 9]}, "expected 1 to 6"),
        ({"tokenizer.ggml.merges": ["ab"]}, "two tokens separated by a space, got 'ab'"),
        ({"tokenizer.ggml.merges": ["a c"]}, "expected merges of tokens"),
        ({"tokenizer.ggml.bos_token_id": 2}, "expected an id below 2, got 2"),
        ({"tokenizer.ggml.add_bos_token": "yes"}, "expected true or false, got 'yes'"),
        ({"tokenizer.ggml.add_bos_token": True}, "no BOS token is named"),
        ({"tokenizer.ggml.model": "llama"}, "scores: expected a list"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0, 0.0]},
            # no piece is the unknown token; to fetch such a file again does not help
            r"expected a sentencepiece model.* Convert the model to a directory",
        ),
    ],
)
def test_wrong_gguf_metadata_is_refused_by_name(change, message):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": [],
    }
    with pytest.raises(InvalidTokenizer, match=rf"^models/m\.gguf: .*{message}"):
        load_tokenizer(metadata | change, "models/m.gguf")


def test_no_tokenizer_is_none(tmp_path):
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer({"general.architecture": "llama"}) is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"", "expected a tokenizer"),
        ("tokenizer.json", b"{}", "expected a tokenizer"),
        ("tokenizer.json", b"\xff\xfe", "expected a tokenizer"),
        ("tokenizer.model", b"", "the file is empty"),
        ("tokenizer.model", b"garbage", "expected a sentencepiece model"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "tiktoken ranks. Use the tokenizer.json"),
        ("vocab.json", b"{}", "only vocab.json"),
    ],
)
def test_unusable_tokenizer_files_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidTokenizer, match=message):
        load_tokenizer(tmp_path)


def test_truncated_sentencepiece_model_is_refused(tmp_path, sentencepiece_directory):
    data = (sentencepiece_directory / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(data[: len(data) // 2 + 1])
    with pytest.raises(InvalidTokenizer):
        load_tokenizer(tmp_path)


def test_decoder_that_is_not_understood_is_refused(make_directory):
    directory = make_directory()
    file = json.loads((directory / "tokenizer.json").read_text())
    for decoder in (None, {"type": "BPEDecoder", "suffix": "</w>"}):
        (directory / "tokenizer.json").write_text(json.dumps(file | {"decoder": decoder}))
        with pytest.raises(InvalidTokenizer, match="byte-level or sentencepiece-like decoder"):
            load_tokenizer(directory)


def test_truncation_in_the_file_never_cuts_a_prompt(make_directory):
    directory = make_directory()
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(directory / "tokenizer.json"))
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    ids = tokenizer.encode("hello world, hello", special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello world, hello"


def test_bos_is_added_once_to_prompts_and_never_to_plain_text(make_directory):
    tokenizer = load_tokenizer(make_directory(add_bos_token=True))
    assert tokenizer is not None and tokenizer.add_bos
    bos = tokenizer.bos_id
    ids = tokenizer.encode("hello", special_tokens=True)
    assert ids[0] == bos and ids.count(bos) == 1
    assert tokenizer.encode("<s>hello", special_tokens=True) == ids
    assert tokenizer.encode("hello", special_tokens=False) == ids[1:]
    assert tokenizer.encode("", special_tokens=True) == [bos]


def test_bos_rule_is_read_from_the_post_processor_where_the_config_is_silent(make_directory):
    for template, add_bos in (("<s> $A", True), ("$A", False), ("$A </s>", False)):
        directory = make_directory()
        backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        backend.save(str(directory / "tokenizer.json"))
        tokenizer = load_tokenizer(directory)
        assert tokenizer is not None and tokenizer.add_bos is add_bos


def test_special_token_text_in_plain_text_stays_text(deepseek, mistral, smollm2):
    for tokenizer in (deepseek, mistral, smollm2):
        for special in list(tokenizer.special_tokens.text_by_id.values())[:6]:
            text = f"a{special}b"
            ids = tokenizer.encode(text, special_tokens=False)
            assert not tokenizer.special_ids & set(ids)
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
            assert tokenizer.special_ids & set(tokenizer.encode(text, special_tokens=True))


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_lone_surrogates_are_refused_by_position(smollm2, mistral, text):
    for tokenizer in (smollm2, mistral):
        with pytest.raises(RowError, match=f"character {len(text) // 2}") as caught:
            tokenizer.encode(text, special_tokens=True)
        assert caught.value.code == "invalid_request"


def test_ids_beyond_the_vocabulary_decode_to_nothing(smollm2, mistral, deepseek):
    for tokenizer in (smollm2, mistral, deepseek):
        for token in (tokenizer.vocab_size, tokenizer.vocab_size + 99, -1):
            assert tokenizer.decode([token], skip_special_tokens=False) == ""
            assert tokenizer.token_text(token) == "" and tokenizer.token_bytes(token) == b""


def test_added_tokens_behind_a_sentencepiece_model_are_known(tmp_path, sentencepiece_directory):
    data = (sentencepiece_directory / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(data)
    size = len(sentencepiece.SentencePieceProcessor(model_proto=data))
    entry = {"content": "<|extra|>", "special": True}
    config = {"added_tokens_decoder": {str(size + 1): entry}, "eos_token": "<|extra|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None and tokenizer.eos_id == size + 1
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.encode("<|extra|>", special_tokens=True) == [tokenizer.bos_id, size + 1]


def test_settings_come_from_all_files_of_the_directory(make_directory):
    directory = make_directory(
        chat_template=[{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    )
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.chat_templates["default"].text == "D"
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "chat_template.jinja").write_text("J")
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None and tokenizer.chat_templates["default"].text == "J"


def test_a_token_that_the_config_denies_is_not_taken_from_the_vocabulary(
    tmp_path, sentencepiece_directory
):
    data = (sentencepiece_directory / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(data)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None and tokenizer.bos_id is None and not tokenizer.add_bos
    assert tokenizer.named_tokens == {"eos_token": "</s>"}


def test_an_end_token_that_also_pads_stays_the_end_token(make_directory):
    tokenizer = load_tokenizer(make_directory(pad_token="</s>"))
    assert tokenizer.named_tokens["pad_token"] == tokenizer.named_tokens["eos_token"] == "</s>"
    ids = tokenizer.encode("hello</s>", special_tokens=True)
    assert ids[-1] == tokenizer.eos_id


def test_the_source_of_the_chat_template_is_known(make_directory, smollm2):
    directory = make_directory(chat_template="{{ messages }}")
    tokenizer = load_tokenizer(directory)
    config = directory / "tokenizer_config.json"
    assert tokenizer.chat_templates["default"].source == f"{config}: chat_template"
    file = directory / "chat_template.jinja"
    file.write_text("{{ messages }}")
    assert load_tokenizer(directory).chat_templates["default"].source == str(file)
    assert smollm2.chat_templates["default"].source == "tokenizer.chat_template"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": "<nope>"}, "expected eos_token '<nope>' in the vocabulary"),
        ({"add_bos_token": "yes"}, "expected true or false, got 'yes'"),
        ({"bos_token": None, "add_bos_token": True}, "no BOS token is named"),
    ],
)
def test_contradicting_settings_are_refused(make_directory, config, message):
    with pytest.raises(InvalidTokenizer, match=message):
        load_tokenizer(make_directory(**config))


def test_a_text_that_the_library_cannot_encode_is_an_error_of_its_row(make_directory):
    directory = make_directory()
    path = directory / "tokenizer.json"
    file = json.loads(path.read_text())
    rule = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated"}
    steps = [rule | {"invert": False}, file["pre_tokenizer"]]
    file["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    path.write_text(json.dumps(file))
    tokenizer = load_tokenizer(directory)
    bad, mark = "a" * 30 + "c", "\U00100000"
    fine = tokenizer.encode("fine", special_tokens=True)
    first, error, last = tokenizer.encode_prompts(["fine", bad, "fine"])
    assert first == last == fine
    assert isinstance(error, RowError) and error.code == "invalid_request"
    assert "that the tokenizer can encode, got its error: Onig" in error.message
    marked = tokenizer.special_tokens.protect(f"<s>{bad}", mark)
    outcomes = tokenizer.encode_rendered([(marked, mark), ("fine", None)])
    assert isinstance(outcomes[0], RowError) and outcomes[1] == fine
    with pytest.raises(RowError, match="got its error"):
        tokenizer.encode(bad, special_tokens=False)


def test_long_runs_of_one_character_take_bounded_time(deepseek, mistral, smollm2):
    start = time.process_time()
    for tokenizer in (deepseek, mistral, smollm2):
        for text in ("a" * 200_000, " " * 200_000, "<" * 200_000):
            tokenizer.encode(text, special_tokens=True)
            tokenizer.special_tokens.protect(text, "\U00100000")
    assert time.process_time() - start < 20


@given(st.lists(st.sampled_from(["<a>", "<ab>", "<", "a", ">", "b", "<a", "xy", " "]), max_size=9))
def test_split_finds_the_longest_special_token_from_the_left(parts):
    special = SpecialTokens({1: "<a>", 2: "<ab>", 3: "<a>b", 4: "x"})
    text, expected, plain = "".join(parts), [], ""
    position = 0
    by_text = {text: token for token, text in special.text_by_id.items()}
    while position < len(text):
        fitting = [s for s in by_text if text.startswith(s, position)]
        if fitting:
            longest = max(fitting, key=len)
            expected += [*([plain] if plain else []), by_text[longest]]
            plain, position = "", position + len(longest)
        else:
            plain, position = plain + text[position], position + 1
    assert special.split(text) == [*expected, *([plain] if plain else [])]


@given(st.lists(st.sampled_from(["<ab>", "<", "a", ">", "b", "<a", "b>", "ba", " "]), max_size=9))
def test_protected_strings_never_make_a_special_token_together(parts):
    special, mark = SpecialTokens({1: "<ab>", 2: "ba<", 3: ">"}), "\U00100000"
    text = "".join(special.protect(part, mark) for part in parts)
    plain = "".join(parts)
    assert special.split(text, mark) == ([plain] if plain else [])


def test_text_modules_import_neither_jax_nor_transformers():
    modules = "tokenizer tokenizer_json sentencepiece_model gguf_vocabulary chat_template"
    modules += " detokenizer"
    code = "import sys\n" + "".join(f"import noria.runtime.text.{m}\n" for m in modules.split())
    code += "print({'jax', 'flax', 'transformers', 'tokenizers', 'jinja2'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr


@pytest.mark.reference
@pytest.mark.parametrize("add_bos", [True, False])
def test_json_directory_gives_the_ids_of_transformers(make_directory, add_bos):
    transformers = pytest.importorskip("transformers")
    directory = make_directory(add_bos_token=add_bos)
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    for text in [*TEXTS, "<|im_start|>user\nhello<|im_end|>"]:
        bare = reference.encode(text, add_special_tokens=False)
        bos = [tokenizer.bos_id] if add_bos else []
        assert tokenizer.encode(text, special_tokens=True) == bos + bare
        assert tokenizer.decode(bare, skip_special_tokens=True) == reference.decode(
            bare, skip_special_tokens=True
        )


@pytest.mark.reference
def test_real_json_tokenizer_gives_the_ids_of_transformers(deepseek, deepseek_directory):
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(deepseek_directory / "tokenizer.json")
    )
    for text in [*TEXTS, "a<｜end▁of▁sentence｜>b"]:
        assert deepseek.encode(text, special_tokens=True) == reference.encode(
            text, add_special_tokens=False
        )
