"""Reads the bodies of requests that need one vector for each text: embeddings, scores, classes.

The forms are those of OpenAI's `/v1/embeddings` and of vLLM's `/v1/score`, `/v1/rerank` and
`/v1/classify`. Unknown keys are refused by name. A key with the value null counts as absent, and
whole numbers such as 3.0 are integers. Does not know about lines, tokenizers or models. Guarantees:
every body gives a `PooledRequest` or raises `RowError`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import RowError, invalid_request
from ..parameters.checks import wrong_value
from ..parameters.vllm_options import AcceptedValues
from .body_keys import (
    HINTS,
    check_ids,
    check_keys,
    given_values,
    max_prompt_tokens,
    refused,
    switch,
)

Task = Literal["embed", "score", "rerank", "classify"]
Text = str | tuple[int, ...]
"""A text, or its token ids."""

EMBEDDING_URL = "/v1/embeddings"
POOLED_URLS: Mapping[str, Task] = {
    EMBEDDING_URL: "embed",
    "/v1/score": "score",
    "/score": "score",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
    "/v1/classify": "classify",
    "/classify": "classify",
}
"""The task of each endpoint."""

MAX_TEXTS = 2048
"""The maximum number of texts of a request, as in OpenAI's interface."""
_COMMON = ("truncate_prompt_tokens", "model")
POOLED_KEYS: Mapping[Task, tuple[str, ...]] = {
    "embed": ("input", "encoding_format", "dimensions", *_COMMON),
    "score": ("text_1", "text_2", "use_activation", *_COMMON),
    "rerank": ("query", "documents", "top_n", "use_activation", *_COMMON),
    "classify": ("input", "use_activation", *_COMMON),
}
PAIR_KEYS: Mapping[Task, tuple[str, str]] = {
    "score": ("text_1", "text_2"),
    "rerank": ("query", "documents"),
}
"""The keys of the two texts of a pair."""
_INTEGERS = ("dimensions", "top_n", "truncate_prompt_tokens")
POOLED_OTHERS: Mapping[str, AcceptedValues] = {
    **HINTS,
    "add_special_tokens": AcceptedValues((True,), "Give token ids for a text without them"),
    "embed_dtype": AcceptedValues(("float32",), "Vectors have float32"),
    "endianness": AcceptedValues(("native", "little"), "The format base64 is little-endian"),
    "return_documents": AcceptedValues((True,), "Results of rerank have their documents"),
    **refused("Give the text as a string", "messages"),
    **refused("Give use_activation", "activation", "softmax"),
    **refused("Vectors are normalised as the model's files say", "normalize"),
}
"""The other keys, with the values that change no answer."""


@dataclass(frozen=True)
class PooledRequest:
    """Texts, and the form of the answer."""

    task: Task
    texts: tuple[Text, ...]
    """The inputs. For pairs, the first text of each pair, or one first text for all pairs."""
    others: tuple[str, ...] = ()
    """The second text of each pair."""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    """The number of leading features to keep; None for all."""
    top_n: int | None = None
    """The number of the best documents to return; None for all."""
    use_activation: bool = True
    """Whether the outputs of a classifier become probabilities."""
    max_tokens: int | None = None
    """The number of first tokens of each text to keep; None for all.

    -1 keeps as many as the model's maximum length.
    """

    @property
    def pairs(self) -> list[tuple[Text, str]]:
        """The pairs of texts to compare."""
        firsts = self.texts * len(self.others) if len(self.texts) == 1 else self.texts
        return list(zip(firsts, self.others, strict=True))

    def places(self, num_texts: int) -> list[str]:
        """The place in the body of each text, or pair of texts, that the model reads."""
        if self.task not in ("score", "rerank"):
            return _places("input", num_texts)
        first, second = PAIR_KEYS[self.task]
        others = _places(second, len(self.others))
        # a pair is named by its second text, as the first one may be the same for all
        return others if num_texts == len(self.others) else _places(first, len(self.texts)) + others


def read_pooled(task: Task, body: Mapping[str, Any]) -> PooledRequest:
    """Read the body of a request.

    Raises:
        RowError: A key is unknown or unsupported, or its value is invalid.
    """
    given = given_values(body, _INTEGERS)
    check_keys(given, POOLED_KEYS[task], POOLED_OTHERS)
    return replace(_request(task, given), max_tokens=max_prompt_tokens(given))


def _request(task: Task, given: Mapping[str, Any]) -> PooledRequest:
    if task in PAIR_KEYS:
        return _pairs(task, given)
    inputs = _inputs(given.get("input"))
    if task == "classify":
        use_activation = switch(given, "use_activation", default=True)
        return PooledRequest(task, inputs, use_activation=use_activation)
    return PooledRequest(
        task,
        inputs,
        encoding_format=_encoding_format(given),
        dimensions=_count(given, "dimensions"),
    )


def _pairs(task: Task, given: Mapping[str, Any]) -> PooledRequest:
    first, second = PAIR_KEYS[task]
    if task == "rerank" and not isinstance(given.get(first), str):
        raise wrong_value(first, "a string", given.get(first))
    seconds = given.get(second)
    if task == "rerank" and isinstance(seconds, list):
        # a document may be an object with its text alone
        seconds = [
            item["text"] if isinstance(item, dict) and item.keys() == {"text"} else item
            for item in seconds
        ]
    texts, others = _strings(first, given.get(first)), _strings(second, seconds)
    if len(texts) not in (1, len(others)):
        raise invalid_request(
            first,
            f"expected one text, or as many as {second} has ({len(others)}), got {len(texts)}.",
        )
    return PooledRequest(
        task,
        texts,
        others,
        top_n=_count(given, "top_n", for_all=(0, -1)),
        use_activation=switch(given, "use_activation", default=True),
    )


def _places(key: str, num_texts: int) -> list[str]:
    return [key] if num_texts == 1 else [f"{key}[{index}]" for index in range(num_texts)]


def _strings(key: str, value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise wrong_value(key, "a string or a list of strings", value)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            or_object = ' or {"text": string}' if key == "documents" else ""
            raise wrong_value(f"{key}[{index}]", f"a string{or_object}", text, key)
    return tuple(_limited(key, texts))


def _inputs(value: object) -> tuple[Text, ...]:
    """The texts of `input`: a string, token ids, or a list of strings or of lists of ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise wrong_value("input", "a string, token ids, or a list of them", value)
    if all(isinstance(item, str) for item in value):
        return tuple(_limited("input", value))
    if all(isinstance(item, list) for item in value):
        lists = enumerate(_limited("input", value))
        return tuple(_token_ids(f"input[{index}]", ids) for index, ids in lists)
    if any(isinstance(item, str | list) for item in value):
        raise wrong_value("input", "a list of strings, of token ids or of lists of them", value)
    return (_token_ids("input", value),)


def _limited(key: str, items: list[Any]) -> Sequence[Any]:
    if len(items) > MAX_TEXTS:
        raise wrong_value(key, f"at most {MAX_TEXTS} texts", len(items))
    return items


def _token_ids(where: str, ids: list[Any]) -> tuple[int, ...]:
    check_ids(where, ids, "input")
    if not ids:
        raise RowError("empty_prompt", f"{where}: expected text or token ids, got none.", "input")
    return tuple(ids)


def _encoding_format(given: Mapping[str, Any]) -> Literal["float", "base64"]:
    value = given.get("encoding_format", "float")
    if value not in ("float", "base64"):
        raise wrong_value("encoding_format", "'float' or 'base64'", value)
    return value


def _count(given: Mapping[str, Any], key: str, for_all: tuple[int, ...] = ()) -> int | None:
    """A number of at least 1; None for all, which the numbers `for_all` mean too."""
    value = given.get(key)
    # bool is an int in Python, but true is no number
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if value is None or (is_integer and value in for_all):
        return None
    if not is_integer or value < 1:
        or_all = f", or {' or '.join(map(str, for_all))} for all" if for_all else ""
        raise wrong_value(key, f"an integer of at least 1{or_all}", value)
    return value
