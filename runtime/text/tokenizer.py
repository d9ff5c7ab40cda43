"""Text to token ids and back: the tokenizer of every model.

A tokenizer is three things: a table with the bytes of every token, two ways to encode (special
tokens parsed, or all text plain), and what the model's files say about BOS, EOS and chat.
The formats fill these in: `tokenizer_json`, `sentencepiece_model`, `gguf_vocabulary`.

Knows nothing about requests, sampling or devices, and never imports jax. Guarantees: an id that the
table lacks decodes to nothing (embeddings are often padded beyond the vocabulary); encoding never
yields a second BOS; text that has no UTF-8 form is refused by position.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import InvalidTokenizer, RowError
from .detokenizer import Detokenizer
from .special_tokens import SpecialTokens

MarkedText = tuple[str, str | None]
"""A rendered text, and the mark before special-token text of users; None if there is none."""


class Encoder(Protocol):
    """The two encodings of a format; neither adds BOS or EOS."""

    def plain(self, text: str) -> list[int]:
        """Encodes all of `text` as ordinary characters; raises RowError where that fails."""
        ...

    def parsed(self, texts: Sequence[str]) -> Sequence[list[int] | RowError]:
        """Encodes each text with special-token text turned into special tokens."""
        ...


@dataclass(frozen=True)
class Vocabulary:
    """What each token id adds to a text."""

    token_bytes: Sequence[bytes]
    """By id; special tokens have the bytes of their own text, unused ids are empty."""
    special: SpecialTokens
    strips_leading_space: bool
    """Decoding drops the space that encoding put before the first word (sentencepiece)."""


@dataclass(frozen=True)
class TextSettings:
    """What the model's files say about the use of its vocabulary."""

    bos_id: int | None = None
    eos_id: int | None = None
    add_bos: bool = False
    chat_template: str | None = None
    chat_template_source: str = ""
    """The file and key that the template is from."""
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """Text by role, as chat templates ask for it: `bos_token`, `eos_token`, ..."""


class Tokenizer:
    """Encodes and decodes with one model's vocabulary."""

    def __init__(self, vocabulary: Vocabulary, encoder: Encoder, settings: TextSettings):
        if settings.add_bos and settings.bos_id is None:
            raise InvalidTokenizer(
                "add_bos_token is true, but no BOS token is named. Name bos_token, or set "
                "add_bos_token to false."
            )
        self._vocabulary = vocabulary
        self._encoder = encoder
        self.special_tokens = vocabulary.special
        self.strips_leading_space = vocabulary.strips_leading_space
        self.vocab_size = len(vocabulary.token_bytes)
        self.special_ids = frozenset(vocabulary.special.text_by_id)
        self.bos_id = settings.bos_id
        self.eos_id = settings.eos_id
        self.add_bos = settings.add_bos
        self.chat_template = settings.chat_template
        self.chat_template_source = settings.chat_template_source
        self.named_tokens = settings.named_tokens

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Encodes `text`, as a prompt (`special_tokens=True`) or as plain characters.

        A prompt has its special-token text parsed, and starts with BOS if the model wants that and
        the text does not already do so. Plain text has neither.
        """
        if not special_tokens:
            check_encodable(text)
            return self._encoder.plain(text)
        (ids,) = self.encode_prompts([text])
        if isinstance(ids, RowError):
            raise ids
        return ids

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int] | RowError]:
        """Encodes many prompts at once; an error stands in the place of its ids."""
        encoded = self._parsed(texts)
        if self.add_bos and self.bos_id is not None:
            for ids in encoded:
                if not isinstance(ids, RowError) and ids[:1] != [self.bos_id]:
                    ids.insert(0, self.bos_id)
        return encoded

    def encode_rendered(self, texts: Sequence[MarkedText]) -> list[list[int] | RowError]:
        """Encodes what a chat template rendered: special tokens parsed, no BOS of our own.

        Special-token text right after a mark came from a user and stays plain text; the marks
        vanish. See `special_tokens`.
        """
        unmarked = [text.replace(mark, "") if mark else text for text, mark in texts]
        encoded = self._parsed(unmarked)
        for index, (text, mark) in enumerate(texts):
            if mark is None or mark not in text or isinstance(encoded[index], RowError):
                continue
            pieces = self.special_tokens.split(text, mark)
            if pieces != self.special_tokens.split(unmarked[index]):
                encoded[index] = self._joined_ids(pieces)
        return encoded

    def _joined_ids(self, pieces: Iterable[int | str]) -> list[int] | RowError:
        ids: list[int] = []
        try:
            for piece in pieces:
                ids += [piece] if isinstance(piece, int) else self._encoder.plain(piece)
        except RowError as error:
            return error
        return ids

    def _parsed(self, texts: Sequence[str]) -> list[list[int] | RowError]:
        errors = [encoding_error(text) for text in texts]
        good = [text for text, error in zip(texts, errors, strict=True) if error is None]
        ids = iter(self._encoder.parsed(good))
        return [next(ids) if error is None else error for error in errors]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Decodes a whole text; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, which may be part of a character."""
        if 0 <= token_id < self.vocab_size:
            return self._vocabulary.token_bytes[token_id]
        return b""

    def token_text(self, token_id: int) -> str:
        """A token's text on its own, for reports; part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def encoding_error(text: str, param: str | None = None) -> RowError | None:
    """The error for a text with a lone surrogate, which has no UTF-8 form."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return RowError(
            "invalid_request",
            f"{param or 'text'}: expected Unicode text, got the lone surrogate "
            f"U+{ord(text[error.start]):04X} at character {error.start}. Remove it or pair it.",
            param,
        )
    return None


def check_encodable(text: str, param: str | None = None) -> None:
    """Refuses text with a lone surrogate."""
    if (error := encoding_error(text, param)) is not None:
        raise error
