"""Token ids to text as they arrive, without ever splitting a character.

Tokens are bytes, and a character may be spread over several tokens: in a byte-level vocabulary
anywhere, in a sentencepiece one through byte tokens such as `<0xE2>`. The bytes of an unfinished
character are held back until it is complete or cannot become one any more.

Knows nothing about stop strings or requests. Guarantees: the texts of all `push` calls and of
`finish`, put together, are `tokenizer.decode` of all the ids, however the ids were divided; a push
costs time in proportion to its own ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenTable(Protocol):
    """The parts of a tokenizer that decoding reads."""

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
        """Takes `continues_text=True` where the ids continue a text that stands before them.

        Their first word then keeps its space: text before and text after can be joined as they are.
        """
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = tokenizer.strips_leading_space and not continues_text

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that `ids` complete."""
        data = b"".join([self._token_bytes(i) for i in ids if i not in self._skipped])
        return self._emit(self._decoder.decode(data))

    def finish(self) -> str:
        """Returns what is left of an unfinished character, as U+FFFD."""
        return self._emit(self._decoder.decode(b"", True))

    @property
    def state(self) -> tuple[tuple[bytes, int], bool]:
        """All that the next push depends on; setting it undoes the pushes since it was read."""
        return self._decoder.getstate(), self._strips_space

    @state.setter
    def state(self, state: tuple[tuple[bytes, int], bool]) -> None:
        of_decoder, self._strips_space = state
        self._decoder.setstate(of_decoder)

    def _emit(self, text: str) -> str:
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text
