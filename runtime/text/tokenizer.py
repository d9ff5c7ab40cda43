"""Encode text as token ids, and decode token ids, for all tokenizer formats.

A tokenizer has three parts: a table with the bytes of all tokens, three encodings (special tokens
are parsed, all text is plain, or the file's template is applied), and the settings of the model's
files for BOS, EOS and chat. The modules of the formats make these parts: `tokenizer_json`,
`sentencepiece_model` and `gguf_vocabulary`.

Does not know about requests, sampling or devices, and never imports jax. Guarantees: an id that is
not in the table decodes to nothing (embeddings are often padded beyond the vocabulary); encoding
never adds a second BOS; text that cannot be encoded as UTF-8 is refused with the position of the
error.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

from ..embedding.texts import EncodedText
from ..errors import InvalidTokenizer, RowError, invalid_request
from .detokenizer import Detokenizer
from .special_tokens import SpecialTokens

MarkedText = tuple[str, str | None]
"""A rendered text, and the mark before special-token text of users; None without a mark."""
TextOrPair = str | tuple[str, str]
DEFAULT, TOOL_USE = "default", "tool_use"
"""The names of the chat template for all rows, and of one for rows with tools."""


class ChatTemplate(NamedTuple):
    """A chat template of a model."""

    text: str
    source: str
    """The file and the key that it comes from."""


class Encoder(Protocol):
    """The encodings of a format; `plain` and `parsed` add neither BOS nor EOS."""

    def plain(self, text: str) -> list[int]:
        """Encode all of `text` as ordinary characters; raises RowError if it cannot be encoded."""
        ...

    def parsed(self, texts: Sequence[str]) -> Sequence[list[int] | RowError]:
        """Encode each text; the text of special tokens becomes special tokens."""
        ...

    def templated(
        self, texts: Sequence[TextOrPair], max_tokens: int | None = None
    ) -> Sequence[EncodedText | RowError]:
        """Encode each text or pair as `parsed` does, with special tokens of the file's template.

        A longer text is cut at its end, so that it has `max_tokens` in all, special ones included.
        """
        ...


@dataclass(frozen=True)
class Vocabulary:
    """The text of each token id."""

    token_bytes: Sequence[bytes]
    """The bytes of tokens by id; special tokens have the bytes of their text, unused ids none."""
    special: SpecialTokens
    strips_leading_space: bool
    """Whether decoding drops the space that encoding adds before the first word (sentencepiece)."""
    shown: Collection[int] = ()
    """The ids in `special` whose texts are part of answers: added tokens that are not special."""


@dataclass(frozen=True)
class TextSettings:
    """The settings of a model's files for the use of the vocabulary."""

    bos_id: int | None = None
    eos_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    """Whether texts to embed end with EOS, also if the template of the vocabulary's file adds
    none."""
    chat_templates: Mapping[str, ChatTemplate] = field(default_factory=dict)
    """The chat templates by name; a model with only one has `default`."""
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """The texts of tokens by their role in chat templates: `bos_token`, `eos_token`, ..."""


class Tokenizer:
    """Encodes and decodes with the vocabulary of one model."""

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
        self.special_ids = frozenset(vocabulary.special.text_by_id).difference(vocabulary.shown)
        self.bos_id = settings.bos_id
        self.eos_id = settings.eos_id
        self.add_bos = settings.add_bos
        self._add_eos = settings.add_eos
        self.chat_templates = settings.chat_templates
        self.named_tokens = settings.named_tokens

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Encode `text` as a prompt, or with `special_tokens=False` as plain characters.

        In a prompt, the text of special tokens becomes special tokens, and BOS is added at the
        beginning if the model needs it and the text does not have it. In plain text, neither is
        done.

        Raises:
          RowError: The text cannot be encoded.
        """
        if not special_tokens:
            if (error := encoding_error(text)) is not None:
                raise error
            return self._encoder.plain(text)
        (ids,) = self.encode_prompts([text])
        if isinstance(ids, RowError):
            raise ids
        return ids

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int] | RowError]:
        """Encode many prompts at once; the item of a failed prompt is its error."""
        encoded = self.encode_words(texts)
        if self.add_bos and self.bos_id is not None:
            for ids in encoded:
                if not isinstance(ids, RowError) and ids[:1] != [self.bos_id]:
                    ids.insert(0, self.bos_id)
        return encoded

    def encode_whole(
        self, texts: Sequence[TextOrPair], limits: Sequence[int | None] | None = None
    ) -> list[EncodedText | RowError]:
        """Encode texts or pairs to embed, with all special tokens that the model expects.

        Args:
          texts: The texts.
          limits: The largest number of tokens of each text, special ones included; None for all.
            The last tokens of a longer text are cut, and those of the longer text of a pair first.
        """
        parts = [(text,) if isinstance(text, str) else text for text in texts]
        errors = [next(filter(None, map(encoding_error, pair)), None) for pair in parts]
        good = [text for text, error in zip(texts, errors, strict=True) if error is None]
        encoded = iter(self._encoder.templated(good))
        whole = [self._with_ends(next(encoded)) if e is None else e for e in errors]
        limits = limits or [None] * len(texts)
        return [self._within(*each) for each in zip(texts, whole, limits, strict=True)]

    def _within(
        self, text: TextOrPair, whole: EncodedText | RowError, limit: int | None
    ) -> EncodedText | RowError:
        """An encoded text without the last tokens beyond a limit."""
        if isinstance(whole, RowError) or limit is None or len(whole.ids) <= limit:
            return whole
        room, cut = limit, whole
        while len(cut.ids) > limit:
            (templated,) = self._encoder.templated([text], room)
            cut = self._with_ends(templated)
            if isinstance(cut, RowError):
                return cut
            # the ends that the settings add need room, too
            room -= max(0, len(cut.ids) - limit)
        return cut._replace(num_cut=len(whole.ids) - len(cut.ids))

    def _with_ends(self, text: EncodedText | RowError) -> EncodedText | RowError:
        """The text with the BOS and EOS that the settings ask for and it does not have."""
        if isinstance(text, RowError):
            return text
        ids, num_first, _ = text
        is_whole = num_first == len(ids)
        if self.add_bos and self.bos_id is not None and ids[:1] != (self.bos_id,):
            ids, num_first = (self.bos_id, *ids), num_first + 1
        if self._add_eos and self.eos_id is not None and ids[-1:] != (self.eos_id,):
            ids, num_first = (*ids, self.eos_id), num_first + is_whole
        return EncodedText(ids, num_first)

    def encode_rendered(self, texts: Sequence[MarkedText]) -> list[list[int] | RowError]:
        """Encode texts that a chat template rendered; special tokens are parsed, no BOS is added.

        Special-token text directly after a mark comes from a user and stays plain text. The marks
        are removed. See `special_tokens`.
        """
        unmarked = [text.replace(mark, "") if mark else text for text, mark in texts]
        encoded = self.encode_words(unmarked)
        for index, (text, mark) in enumerate(texts):
            if mark is None or mark not in text or isinstance(encoded[index], RowError):
                continue
            pieces = self.special_tokens.split(text, mark)
            if pieces != self.special_tokens.split(unmarked[index]):
                try:
                    ids = ([x] if isinstance(x, int) else self._encoder.plain(x) for x in pieces)
                    encoded[index] = list(chain.from_iterable(ids))
                except RowError as error:
                    encoded[index] = error
        return encoded

    def encode_words(self, texts: Sequence[str]) -> list[list[int] | RowError]:
        """Encode parts of texts; the text of special tokens becomes special tokens, no BOS is
        added."""
        errors = [encoding_error(text) for text in texts]
        good = [text for text, error in zip(texts, errors, strict=True) if error is None]
        ids = iter(self._encoder.parsed(good))
        return [next(ids) if error is None else error for error in errors]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Decode a whole text; bytes that are not UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; they may be a part of a character."""
        if 0 <= token_id < self.vocab_size:
            return self._vocabulary.token_bytes[token_id]
        return b""

    def token_text(self, token_id: int) -> str:
        """The text of a single token, for reports; a part of a character is shown as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def no_room(max_tokens: int, needed: int) -> RowError:
    """The error of a text of which no token would be left beside the special ones."""
    return invalid_request(
        "truncate_prompt_tokens",
        f"expected room for a token beside {needed} special ones, got {max_tokens} tokens in all.",
    )


def encoding_error(text: str, param: str | None = None) -> RowError | None:
    """The error for a text with a lone surrogate, which UTF-8 cannot encode; None without one."""
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
