"""Build tokenizers from GGUF metadata, which contain the vocabulary.

The key `tokenizer.ggml.model` has one of two kinds: `gpt2`, byte-level merges, or `llama`, a
sentencepiece vocabulary with scores. For `gpt2`, the metadata have only the name of the
pre-tokenizer (`tokenizer.ggml.pre`), so this module has a table of pre-tokenizers by name, in which
names of llama.cpp with the same patterns are alike. Other names are refused: a guess would give
plausible but wrong ids.

Does not know about GGUF files: their metadata are passed as a mapping.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InvalidTokenizer
from .sentencepiece_model import Piece, PieceType, load_model, model_proto
from .tokenizer import DEFAULT, TOOL_USE, ChatTemplate, TextSettings, Tokenizer
from .tokenizer_json import build_tokenizer, import_tokenizers

if TYPE_CHECKING:
    import tokenizers

_SOURCE = "GGUF metadata"
_TEMPLATE_KEY = "tokenizer.chat_template"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _PreTokenizer:
    """The splitting of text into words before merges, and defaults for missing metadata."""

    patterns: tuple[str, ...]
    """Patterns that are applied one after the other, each to the pieces of the previous one."""
    keeps_whole_words: bool = False
    """Whether a word that is a token is not split, even if no merges produce it."""
    composes: bool = False
    """Whether text is normalised to the composed form of Unicode (NFC) first."""
    add_bos: bool = False
    """Whether prompts begin with BOS, if the metadata do not say so."""


def _llama3(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_DIGITS_THEN_GPT2 = (r"\p{N}", _GPT2)
_LLAMA3 = _PreTokenizer((_llama3(r"\p{N}{1,3}"),), keeps_whole_words=True, add_bos=True)
_DBRX = _PreTokenizer((_llama3(r"\p{N}{1,3}"),))
_QWEN2 = _PreTokenizer((_llama3(r"\p{N}"),), composes=True)
_O200K_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"

_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""The class of letters in the published pattern of DeepSeek LLM."""
_LINE_ENDS, _HAN_AND_HANGUL = "[\r\n]", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer((_GPT2,)),
    "olmo": _PreTokenizer((_GPT2,), composes=True),
    "smollm": _PreTokenizer(_DIGITS_THEN_GPT2),
    "starcoder": _PreTokenizer(_DIGITS_THEN_GPT2),
    "refact": _PreTokenizer(_DIGITS_THEN_GPT2),
    "command-r": _PreTokenizer(_DIGITS_THEN_GPT2, composes=True),
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _DBRX,
    "smaug-bpe": _DBRX,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _PreTokenizer(
        (
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
            + _O200K_END
            + r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
            + _O200K_END
            + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "tekken": _PreTokenizer(
        (
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
            r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        keeps_whole_words=True,
        add_bos=True,
    ),
    "deepseek-llm": _PreTokenizer(
        (
            _LINE_ENDS,
            rf"\s?[{_CASED_LETTERS}]+",
            r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _HAN_AND_HANGUL,
            r"\p{N}",
        ),
        add_bos=True,
    ),
    "deepseek-coder": _PreTokenizer(
        (_LINE_ENDS, r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}"), add_bos=True
    ),
    "deepseek-v3": _PreTokenizer(
        (
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
            r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        add_bos=True,
    ),
}


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer | None:
    """Build the tokenizer that GGUF metadata describe; None if they describe none.

    Raises:
      InvalidTokenizer: The vocabulary is invalid, or its kind is not supported.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is None or model == "none":
        return None
    if model == "gpt2":
        backend, settings, unused_ids = _merges_backend(metadata)
        return build_tokenizer(backend, settings, source=_SOURCE, unused_ids=unused_ids)
    if model == "llama":
        return _sentencepiece_tokenizer(metadata)
    raise InvalidTokenizer(
        f"tokenizer.ggml.model: expected 'gpt2' or 'llama', got {model!r}. Convert the model to a "
        "directory with tokenizer.json."
    )


def files_from_gguf(metadata: Mapping[str, object]) -> dict[str, bytes]:
    """The tokenizer files of a model directory, by name, from GGUF metadata.

    Raises:
      InvalidTokenizer: The vocabulary is invalid, or has no byte-level merges.
    """
    if (model := metadata.get("tokenizer.ggml.model")) in (None, "none"):
        return {}
    if model != "gpt2":
        raise InvalidTokenizer(
            f"tokenizer.ggml.model: expected 'gpt2', whose vocabulary can be written as "
            f"tokenizer.json, got {model!r}. Start from the published directory of the model."
        )
    backend, settings, _ = _merges_backend(metadata)
    table = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": settings.add_bos,
        "clean_up_tokenization_spaces": False,
        **settings.named_tokens,
    }
    if templates := settings.chat_templates:
        named = [{"name": name, "template": found.text} for name, found in templates.items()]
        table["chat_template"] = templates[DEFAULT].text if list(templates) == [DEFAULT] else named
    content = json.dumps(table, indent=1, ensure_ascii=False)
    return {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": content.encode()}


def _merges_backend(
    metadata: Mapping[str, object],
) -> "tuple[tokenizers.Tokenizer, TextSettings, list[int]]":
    """The tokenizer of the library, the settings, and the ids that decode to nothing."""
    library = import_tokenizers("a GGUF vocabulary", extra="gguf")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    pre_tokenizer = _PRE_TOKENIZERS.get(pre) if isinstance(pre, str) else None
    if pre_tokenizer is None:
        raise InvalidTokenizer(
            f"tokenizer.ggml.pre: expected one of {sorted(_PRE_TOKENIZERS)}, got {pre!r}. "
            "Convert the model to a directory with tokenizer.json."
        )
    tokens, types = _tokens(metadata)
    merges = [_merge(entry) for entry in _strings(metadata, "tokenizer.ggml.merges")]
    try:
        model = library.models.BPE(
            vocab={text: token for token, text in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre_tokenizer.keeps_whole_words,
        )
    except Exception as error:  # the library raises Exception itself
        raise InvalidTokenizer(
            f"tokenizer.ggml.merges: expected merges of tokens: {error}"
        ) from None
    backend = library.Tokenizer(model)
    if pre_tokenizer.composes:
        backend.normalizer = library.normalizers.NFC()
    splits = [
        library.pre_tokenizers.Split(library.Regex(pattern), "isolated")
        for pattern in pre_tokenizer.patterns
    ]
    bytes_only = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = library.pre_tokenizers.Sequence([*splits, bytes_only])
    backend.decoder = library.decoders.ByteLevel()
    for kind, is_special in ((PieceType.CONTROL, True), (PieceType.USER_DEFINED, False)):
        texts = [text for text, type_ in zip(tokens, types, strict=True) if type_ == kind and text]
        added = [library.AddedToken(t, special=is_special, normalized=False) for t in texts]
        (backend.add_special_tokens if is_special else backend.add_tokens)(added)
    settings = _settings(metadata, tokens, default_add_bos=pre_tokenizer.add_bos)
    unused_ids = [token for token, type_ in enumerate(types) if type_ == PieceType.UNUSED]
    return backend, settings, unused_ids


def _sentencepiece_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    tokens, types = _tokens(metadata)
    scores = _sequence(metadata, "tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise InvalidTokenizer(
            f"tokenizer.ggml.scores: expected {len(tokens)} entries, one for each token, got "
            f"{len(scores)}."
        )
    pieces = [
        Piece(text, float(score), type_)
        for text, score, type_ in zip(tokens, scores, types, strict=True)
    ]
    add_space_prefix = _flag(metadata, "tokenizer.ggml.add_space_prefix", default=True)
    data = model_proto(pieces, add_space_prefix=add_space_prefix)
    remedy = "Convert the model to a directory with tokenizer.json."
    model = load_model(data, source=_SOURCE, remedy=remedy)
    return Tokenizer(model.vocabulary, model, _settings(metadata, tokens, default_add_bos=True))


def _settings(
    metadata: Mapping[str, object], tokens: Sequence[str], *, default_add_bos: bool
) -> TextSettings:
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids: dict[str, int] = {}
    for key, role in roles.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is None:
            continue
        token = int(token)  # pyright: ignore[reportArgumentType]
        if not 0 <= token < len(tokens):
            raise InvalidTokenizer(
                f"tokenizer.ggml.{key}_token_id: expected an id below {len(tokens)}, got {token}."
            )
        ids[role] = token
    keys = {DEFAULT: _TEMPLATE_KEY, TOOL_USE: f"{_TEMPLATE_KEY}.{TOOL_USE}"}
    texts = {name: metadata.get(key) for name, key in keys.items()}
    return TextSettings(
        bos_id=ids.get("bos_token"),
        eos_id=ids.get("eos_token"),
        add_bos=_flag(
            metadata,
            "tokenizer.ggml.add_bos_token",
            default=default_add_bos and "bos_token" in ids,
        ),
        chat_templates={
            name: ChatTemplate(text, keys[name])
            for name, text in texts.items()
            if isinstance(text, str)
        },
        named_tokens={role: tokens[token] for role, token in ids.items()},
    )


def _tokens(metadata: Mapping[str, object]) -> tuple[list[str], list[PieceType]]:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if not tokens:
        raise InvalidTokenizer("tokenizer.ggml.tokens: expected a vocabulary, got an empty one.")
    twice = next((text for text, count in Counter(tokens).items() if count > 1), None)
    if twice is not None:
        raise InvalidTokenizer(
            f"tokenizer.ggml.tokens: expected each token once, got {twice!r} twice."
        )
    if "tokenizer.ggml.token_type" not in metadata:
        return tokens, [PieceType.NORMAL] * len(tokens)
    numbers = _sequence(metadata, "tokenizer.ggml.token_type")
    if len(numbers) != len(tokens):
        raise InvalidTokenizer(
            f"tokenizer.ggml.token_type: expected {len(tokens)} entries, one for each token, got "
            f"{len(numbers)}."
        )
    try:
        return tokens, [PieceType(int(number)) for number in numbers]
    except ValueError as error:
        raise InvalidTokenizer(f"tokenizer.ggml.token_type: expected 1 to 6: {error}") from None


def _sequence(metadata: Mapping[str, object], key: str) -> Sequence:
    value = metadata.get(key)
    if value is None or isinstance(value, str) or not hasattr(value, "__len__"):
        raise InvalidTokenizer(f"{key}: expected a list, got {type(value).__name__}.")
    return value  # pyright: ignore[reportReturnType]


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    values = list(_sequence(metadata, key))
    wrong = next((value for value in values if not isinstance(value, str)), None)
    if wrong is not None:
        raise InvalidTokenizer(f"{key}: expected strings, got {wrong!r}.")
    return values


def _flag(metadata: Mapping[str, object], key: str, *, default: bool) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise InvalidTokenizer(f"{key}: expected true or false, got {value!r}.")
    return bool(value)


def _merge(entry: str) -> tuple[str, str]:
    left, space, right = entry.partition(" ")
    if not (left and space and right):
        raise InvalidTokenizer(
            f"tokenizer.ggml.merges: expected two tokens separated by a space, got {entry!r}."
        )
    return left, right
