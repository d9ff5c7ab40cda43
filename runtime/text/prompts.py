"""The prompts of the Python interface as token ids: texts, ids and conversations.

A prompt is a text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`. Does not know
about requests or graphs. Guarantees: ids are Python integers; a prompt that cannot be read raises
RowError, which says what was expected.
"""

import operator
from collections.abc import Mapping, Sequence
from datetime import datetime
from numbers import Number
from types import UnionType
from typing import Any

import numpy as np

from ..embedding.texts import EncodedText, whole_text
from ..errors import RowError, UserError, invalid_request
from .chat_messages import invalid_value
from .chat_template import ChatRenderer
from .tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]


class PromptReader:
    """Reads the prompts for one model.

    Attributes:
      tokenizer: The model's tokenizer; None to refuse texts.
    """

    def __init__(self, tokenizer: Tokenizer | None, now: datetime | None = None):
        """`now` is the local time that chat templates see, by default that of the first chat."""
        self.tokenizer = tokenizer
        self._now = now
        self._renderer: ChatRenderer | None = None

    @property
    def chats(self) -> ChatRenderer:
        """The renderer of conversations, whose process starts on first use.

        Raises:
          RowError: The model has no tokenizer.
        """
        if self._renderer is None:
            if self.tokenizer is None:
                raise RowError(
                    "chat_template_error",
                    "messages: expected a model with a chat template, got one without a "
                    "tokenizer. Use generate with token ids.",
                    "messages",
                )
            self._renderer = ChatRenderer(self.tokenizer, now=self._now)
        return self._renderer

    def read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text of a prompt, or None if it was given as ids, and its token ids."""
        content = _content(prompt)
        if not isinstance(content, str):
            return None, _token_ids(content)
        return content, self._known_tokenizer.encode(content, special_tokens=True)

    def read_whole(
        self, prompt: Prompt, default_prompt: str = "", limit: int | None = None
    ) -> EncodedText:
        """Encode a text after the default prompt, with all special tokens that the model expects.

        The last tokens beyond the limit are cut. Token ids are taken as they are.
        """
        content = _content(prompt)
        if not isinstance(content, str):
            return whole_text(_token_ids(content))
        (encoded,) = self._known_tokenizer.encode_whole([default_prompt + content], [limit])
        if isinstance(encoded, RowError):
            raise encoded
        return encoded

    def close(self) -> None:
        """End the child process that renders chat templates."""
        if self._renderer is not None:
            self._renderer.close()

    @property
    def _known_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise invalid_request(
                "prompt",
                "expected token ids, as this model has no tokenizer, got text. Give token ids.",
            )
        return self.tokenizer


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a call that was given one prompt or several.

    Raises:
      RowError: The argument is neither.
    """
    if isinstance(prompts, str | Mapping | np.ndarray):
        return [prompts]
    prompts = _listed("prompts", "a prompt or a list of prompts", prompts)
    return [prompts] if prompts and isinstance(prompts[0], Number) else prompts


def as_conversations(messages: Any) -> list[Any]:
    """The conversations of a call that was given one conversation or several.

    Raises:
      RowError: The argument is neither.
    """
    messages = _listed("messages", "a list of messages, or of such lists", messages)
    return [messages] if messages and isinstance(messages[0], Mapping) else messages


def one_each(name: str, given: Any, kind: type | UnionType, count: int) -> list[Any]:
    """A value for each prompt, from one value of this kind for all or a list of them.

    Raises:
      RowError: A value is of another kind.
      ValueError: The list has another length.
    """
    if isinstance(given, kind):
        return [given] * count
    expected = getattr(kind, "__name__", str(kind))
    values = _listed(name, f"{expected}, or a list with one for each prompt", given)
    for index, value in enumerate(values):
        if not isinstance(value, kind):
            raise invalid_value(f"{name}[{index}]", expected, value)
    if len(values) != count:
        raise UserError(
            f"{name}: expected one for all prompts or one each ({count}), got {len(values)}."
        )
    return values


def _listed(name: str, expected: str, given: Any) -> list[Any]:
    """A list, a tuple, an array or another sequence as a list; text is no list."""
    is_indexed = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    if not is_indexed or isinstance(given, str | bytes | bytearray | Mapping):
        raise invalid_value(name, expected, given)
    return list(given)


def _content(prompt: Prompt) -> Any:
    """The text or the ids of a prompt."""
    if not isinstance(prompt, Mapping):
        return prompt
    if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
        expected = "{'prompt': text} or {'prompt_token_ids': ids}"
        raise invalid_value("prompt", expected, list(prompt))
    ((key, content),) = prompt.items()
    if isinstance(content, str) != (key == "prompt"):
        expected = "text" if key == "prompt" else "token ids"
        raise invalid_value(f"prompt[{key!r}]", expected, content)
    return content


def _token_ids(prompt: Any) -> list[int]:
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1:
            raise _no_ids(f"an array of shape {prompt.shape}", "Give its rows as list(array)")
        prompt = prompt.tolist()
    try:
        ids = list(prompt)
        # bytes are integers in Python too; an array of bool is a mask, not a prompt
        if isinstance(prompt, bytes | bytearray) or any(isinstance(t, bool) for t in ids):
            raise TypeError
        return [operator.index(token) for token in ids]
    except TypeError:
        remedy = "Give token ids as integers, as with array.astype(int), or text"
        raise _no_ids(repr(prompt)[:60], remedy) from None


def _no_ids(got: str, remedy: str) -> RowError:
    expected = "text, or a list or one-dimensional array of integers"
    return RowError("invalid_request", f"prompt: expected {expected}, got {got}. {remedy}.")
