"""The prompt of a batch row -> token ids.

Token ids are taken as they are; the text of a completions prompt is encoded with special tokens
parsed and the model's BOS rule applied; chat messages go through the model's template. A model
without a tokenizer serves token ids only, and says so row by row.

Knows nothing of files or buckets. Guarantees: token ids, or a `RowError`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..request import RowError
from .lines import BatchRow


class TextEncoder(Protocol):
    """The part of a tokenizer that encodes a prompt's text."""

    def encode(self, text: str, *, special_tokens: bool) -> list[int]: ...


class PromptEncoder:
    """Encodes rows; `encode_chat(messages, template_kwargs=...)` renders a model's template."""

    def __init__(
        self, tokenizer: TextEncoder | None, encode_chat: Callable[..., list[int]] | None = None
    ):
        self._tokenizer = tokenizer
        self._encode_chat = encode_chat

    def __call__(self, row: BatchRow) -> Sequence[int]:
        if row.prompt_token_ids is not None:
            return row.prompt_token_ids
        token_ids = self._encode_text(row)
        if not token_ids:
            raise RowError("empty_prompt", "prompt: expected at least one token, got none.")
        return token_ids

    def _encode_text(self, row: BatchRow) -> list[int]:
        if row.prompt is not None:
            return _needed(self._tokenizer, "prompt").encode(row.prompt, special_tokens=True)
        encode_chat = _needed(self._encode_chat, "messages")
        return encode_chat(row.messages, template_kwargs=dict(row.chat_template_kwargs))


def _needed(part: Any, param: str) -> Any:
    if part is None:
        raise RowError(
            "invalid_request",
            f"{param}: this model has no tokenizer, so text cannot be read. Give the prompt of "
            "/v1/completions as a list of token ids.",
            param,
        )
    return part
