"""Encodes the texts of requests for vectors, scores and classes into token ids.

Texts get the prompt that the model's files put before every text, and the special tokens of the
tokenizer's template; token ids are taken as they are. The last tokens of a text are cut if the
request says so, or if the model's files limit the length of texts. The texts of a row are packed
into one list (`embedding.texts`). Does not know about files or buckets. Guarantees: packed texts or
a `RowError` for each request.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..embedding.texts import EncodedText, pack, whole_text
from ..errors import RowError, invalid_request
from ..text.tokenizer import Tokenizer
from .pooled_body import PooledRequest

if TYPE_CHECKING:
    from ...modelzoo.config import DecoderConfig


class PooledEncoder:
    """Encodes many requests at once.

    Args:
        tokenizer: The model's tokenizer; None to refuse text.
        config: Returns the model's configuration; called if there are requests.
        is_strict: Whether texts that the limit of the model's files would cut are refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        config: "Callable[[], DecoderConfig]",
        *,
        is_strict: bool = False,
    ):
        self._tokenizer, self._config, self._is_strict = tokenizer, config, is_strict

    def __call__(self, requests: Sequence[PooledRequest]) -> Iterator[Sequence[int] | RowError]:
        items = [[(item, self._limit(r)) for item in self._items(r)] for r in requests]
        texts = [(text, limit) for own in items for text, limit in own if not _is_ids(text)]
        encoded: Iterator[EncodedText | RowError] = iter(())
        if self._tokenizer is not None:
            prompt = self._config().pooling.prompt
            prompted = [prompt + text if isinstance(text, str) else text for text, _ in texts]
            encoded = iter(self._tokenizer.encode_whole(prompted, [limit for _, limit in texts]))
        for request, own in zip(requests, items, strict=True):
            found: list[EncodedText] = []
            errors = []
            if (kept := request.max_tokens or 0) > 0 and kept > self._max_length:
                errors.append(too_long(self._max_length, kept))
            for (text, limit), place in zip(own, request.places(len(own)), strict=True):
                if _is_ids(text):
                    # the limit of the model's files is one of texts
                    each = whole_text(text[: limit if request.max_tokens else None])
                    each = each._replace(num_cut=len(text) - len(each.ids))
                else:
                    each = self._checked(next(encoded, None), request, limit, place)
                if isinstance(each, RowError):
                    errors.append(each)
                elif not each.ids:
                    message = f"{place}: expected at least one token, got none."
                    errors.append(RowError("empty_prompt", message, place))
                else:
                    found.append(each)
            yield errors[0] if errors else pack(found)

    def _items(self, request: PooledRequest) -> Sequence[Any]:
        """The texts, or pairs of texts, that the model reads for a request."""
        if request.task not in ("score", "rerank"):
            return request.texts
        is_classifier = bool(self._config().pooling.labels)
        return request.pairs if is_classifier else (*request.texts, *request.others)

    def _limit(self, request: PooledRequest) -> int | None:
        """The largest number of tokens of a text of a request."""
        if request.max_tokens is None:
            return self._config().pooling.max_tokens
        return self._max_length if request.max_tokens == -1 else request.max_tokens

    def _checked(
        self,
        text: EncodedText | RowError | None,
        request: PooledRequest,
        limit: int | None,
        place: str,
    ) -> EncodedText | RowError:
        """An encoded text, or the error that refuses it."""
        if text is None:
            return no_tokenizer(place)
        is_asked = request.max_tokens is not None
        if isinstance(text, RowError) or not text.num_cut or is_asked or not self._is_strict:
            return text
        return RowError(
            "context_length_exceeded",
            f"{place}: expected at most {limit} tokens, the max_seq_length of the model, got "
            f"{len(text.ids) + text.num_cut}. Shorten it, or cut it by truncate_prompt_tokens.",
            place,
        )

    @property
    def _max_length(self) -> int:
        config = self._config()
        return min(config.max_position, config.pooling.max_tokens or config.max_position)


def no_tokenizer(param: str) -> RowError:
    """The error of a text for a model without a tokenizer."""
    return invalid_request(
        param,
        "this model has no tokenizer, so text cannot be read. Give the prompt of "
        "/v1/completions, or the input of /v1/embeddings, as a list of token ids.",
    )


def too_long(max_length: int, kept: int) -> RowError:
    """The error of a request that would keep more tokens than the model has positions for."""
    return invalid_request(
        "truncate_prompt_tokens",
        f"expected -1 or at most {max_length}, the maximum length of the "
        f"model, got {kept}. Keep fewer tokens.",
    )


def _is_ids(item: object) -> bool:
    """Whether a text is given as token ids; a pair of texts is a tuple of strings."""
    return isinstance(item, tuple) and isinstance(item[0], int)
