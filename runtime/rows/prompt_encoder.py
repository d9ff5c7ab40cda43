"""Encodes the prompts of batch rows into token ids.

Token ids are taken as they are. The text of a completions prompt is encoded with special tokens
parsed and the model's BOS rule applied. Chat messages are rendered by the model's template. Without
a tokenizer only token ids are accepted; other rows get an error. A row may ask for the last tokens
of its prompt only. The form that a row asks for is compiled here, because its errors are errors of
the row.

Does not know about files or buckets. Guarantees: token ids or a `RowError` for each row.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import RowError
from ..structured.structures import Structures
from ..text.chat_template import Conversation
from ..text.tokenizer import Tokenizer
from .lines import BatchRow
from .pooled_body import PooledRequest
from .pooled_encoder import no_tokenizer, too_long

Encoded = Sequence[int] | RowError
EncodeAll = Callable[[Sequence[Any]], Sequence[Encoded]]
EncodePooled = Callable[[Sequence[PooledRequest]], Iterable[Encoded]]


class PromptEncoder:
    """Encodes many rows at once.

    Args:
        tokenizer: The model's tokenizer; None to refuse text.
        encode_chats: Renders and encodes conversations; None to refuse messages.
        structures: Compiles the forms that rows ask for.
        encode_pooled: Encodes requests for vectors of texts; None to refuse them.
        refuse: Returns the error of a row that the model cannot answer, or None.
        max_length: Returns the number of positions of the model; called for rows whose prompts are
            cut to it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        encode_chats: EncodeAll | None = None,
        structures: Structures | None = None,
        encode_pooled: EncodePooled | None = None,
        refuse: Callable[[BatchRow], RowError | None] = lambda row: None,
        max_length: Callable[[], int] = lambda: sys.maxsize,
    ):
        self._max_length = max_length
        self._bos_id = tokenizer.bos_id if tokenizer is not None and tokenizer.add_bos else None
        self._encode_pooled = encode_pooled or _or_refuse(None, "input")
        self._structures, self._refuse = structures or Structures(), refuse
        encode_texts = None if tokenizer is None else tokenizer.encode_prompts
        self._encode_texts = _or_refuse(encode_texts, "prompt")
        self._encode_chats = _or_refuse(encode_chats, "messages")

    def __call__(self, rows: Sequence[BatchRow]) -> list[Encoded]:
        refusals = [self._refuse(row) for row in rows]
        encoded = iter(self._encode([row for row, e in zip(rows, refusals, strict=True) if not e]))
        return [error or next(encoded) for error in refusals]

    def _encode(self, rows: Sequence[BatchRow]) -> list[Encoded]:
        """Token ids or an error for each row that the model can answer."""
        texts = [row.prompt for row in rows if row.prompt is not None]
        chats = [
            Conversation(
                row.messages,
                row.chat_template_kwargs,
                row.add_generation_prompt,
                row.tools and row.tools.tools,
                row.continue_final_message,
            )
            for row in rows
            if row.messages is not None
        ]
        encoded_pooled = iter(self._encode_pooled([row.pooled for row in rows if row.pooled]))
        encoded_texts = iter(self._encode_texts(texts))
        encoded_chats = iter(self._encode_chats(chats))

        def next_of(row: BatchRow) -> Encoded:
            if row.pooled is not None:
                return next(encoded_pooled)
            if row.prompt_token_ids is not None:
                return row.prompt_token_ids
            ids = next(encoded_chats if row.prompt is None else encoded_texts)
            if isinstance(ids, RowError) or ids:
                return ids
            return RowError("empty_prompt", "prompt: expected at least one token, got none.")

        encoded = [self._cut(row, next_of(row)) for row in rows]
        return [self._with_form(row, ids) for row, ids in zip(rows, encoded, strict=True)]

    def _cut(self, row: BatchRow, encoded: Encoded) -> Encoded:
        """The last tokens of an encoded prompt, as many as its row asks for, after its BOS."""
        kept = row.max_prompt_tokens
        if kept is None or isinstance(encoded, RowError):
            return encoded
        max_length = self._max_length()
        if kept > max_length:
            return too_long(max_length, kept)
        if kept == -1:
            # an answer needs positions, too
            params = row.params
            answer = params.min_tokens or 1 if params.max_tokens is None else params.max_tokens
            kept = max(1, max_length - answer)
        if len(encoded) <= kept:
            return encoded
        if row.prompt is not None and encoded[0] == self._bos_id:
            return [encoded[0], *encoded[len(encoded) - kept + 1 :]]
        return encoded[-kept:]

    def _with_form(self, row: BatchRow, encoded: Encoded) -> Encoded:
        """The encoded prompt, or the error of the form that the row asks for."""
        if (form := row.params.form) is not None:
            try:
                self._structures.automaton(form)
            except RowError as error:
                return error
        return encoded


def _or_refuse(encode_all: EncodeAll | None, param: str) -> EncodeAll:
    if encode_all is not None:
        return encode_all
    error = no_tokenizer(param)
    return lambda prompts: [error] * len(prompts)
