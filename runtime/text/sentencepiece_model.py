"""Build tokenizers from sentencepiece's `tokenizer.model`, with the library `sentencepiece`.

The library encodes the pieces of text between special tokens, and never reads the text of special
tokens. It adds the model's leading space to each piece, as in the training of the models that
publish this form. noria decodes with a table of the bytes of all tokens.

`model_proto` writes such a model, for vocabularies without the file.
"""

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ..embedding.texts import EncodedText, whole_text
from ..errors import InvalidTokenizer, RowError
from ..files.small_files import read_small
from .special_tokens import SpecialTokens
from .tokenizer import TextOrPair, Tokenizer, Vocabulary, no_room
from .tokenizer_directory import AddedToken, DirectorySettings, read_directory

_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


class PieceType(IntEnum):
    """The kinds of pieces, with their numbers in the files of sentencepiece and GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Piece:
    """An entry of a sentencepiece vocabulary."""

    text: str
    score: float
    type: PieceType


class PieceEncoder:
    """A loaded model: the processor of the library, and the bytes of its tokens."""

    def __init__(self, processor, vocabulary: Vocabulary):
        self.processor = processor
        self.vocabulary = vocabulary

    def id_of(self, text: str) -> int | None:
        """The id of the token with a given text; None if there is none."""
        for token, special in self.vocabulary.special.text_by_id.items():
            if special == text:
                return token
        token = self.processor.piece_to_id(text)
        return token if self.processor.id_to_piece(token) == text else None

    def plain(self, text: str) -> list[int]:
        return self.processor.encode(text)

    def parsed(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._parsed(text) for text in texts]

    def templated(
        self, texts: Sequence[TextOrPair], max_tokens: int | None = None
    ) -> list[EncodedText | RowError]:
        if max_tokens is not None and max_tokens < 1:
            return [no_room(max_tokens, 0)] * len(texts)
        return [
            whole_text(self._parsed(text)[:max_tokens]) if isinstance(text, str) else _no_pairs()
            for text in texts
        ]

    def _parsed(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self.vocabulary.special.split(text):
            ids.extend([piece] if isinstance(piece, int) else self.plain(piece))
        return ids


def _no_pairs() -> RowError:
    return RowError(
        "invalid_request",
        "expected a tokenizer.json, whose template joins two texts, got a tokenizer.model, which "
        "has no template. Save the tokenizer as tokenizer.json.",
    )


def tokenizer_from_sentencepiece(directory: Path) -> Tokenizer:
    """Load `tokenizer.model` of a directory, with the settings in the files beside it."""
    path = directory / "tokenizer.model"
    settings = read_directory(directory)
    model = load_model(read_small(path), source=str(path), settings=settings)
    ids = (getattr(model.processor, name)() for name in ("bos_id", "eos_id"))
    bos, eos = (None if token < 0 else token for token in ids)
    # models of this form begin each text with BOS unless their configuration says otherwise
    resolved = settings.resolve(
        model.id_of,
        model.vocabulary.special.text_by_id.get,
        default_bos=bos,
        default_eos=eos,
        default_add_bos=bos is not None,
    )
    return Tokenizer(model.vocabulary, model, resolved)


def load_model(
    data: bytes,
    *,
    source: str,
    remedy: str = "Fetch the file again.",
    settings: DirectorySettings | None = None,
) -> PieceEncoder:
    """Load a serialized model.

    Args:
      source: The file or metadata, for errors.
      remedy: What to do if the data is no model.
      settings: The settings of a directory, whose added tokens become a part of the vocabulary.

    Raises:
      InvalidTokenizer: The data is not a sentencepiece model, or another one than that of the added
        tokens.
    """
    import sentencepiece

    if _TIKTOKEN_LINE.match(data):
        raise InvalidTokenizer(
            f"{source}: expected a sentencepiece model, got a list of tiktoken ranks. Use the "
            "tokenizer.json that the model's publisher offers beside it."
        )
    try:
        if not data:  # the library would accept an empty file
            raise RuntimeError("the file is empty")
        processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    except RuntimeError as error:
        raise InvalidTokenizer(
            f"{source}: expected a sentencepiece model, got {len(data)} bytes of another kind "
            f"({error}). {remedy}"
        ) from None
    added = {} if settings is None else _added_tokens(processor, settings)
    return PieceEncoder(processor, _vocabulary(processor, added))


def model_proto(pieces: Sequence[Piece], *, add_space_prefix: bool) -> bytes:
    """Serialize a sentencepiece model that merges by score, with byte tokens for other text."""
    parts = []
    for piece in pieces:
        body = _field(1, piece.text.encode("utf-8"))
        body += b"\x15" + struct.pack("<f", piece.score) + _number(3, piece.type)
        parts.append(_field(1, body))
    merges_by_score = 2
    trainer = _number(3, merges_by_score) + _number(35, True)  # model_type, byte_fallback
    normalizer = _field(1, b"identity") + _number(3, add_space_prefix)
    normalizer += _number(4, False) + _number(5, True)  # keep spaces; write them as "▁"
    return b"".join([*parts, _field(2, trainer), _field(3, normalizer)])


def _added_tokens(processor, settings: DirectorySettings) -> dict[int, AddedToken]:
    """The tokens of a directory that differ from the pieces of the model, by id.

    Raises:
      InvalidTokenizer: A token has the id of another piece, or one far beyond the model.
    """
    size = processor.get_piece_size()
    added: dict[int, AddedToken] = {}
    for token, entry in settings.added_tokens.items():
        piece = processor.id_to_piece(token) if token < size else None
        if piece is not None and piece.replace("▁", " ") == entry.text.replace("▁", " "):
            continue
        is_free = piece is None or processor.is_control(token) or processor.is_unused(token)
        if not is_free or token >= 2 * size:
            got = f"{size} pieces" if piece is None else f"the piece {piece!r} with this id"
            raise settings.wrong_id(entry.text, token, got)
        added[token] = settings.marked(entry)
    ends = {settings.named_tokens.get(role) for role in ("bos_token", "eos_token")}
    for entry in settings.special_tokens:
        known = {*ends, *(token.text for token in added.values())}
        is_piece = processor.id_to_piece(processor.piece_to_id(entry.text)) == entry.text
        if entry.text not in known and not is_piece:
            added[max([size - 1, *added]) + 1] = entry
    return added


def _vocabulary(processor, extra: Mapping[int, AddedToken]) -> Vocabulary:
    from .tokenizer_json import piece_bytes_with_byte_tokens

    size = processor.get_piece_size()
    table = [b""] * max([size, *(token + 1 for token in extra)])
    special = {}
    for token in range(size):
        text = processor.id_to_piece(token)
        if processor.is_control(token) or processor.is_unknown(token):
            special[token] = text
            table[token] = text.encode("utf-8")
        elif not processor.is_unused(token):
            table[token] = piece_bytes_with_byte_tokens(text)
    for token, entry in extra.items():
        table[token] = entry.text.encode("utf-8", "replace")
        # the model does not know the text of an added token, so the splitting must find it
        special[token] = entry.text
    shown = [token for token, entry in extra.items() if not entry.is_special]
    return Vocabulary(table, SpecialTokens(special), _strips_leading_space(processor, size), shown)


def _strips_leading_space(processor, size: int) -> bool:
    """Whether the library drops a leading space, by decoding a word that begins with one."""
    for token in range(size):
        text = processor.id_to_piece(token)
        if text.startswith("▁") and "▁" not in text[1:] and len(text) > 1:
            return not processor.decode([token]).startswith(" ")
    return False


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, body: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(body)) + body


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(int(value))
