"""Render chat messages with the template of a model, and encode them as token ids.

The template runs in a separate process with limits (`template_process`). Text of users never
becomes a special token: see `special_tokens`. All other ids equal those of transformers'
`apply_chat_template`: BOS is where the template puts it, and is not added otherwise.

Does not know about requests or batches. Guarantees: invalid messages are refused with their place
before the template sees them; a template that fails or takes too long fails one row and not the
job.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from ..errors import RowError
from .chat_messages import invalid_value, iterate_strings, normalise_json, normalise_messages
from .special_tokens import unused_character
from .template_process import TemplateFailure, TemplateLimits, TemplateProcess
from .tokenizer import MarkedText, Tokenizer

# variables of templates that a request cannot set
_RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "chat_template", "bos_token", "eos_token", "unk_token", "pad_token"),
    }
)
_TESTS_NULL = re.compile(r"content['\"]?\]?\s*(is\s+(not\s+)?|[!=]=\s*)none\b", re.IGNORECASE)
"""Finds a test in a template whether a content is null, as that of DeepSeek-R1 has it."""


class Conversation(NamedTuple):
    """Messages, and the variables of the template for them."""

    messages: object
    template_kwargs: Mapping[str, object] | None = None
    add_generation_prompt: bool = True
    tools: Sequence[Mapping[str, object]] | None = None


class ChatRenderer:
    """Renders and encodes conversations for a tokenizer; close it, or use it in a `with` block."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        limits: TemplateLimits | None = None,
        now: datetime | None = None,
    ):
        """`now` is the local time of all renderings of templates; by default the current time."""
        self._tokenizer = tokenizer
        self._special = tokenizer.special_tokens
        template = tokenizer.chat_template
        self._tests_null = template is not None and _TESTS_NULL.search(template) is not None
        now = now or datetime.now()
        self._process = (
            TemplateProcess(template, limits or TemplateLimits(), now) if template else None
        )

    @property
    def reads_clock(self) -> bool:
        """Whether a rendering has read the date or time."""
        return self._process is not None and self._process.reads_clock

    @property
    def gave_up(self) -> str | None:
        """The place of a template that is no longer used, and the reason; None while in use."""
        reason = self._process and self._process.gave_up
        return reason and f"{self._tokenizer.chat_template_source}: {reason}"

    def encode(
        self,
        messages: object,
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> list[int]:
        """Encode a conversation, by default up to the beginning of the assistant's answer.

        Args:
          messages: The messages of the conversation, as in a chat request.
          add_generation_prompt: Whether the beginning of the assistant's answer is appended.
          template_kwargs: Variables that the template reads, such as `enable_thinking`.
          tools: The tools that the template shows, as in a chat request.

        Raises:
          RowError: With the code `invalid_request` if an argument is invalid, and
            `chat_template_error` if the template fails or is missing.
        """
        if not isinstance(template_kwargs, Mapping | None):
            raise invalid_value("chat_template_kwargs", "a mapping of variables", template_kwargs)
        if not isinstance(tools, list | tuple | None):
            raise invalid_value("tools", "a list of tools", tools)
        if not isinstance(add_generation_prompt, bool):
            raise invalid_value("add_generation_prompt", "True or False", add_generation_prompt)
        conversation = Conversation(messages, template_kwargs, add_generation_prompt, tools)
        (ids,) = self.encode_all([conversation])
        if isinstance(ids, RowError):
            raise ids
        return ids

    def encode_all(self, conversations: Sequence[Conversation]) -> list[list[int] | RowError]:
        """Encode many conversations at once; the item of a failed conversation is its error."""
        outcomes: dict[int, list[int] | RowError] = {}
        contexts: dict[int, tuple[dict[str, object], str | None]] = {}
        for index, conversation in enumerate(conversations):
            try:
                contexts[index] = self._context(conversation)
            except RowError as error:
                outcomes[index] = error
        rendered: dict[int, MarkedText] = {}
        for index, text in zip(contexts, self._render(contexts.values()), strict=True):
            if isinstance(text, RowError):
                outcomes[index] = text
            else:
                rendered[index] = text
        encoded = self._tokenizer.encode_rendered(list(rendered.values()))
        outcomes.update(zip(rendered, encoded, strict=True))
        return [outcomes[index] for index in range(len(conversations))]

    def close(self) -> None:
        """End the process of the template."""
        if self._process:
            self._process.close()

    def __enter__(self) -> "ChatRenderer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _context(self, conversation: Conversation) -> tuple[dict[str, object], str | None]:
        """The variables of the template, and the mark that protects text of users, if needed.

        Raises RowError if the conversation is invalid.
        """
        if self._process is None:
            raise RowError(
                "chat_template_error",
                "the tokenizer has no chat template; send /v1/completions or use a model with one",
                "messages",
            )
        messages = normalise_messages(conversation.messages)
        if self._tests_null:
            messages = [message | {"content": message.get("content")} for message in messages]
        variables = normalise_json(conversation.template_kwargs or {}, "chat_template_kwargs")
        self._check_variables(variables, self._process)
        tools = self._tools(conversation, self._process)
        mark = None
        if any(map(self._special.may_occur_in, iterate_strings([messages, variables, tools]))):
            mark = self._mark(messages, variables, tools)
            messages, variables = self._protected(messages, mark), self._protected(variables, mark)
            tools = self._protected(tools, mark)
        context = {
            **self._tokenizer.named_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        return context, mark

    def _mark(self, *values: object) -> str:
        template = self._tokenizer.chat_template or ""
        mark = unused_character([template, *iterate_strings([*values])])
        if mark is None:
            raise RowError(
                "invalid_request",
                "messages: expected a text without at least one private-use character of plane 16, "
                "got a text with all of them. Remove one.",
                "messages",
            )
        return mark

    def _render(
        self, contexts: Collection[tuple[dict[str, object], str | None]]
    ) -> Iterator[MarkedText | RowError]:
        if self._process is None:
            return
        texts = self._process.render([context for context, _ in contexts])
        for text, (_, mark) in zip(texts, contexts, strict=True):
            if isinstance(text, TemplateFailure):
                yield _template_error(text)
            elif mark is None:
                yield text, None
            else:
                # a template may have written the mark as an ASCII escape in JSON
                yield text.replace(json.dumps(mark)[1:-1], mark), mark

    def _tools(self, conversation: Conversation, process: TemplateProcess) -> list[object] | None:
        """The tools of a conversation; RowError if the template does not show them."""
        if conversation.tools is None:
            return None
        try:
            known = process.variables()
        except TemplateFailure as failure:
            raise _template_error(failure) from None
        if "tools" not in known:
            raise RowError(
                "invalid_request",
                "tools: expected none, as the model's chat template does not show them, got some. "
                "Write them into the system message.",
                "tools",
            )
        return [normalise_json(tool, "tools") for tool in conversation.tools]

    def _check_variables(self, variables: Mapping[str, object], process: TemplateProcess) -> None:
        if not variables:
            return
        try:
            known = process.variables() - _RESERVED
        except TemplateFailure as failure:
            raise _template_error(failure) from None
        for name in variables:
            if name not in known:
                raise RowError(
                    "invalid_request",
                    f"chat_template_kwargs: expected variables of the template, {sorted(known)}, "
                    f"got {name!r}.",
                    "chat_template_kwargs",
                )

    def _protected(self, value: Any, mark: str) -> Any:
        """The value with all of its strings protected, keys included."""
        if isinstance(value, str):
            return self._special.protect(value, mark)
        if isinstance(value, list):
            return [self._protected(item, mark) for item in value]
        if isinstance(value, dict):
            return {
                self._protected(key, mark): self._protected(item, mark)
                for key, item in value.items()
            }
        return value


def _template_error(failure: TemplateFailure) -> RowError:
    reason = str(failure).rstrip(".")
    return RowError(
        "chat_template_error",
        f"messages: expected a conversation that the chat template renders, got a failure of the "
        f"template: {reason}. Change the messages, correct the template, or ask for a completion.",
        "messages",
    )
