"""Build tokenizers from Hugging Face's `tokenizer.json`, with the library `tokenizers`.

The library encodes. noria decodes with a table of the bytes of all tokens, so that it can decode
token by token. Three families of decoders are supported: byte-level, sentencepiece-like with or
without byte tokens, and word pieces, in which a token without the mark of a continuation begins
with a space. Other decoders are refused.
"""

import json
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..embedding.texts import EncodedText
from ..errors import InvalidTokenizer, RowError
from ..files.small_files import read_small
from .special_tokens import SpecialTokens
from .tokenizer import TextOrPair, TextSettings, Tokenizer, Vocabulary, no_room
from .tokenizer_directory import AddedToken, DirectorySettings, read_directory

if TYPE_CHECKING:
    import tokenizers

# the byte-level alphabet of the library: printable Latin-1 bytes are written as themselves, the
# other bytes as the characters from U+0100 on, in order
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)
}

# steps of a sentencepiece-like decoder, with their settings
_REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_BYTES = {"type": "ByteFallback"}
_FUSE = {"type": "Fuse"}


class _JsonEncoder:
    def __init__(self, backend: "tokenizers.Tokenizer"):
        self._backend = backend
        self._lock = threading.Lock()  # the mode is a property of the backend, not of a call

    def plain(self, text: str) -> list[int]:
        (encoding,) = self._encode([text], as_text=True)
        if isinstance(encoding, RowError):
            raise encoding
        return encoding.ids

    def parsed(self, texts: Sequence[str]) -> list[list[int] | RowError]:
        return [x if isinstance(x, RowError) else x.ids for x in self._encode(texts)]

    def templated(
        self, texts: Sequence[TextOrPair], max_tokens: int | None = None
    ) -> list[EncodedText | RowError]:
        if max_tokens is not None:
            is_pair = any(not isinstance(text, str) for text in texts)
            needed = self._backend.num_special_tokens_to_add(is_pair)
            if max_tokens <= needed:
                return [no_room(max_tokens, needed)] * len(texts)
        encoded = self._encode(texts, is_templated=True, max_tokens=max_tokens)
        return [x if isinstance(x, RowError) else _by_types(x.ids, x.type_ids) for x in encoded]

    def _encode(
        self, texts: Sequence[TextOrPair], *, max_tokens: int | None = None, **modes: bool
    ) -> "Sequence[tokenizers.Encoding | RowError]":
        try:
            with self._lock, self._truncating(max_tokens):
                self._backend.encode_special_tokens = modes.get("as_text", False)
                # the fast variant computes no offsets; several texts are encoded on all cores
                return self._backend.encode_batch_fast(
                    texts, add_special_tokens=modes.get("is_templated", False)
                )
        except BaseException as error:
            # if a pattern backtracks too often, the library panics; a panic is not an Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            if len(texts) == 1:
                expected = f"expected a text that the tokenizer can encode, got its error: {error}."
                remedy = "Change the text, or give token ids."
                return [RowError("invalid_request", f"{expected} {remedy}")]
        singly = (self._encode([text], max_tokens=max_tokens, **modes) for text in texts)
        return [encoding for (encoding,) in singly]

    @contextmanager
    def _truncating(self, max_tokens: int | None) -> Iterator[None]:
        if max_tokens is None:
            yield
            return
        self._backend.enable_truncation(max_tokens, direction="right")
        try:
            yield
        finally:
            self._backend.no_truncation()


def _by_types(ids: Sequence[int], types: Sequence[int]) -> EncodedText | RowError:
    """The encoded text or pair; types must be zeros, then ones for the second text of a pair."""
    num_first = len(ids) - sum(types)
    if any(types[:num_first]) or not all(kind == 1 for kind in types[num_first:]):
        return RowError(
            "invalid_request",
            "expected a tokenizer with token types 0, then 1, got others. Give token ids.",
        )
    return EncodedText(tuple(ids), num_first)


def tokenizer_from_json(directory: Path) -> Tokenizer:
    """Load `tokenizer.json` of a directory, with the settings in the files beside it.

    Raises:
      InvalidTokenizer: The file is not a tokenizer that can be used.
    """
    library = import_tokenizers("tokenizer.json", extra="hf")
    path = directory / "tokenizer.json"
    settings = read_directory(directory)
    content = read_small(path)
    try:
        backend = library.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises Exception itself
        raise InvalidTokenizer(f"{path}: expected a tokenizer, got: {error}") from None
    # a file may have the truncation and padding of training; a prompt must never be truncated
    backend.no_truncation()
    backend.no_padding()
    _add_tokens(backend, settings)
    bos = _leading_special_token(backend)
    text_settings = settings.resolve(
        backend.token_to_id,
        backend.id_to_token,
        default_bos=bos,
        default_eos=None,
        default_add_bos=bos is not None,
    )
    return build_tokenizer(backend, text_settings, source=str(path))


def _add_tokens(backend: "tokenizers.Tokenizer", settings: DirectorySettings) -> None:
    """Add the tokens that only the files beside `tokenizer.json` have, as transformers does.

    Raises:
      InvalidTokenizer: A token does not get the id that a file gives it.
    """
    known = backend.get_added_tokens_decoder().values()
    numbered = sorted(settings.added_tokens.items())
    exact = {repr(token) for token in known}
    new = [token for _, token in numbered if repr(_library_token(token)) not in exact]
    backend.add_tokens([_library_token(settings.marked(token)) for token in new])
    for token_id, token in numbered:
        if (got := backend.token_to_id(token.text)) != token_id:
            raise settings.wrong_id(token.text, token_id, got)
    texts = {token.content for token in known} | {token.text for _, token in numbered}
    texts |= {
        # a model that begins or ends texts with a token knows it: an id of ours would be a guess
        text
        for role in ("bos_token", "eos_token")
        if (text := settings.named_tokens.get(role)) and backend.token_to_id(text) is None
    }
    special = (token for token in settings.special_tokens if token.text not in texts)
    backend.add_tokens([_library_token(token) for token in special])


def _library_token(token: AddedToken) -> "tokenizers.AddedToken":
    import tokenizers

    return tokenizers.AddedToken(token.text, special=token.is_special, **token.options)


def build_tokenizer(
    backend: "tokenizers.Tokenizer",
    settings: TextSettings,
    *,
    source: str,
    unused_ids: Collection[int] = (),
) -> Tokenizer:
    """Make a Tokenizer from a tokenizer of the library.

    Args:
      source: The file or metadata, for errors.
      unused_ids: Ids that decode to nothing.

    Raises:
      InvalidTokenizer: The vocabulary is empty or sparse, or its decoder is not supported.
    """
    to_bytes, strips_leading_space = _decoding(backend, source)
    ids = backend.get_vocab(with_added_tokens=True)
    if not ids:
        raise InvalidTokenizer(f"{source}: expected a vocabulary, got an empty one.")
    if max(ids.values()) > 2 * len(ids) + 65_536:
        raise InvalidTokenizer(
            f"{source}: expected consecutive token ids, got {len(ids)} tokens with ids up to "
            f"{max(ids.values())}."
        )
    table = [b""] * (max(ids.values()) + 1)
    for text, token in ids.items():
        table[token] = to_bytes(text)
    for token in unused_ids:
        table[token] = b""
    added = backend.get_added_tokens_decoder()
    special = SpecialTokens(
        {token: entry.content for token, entry in added.items() if entry.special},
        strips_left=[token for token, entry in added.items() if entry.lstrip],
        strips_right=[token for token, entry in added.items() if entry.rstrip],
    )
    vocabulary = Vocabulary(table, special, strips_leading_space)
    return Tokenizer(vocabulary, _JsonEncoder(backend), settings)


def import_tokenizers(what: str, *, extra: str):
    """Import the library; ModuleNotFoundError names the extra of noria that installs it."""
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"reading {what} needs the package tokenizers: pip install 'noria[{extra}]'",
            name="tokenizers",
        ) from None
    return tokenizers


def _leading_special_token(backend: "tokenizers.Tokenizer") -> int | None:
    """The special token that the post-processing of the file adds before a text; None without."""
    bare = backend.encode("a", add_special_tokens=False).ids
    ids = backend.encode("a", add_special_tokens=True).ids
    if len(ids) > len(bare) and ids[: len(bare)] != bare:
        entry = backend.get_added_tokens_decoder().get(ids[0])
        if entry is not None and entry.special:
            return ids[0]
    return None


def _decoding(backend: "tokenizers.Tokenizer", source: str) -> tuple[Callable[[str], bytes], bool]:
    """The function from a token's text to its bytes, and whether a leading space is dropped."""
    state: dict = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
    steps: list[dict] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes, False
    if kinds == ["Metaspace"] and steps[0]["replacement"] == "▁":
        return _piece_bytes, steps[0]["prepend_scheme"] != "never"
    if _REPLACE in steps and all(step in (_REPLACE, _BYTES, _FUSE, _STRIP) for step in steps):
        return piece_bytes_with_byte_tokens if _BYTES in steps else _piece_bytes, _STRIP in steps
    if kinds == ["WordPiece"]:
        return partial(_word_piece_bytes, steps[0]["prefix"]), True
    raise InvalidTokenizer(
        f"{source}: expected a byte-level or sentencepiece-like decoder, got {kinds}. Models with "
        "other decoders can be served with prompts of token ids, from a directory without "
        "tokenizer files."
    )


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in text])
    except KeyError:  # an added token, whose text is not in the byte-level alphabet
        return text.encode("utf-8", "replace")


def _word_piece_bytes(mark: str, text: str) -> bytes:
    """The bytes of a word piece; the first token of a word begins with a space."""
    is_inside = text.startswith(mark) and text != mark
    return (text.removeprefix(mark) if is_inside else f" {text}").encode("utf-8", "replace")


def _piece_bytes(text: str) -> bytes:
    return text.replace("▁", " ").encode("utf-8", "replace")


def piece_bytes_with_byte_tokens(text: str) -> bytes:
    """The bytes of a sentencepiece token; `<0xE2>` is the single byte E2."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes.fromhex(text[3:5])
        except ValueError:
            pass
    return _piece_bytes(text)
