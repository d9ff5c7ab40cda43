"""Collect the text of one sampled continuation from its token ids, up to a stop string.

The engine decodes several steps per call, so ids after the end of the text may arrive; they are
counted and otherwise ignored. Does not know about the device or the batch.

Guarantees: a stop string is found across token boundaries; the result does not depend on how the
ids are divided into calls of `push`; no character is split.
"""

from collections.abc import Sequence

from ..errors import RowError
from ..request import SamplingParams
from .detokenizer import Detokenizer
from .tokenizer import Tokenizer


class TextCollector:
    """Collects ids into a text until a stop string ends the text.

    Attributes:
      text: The text so far, without the bytes of an unfinished character.
      num_tokens_kept: The number of ids up to and including the id that completed the stop string.
      num_tokens_past_stop: The number of ids after it.
      stop_reason: The stop string that ended the text, or None.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, *, continues_text: bool = True
    ):
        """Without a tokenizer the text stays empty, and stop strings are refused with RowError.

        `continues_text` is passed to the Detokenizer: True, as the ids continue their prompt.
        """
        if tokenizer is None and params.stop:
            raise RowError(
                "invalid_request",
                "stop: expected no stop strings, as the model has no tokenizer, got "
                f"{list(params.stop)!r}. Use stop_token_ids.",
                "stop",
            )
        self._params = params
        self._detokenizer = tokenizer and Detokenizer(
            tokenizer, params.skip_special_tokens, continues_text=continues_text
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
