"""Decode token ids to text as they arrive, and end a text at a stop string.

Tokens are bytes, and the bytes of a character may be in several tokens: any tokens of a byte-level
vocabulary, and byte tokens such as `<0xE2>` of a sentencepiece vocabulary. The bytes of an
unfinished character are held back until it is complete or invalid.

The engine decodes several steps per call, so ids after the end of a text may arrive; they are
counted and otherwise ignored.

Does not know about the device or the batch. Guarantees: the texts of all `Detokenizer.push` calls
and of `finish`, joined, equal `tokenizer.decode` of all ids, for any division of the ids, except
for the leading space that `continues_text` keeps; a stop string is found across token boundaries;
no character is split; without stop strings, the time of a push is proportional to the number of its
ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from ..errors import invalid_request
from ..request import SamplingParams


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


class TextCollector:
    """Collects ids into a text until a stop string ends the text.

    Attributes:
      text: The text so far, without the bytes of an unfinished character.
      num_tokens_kept: The number of ids up to and including the id that completed the stop string.
      num_tokens_past_stop: The number of ids after it.
      stop_reason: The stop string that ended the text, or None.
    """

    def __init__(self, tokenizer: TokenTable | None, params: SamplingParams):
        """Without a tokenizer the text stays empty, and stop strings are refused with RowError."""
        if tokenizer is None and params.stop:
            raise invalid_request(
                "stop",
                "expected no stop strings, as the model has no tokenizer, got "
                f"{list(params.stop)!r}. Use stop_token_ids.",
            )
        self._params = params
        self._detokenizer = None
        if tokenizer is not None:
            # the ids continue their prompt
            self._detokenizer = Detokenizer(
                tokenizer, params.skip_special_tokens, continues_text=True
            )
        self.text = ""
        self.num_tokens_kept = 0
        self.num_tokens_past_stop = 0
        self.stop_reason: str | None = None

    @property
    def may_stop(self) -> bool:
        """Whether a stop string may end the text."""
        return bool(self._params.stop)

    def push(self, ids: Sequence[int], *, ends_with_stop_token: bool = False) -> bool:
        """Add the next ids; returns True if a stop string has ended the text.

        `ends_with_stop_token` says that the last id is the stop token that ended the sequence. It
        is counted as kept, and is in the text only with `include_stop_str_in_output`.
        """
        if self.stop_reason is not None:
            self.num_tokens_past_stop += len(ids)
            return True
        if not self.may_stop:
            self._take(ids, ends_with_stop_token)
            return False
        num_kept, text, old_length = self.num_tokens_kept, self.text, len(self.text)
        state = self._detokenizer.state if self._detokenizer else None
        self._take(ids, ends_with_stop_token)
        if not any(self._find(stop, old_length) >= 0 for stop in self._params.stop):
            return False
        # push the ids again one by one, to find the token that completes the stop string
        self.num_tokens_kept, self.text = num_kept, text
        if self._detokenizer and state:
            self._detokenizer.state = state
        return self._push_singly(ids, ends_with_stop_token)

    def finish(self) -> str:
        """End the text, with an unfinished character as U+FFFD, and return the whole text."""
        if self._detokenizer and self.stop_reason is None:
            self.text += self._detokenizer.finish()
        return self.text

    def _push_singly(self, ids: Sequence[int], ends_with_stop_token: bool) -> bool:
        for position, token in enumerate(ids):
            if self.stop_reason is not None:
                self.num_tokens_past_stop += len(ids) - position
                break
            old_length = len(self.text)
            self._take((token,), ends_with_stop_token and position == len(ids) - 1)
            # a stop string that is completed within the first min_tokens tokens does not count
            if self.num_tokens_kept > self._params.min_tokens:
                self._end_at_stop(old_length)
        return self.stop_reason is not None

    def _take(self, ids: Sequence[int], ends_with_stop_token: bool) -> None:
        self.num_tokens_kept += len(ids)
        is_last_hidden = ends_with_stop_token and not self._params.include_stop_str_in_output
        if self._detokenizer:
            self.text += self._detokenizer.push(ids[:-1] if is_last_hidden else ids)

    def _find(self, stop: str, old_length: int) -> int:
        """The index of a stop string that the text after `old_length` completes, or -1."""
        if len(self.text) == old_length:
            return -1
        return self.text.find(stop, max(0, old_length - len(stop) + 1))

    def _end_at_stop(self, old_length: int) -> None:
        """End the text at the first stop string that the text after `old_length` completes."""
        starts = [(self._find(stop, old_length), stop) for stop in self._params.stop]
        first = min((s for s in starts if s[0] >= 0), key=lambda s: s[0], default=None)
        if first:
            start, self.stop_reason = first
            is_shown = self._params.include_stop_str_in_output
            self.text = self.text[: start + len(self.stop_reason) if is_shown else start]
