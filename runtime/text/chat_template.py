"""Chat messages to token ids, by the template that the model brings.

The template runs in a process of its own, with limits (`template_process`). What users wrote can
never become a special token: see `special_tokens`. For everything else the ids are those of
transformers' `apply_chat_template`: the template alone says where BOS stands, none is added.

Knows nothing about requests or batches. Guarantees: messages that are not messages are refused with
the place named, before the template sees them; a template that fails, or takes too long, costs the
one row and not the job.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..request import RowError
from .chat_messages import checked_json, checked_messages, strings_in
from .special_tokens import unused_character
from .template_process import TemplateFailure, TemplateLimits, TemplateProcess
from .tokenizer import Tokenizer

# Variables of templates that are not for the caller of a request to set.
_RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "chat_template", "bos_token", "eos_token", "unk_token", "pad_token"),
    }
)


class ChatRenderer:
    """Renders and encodes conversations for one tokenizer; close it, or use it in `with`."""

    def __init__(self, tokenizer: Tokenizer, *, limits: TemplateLimits | None = None):
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self._process = TemplateProcess(template, limits or TemplateLimits()) if template else None

    def encode(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Encodes a conversation, by default up to where the assistant's answer begins.

        `template_kwargs` are variables that the template reads, such as `enable_thinking`.
        Raises RowError: `invalid_request` for the arguments, `chat_template_error` for the rest.
        """
        if not self._process:
            raise RowError(
                "chat_template_error",
                "the tokenizer has no chat template; send /v1/completions or use a model with one",
                "messages",
            )
        conversation = checked_messages(messages)
        variables = checked_json(template_kwargs or {}, "chat_template_kwargs")
        mark = unused_character(
            [self._tokenizer.chat_template or "", *strings_in(conversation), *strings_in(variables)]
        )
        try:
            self._check_variables(variables)
            text = self._process.render(
                {
                    **self._tokenizer.named_tokens,
                    **self._protected(variables, mark),
                    "messages": self._protected(conversation, mark),
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateFailure as error:
            raise RowError(
                "chat_template_error", f"the chat template failed: {error}", "messages"
            ) from None
        text = text.replace(json.dumps(mark)[1:-1], mark)  # spelt out by JSON in ASCII
        return self._tokenizer.encode_rendered(text, mark)

    def close(self) -> None:
        """Ends the template's process."""
        if self._process:
            self._process.close()

    def __enter__(self) -> "ChatRenderer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_variables(self, variables: Mapping[str, object]) -> None:
        if not variables or not self._process:
            return
        known = self._process.variables() - _RESERVED
        for name in variables:
            if name not in known:
                raise RowError(
                    "invalid_request",
                    f"chat_template_kwargs: expected variables of the template, {sorted(known)}, "
                    f"got {name!r}.",
                    "chat_template_kwargs",
                )

    def _protected(self, value: Any, mark: str) -> Any:
        """`value` with each of its strings protected, keys included."""
        if isinstance(value, str):
            return self._tokenizer.special_tokens.protect(value, mark)
        if isinstance(value, list):
            return [self._protected(item, mark) for item in value]
        if isinstance(value, dict):
            return {
                self._protected(key, mark): self._protected(item, mark)
                for key, item in value.items()
            }
        return value
