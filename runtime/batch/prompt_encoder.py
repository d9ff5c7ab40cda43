"""Encodes the prompts of batch rows into token ids.

Token ids are taken as they are. Texts to embed get the special tokens of the tokenizer's template,
and those of a row are packed into one list (`embedding.texts`). The text of a completions prompt is
encoded with special tokens parsed and the model's BOS rule applied. Chat messages are rendered by
the model's template. Without a tokenizer only token ids are accepted; other rows get an error. The
form that a row asks for is compiled here, because its errors are errors of the row.

Does not know about files or buckets. Guarantees: token ids or a `RowError` for each row.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

from ..embedding.texts import EncodedText, pack, whole_text
from ..errors import RowError
from ..structured.structures import Structures
from ..text.chat_template import Conversation
from ..text.tokenizer import Tokenizer
from .lines import BatchRow
from .pooled_body import PooledRequest

Encoded = Sequence[int] | RowError
EncodeAll = Callable[[Sequence[Any]], Sequence[Encoded]]


class PromptEncoder:
    """Encodes many rows at once.

    Args:
        tokenizer: The model's tokenizer; None to refuse text.
        encode_chats: Renders and encodes conversations; None to refuse messages.
        compares_pairs: Whether the model reads two texts to compare together.
        structures: Compiles the forms that rows ask for.
        refuse: Returns the error of a row that the model cannot answer, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        encode_chats: EncodeAll | None = None,
        structures: Structures | None = None,
        compares_pairs: Callable[[], bool] = lambda: False,
        refuse: Callable[[BatchRow], RowError | None] = lambda row: None,
    ):
        self._tokenizer, self._compares_pairs = tokenizer, compares_pairs
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
                row.messages, row.chat_template_kwargs, tools=row.tools and row.tools.tools
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
            return _not_empty(next(encoded_chats if row.prompt is None else encoded_texts))

        encoded = list(map(next_of, rows))
        return [self._with_form(row, ids) for row, ids in zip(rows, encoded, strict=True)]

    def _encode_pooled(self, requests: Sequence[PooledRequest]) -> Iterator[Encoded]:
        """The packed texts of each request; the texts of all requests are encoded together."""
        items = [self._items(request) for request in requests]
        texts = [text for own in items for text in own if not _is_ids(text)]
        encoded: Iterator[EncodedText | RowError] = repeat(_no_tokenizer("input"))
        if self._tokenizer is not None:
            encoded = iter(self._tokenizer.encode_whole(texts))
        for own in items:
            found: list[EncodedText] = []
            errors: list[RowError] = []
            for text in own:
                each = whole_text(text) if _is_ids(text) else next(encoded)
                if isinstance(each, RowError):
                    errors.append(each)
                elif not each.ids:
                    message = "input: expected at least one token in each text, got none."
                    errors.append(RowError("empty_prompt", message, "input"))
                else:
                    found.append(each)
            yield errors[0] if errors else pack(found)

    def _items(self, request: PooledRequest) -> Sequence[Any]:
        """The texts, or pairs of texts, that the model reads for a request."""
        if request.task in ("score", "rerank"):
            return request.pairs if self._compares_pairs() else (*request.texts, *request.others)
        return request.texts

    def _with_form(self, row: BatchRow, encoded: Encoded) -> Encoded:
        """The encoded prompt, or the error of the form that the row asks for."""
        if (form := row.params.structured_outputs) is not None:
            try:
                self._structures.automaton(form)
            except RowError as error:
                return error
        return encoded


def _not_empty(encoded: Encoded) -> Encoded:
    if isinstance(encoded, RowError) or encoded:
        return encoded
    return RowError("empty_prompt", "prompt: expected at least one token, got none.")


def _or_refuse(encode_all: EncodeAll | None, param: str) -> EncodeAll:
    if encode_all is not None:
        return encode_all
    error = _no_tokenizer(param)
    return lambda prompts: [error] * len(prompts)


def _no_tokenizer(param: str) -> RowError:
    return RowError(
        "invalid_request",
        f"{param}: this model has no tokenizer, so text cannot be read. Give the prompt of "
        "/v1/completions, or the input of /v1/embeddings, as a list of token ids.",
        param,
    )


def _is_ids(text: object) -> bool:
    """Whether a text is given as token ids; a pair of texts is a tuple of strings."""
    return isinstance(text, tuple) and isinstance(text[0], int)
