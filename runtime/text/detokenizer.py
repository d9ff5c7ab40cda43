"""Decode token ids to text as they arrive, without splitting a character.

Tokens are bytes, and the bytes of a character may be in several tokens: any tokens of a byte-level
vocabulary, and byte tokens such as `<0xE2>` of a sentencepiece vocabulary. The bytes of an
unfinished character are held back until it is complete or invalid.

Does not know about stop strings or requests. Guarantees: the texts of all `push` calls and of
`finish`, joined, equal `tokenizer.decode` of all ids, for any division of the ids; the time of a
push is proportional to the number of its ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenTable(Protocol):
    """The parts of a tokenizer that decoding needs."""

    special_ids: frozenset[int]
    strips_leading_space: bool

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text."""
        ...


class Detokenizer:
    """Decodes one stream of token ids."""

    def __init__(
        self, tokenizer: TokenTable, skip_special_tokens: bool, *, continues_text: bool = False
    ):
        """`continues_text` says that the ids continue a text before them.

        Their first word then keeps its leading space, so that the two texts can be joined.
        """
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = tokenizer.strips_leading_space and not continues_text

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that `ids` complete."""
        data = b"".join([self._token_bytes(i) for i in ids if i not in self._skipped])
        return self._emit(self._decoder.decode(data))

    def finish(self) -> str:
        """Return U+FFFD for an unfinished character; empty if there is none."""
        return self._emit(self._decoder.decode(b"", True))

    @property
    def state(self) -> tuple[tuple[bytes, int], bool]:
        """The state that the next push depends on; setting an older state undoes later pushes."""
        return self._decoder.getstate(), self._strips_space

    @state.setter
    def state(self, state: tuple[tuple[bytes, int], bool]) -> None:
        decoder_state, self._strips_space = state
        self._decoder.setstate(decoder_state)

    def _emit(self, text: str) -> str:
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text
