"""Encodes the texts of requests for vectors, scores and classes into token ids.

Texts get the prompt that the model's files put before every text, and the special tokens of the
tokenizer's template; token ids are taken as they are. The texts of a row are packed into one list
(`embedding.texts`). Does not know about files or buckets. Guarantees: packed texts or a `RowError`
for each request.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from ..embedding.texts import EncodedText, pack, whole_text
from ..errors import RowError
from ..text.tokenizer import TextOrPair, Tokenizer
from .pooled_body import PooledRequest, Text

if TYPE_CHECKING:
    from ...modelzoo.config import DecoderConfig

Item = Text | tuple[str, str]
"""What the model reads at once: a text, its token ids, or a pair of texts."""


class PooledEncoder:
    """Encodes many requests at once.

    Args:
        tokenizer: The model's tokenizer; None to refuse text.
        config: Returns the model's configuration; called if there are requests.
    """

    def __init__(self, tokenizer: Tokenizer | None, config: "Callable[[], DecoderConfig]"):
        self._tokenizer, self._config = tokenizer, config

    def __call__(self, requests: Sequence[PooledRequest]) -> Iterator[Sequence[int] | RowError]:
        items = [self._items(request) for request in requests]
        texts = [self._with_prompt(text) for own in items for text in own if not _is_ids(text)]
        encoded: Iterator[EncodedText | RowError] = repeat(no_tokenizer("input"))
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

    def _items(self, request: PooledRequest) -> Sequence[Item]:
        """The texts, or pairs of texts, that the model reads for a request."""
        if request.task not in ("score", "rerank"):
            return request.texts
        is_classifier = bool(self._config().pooling.labels)
        return request.pairs if is_classifier else (*request.texts, *request.others)

    def _with_prompt(self, text: TextOrPair) -> TextOrPair:
        return self._config().pooling.prompt + text if isinstance(text, str) else text


def no_tokenizer(param: str) -> RowError:
    """The error of a text for a model without a tokenizer."""
    return RowError(
        "invalid_request",
        f"{param}: this model has no tokenizer, so text cannot be read. Give the prompt of "
        "/v1/completions, or the input of /v1/embeddings, as a list of token ids.",
        param,
    )


def _is_ids(item: Item) -> bool:
    """Whether a text is given as token ids; a pair of texts is a tuple of strings."""
    return isinstance(item, tuple) and isinstance(item[0], int)
