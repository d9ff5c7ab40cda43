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


_END = "CONTINUE_FINAL_MESSAGE_TAG "
"""Text after the last message that shows where it ends in the rendering, as in transformers."""


class Conversation(NamedTuple):
    """Messages, and the variables of the template for them."""

    messages: object
    template_kwargs: Mapping[str, object] | None = None
    add_generation_prompt: bool = True
    tools: Sequence[Mapping[str, object]] | None = None
    continue_final_message: bool = False
    """Whether the prompt ends with the content of the last message."""


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
        continue_final_message: bool = False,
    ) -> list[int]:
        """Encode a conversation, by default up to the beginning of the assistant's answer.

        Args:
          messages: The messages of the conversation, as in a chat request.
          add_generation_prompt: Whether the beginning of the assistant's answer is appended.
          template_kwargs: Variables that the template reads, such as `enable_thinking`.
          tools: The tools that the template shows, as in a chat request.
          continue_final_message: Whether the prompt ends with the content of the last message, so
            that the answer continues it; then no answer may begin.

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
        if continue_final_message and add_generation_prompt:
            expected = "False beside continue_final_message"
            raise invalid_value("add_generation_prompt", expected, add_generation_prompt)
        conversation = Conversation(
            messages, template_kwargs, add_generation_prompt, tools, continue_final_message
        )
        (ids,) = self.encode_all([conversation])
        if isinstance(ids, RowError):
            raise ids
        return ids

    def encode_all(self, conversations: Sequence[Conversation]) -> list[list[int] | RowError]:
        """Encode many conversations at once; the item of a failed conversation is its error."""
        outcomes: dict[int, list[int] | RowError] = {}
        contexts: dict[int, _Context] = {}
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

    def _context(self, conversation: Conversation) -> "_Context":
        """The variables of the template for a conversation; RowError if it is invalid."""
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
        final = _mark_end(messages) if conversation.continue_final_message else None
        variables = {
            **self._tokenizer.named_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        return _Context(variables, mark, final)

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

    def _render(self, contexts: Collection["_Context"]) -> Iterator[MarkedText | RowError]:
        if self._process is None:
            return
        texts = self._process.render([context.variables for context in contexts])
        for text, (_, mark, final) in zip(texts, contexts, strict=True):
            if final is not None and not isinstance(text, TemplateFailure):
                text = _until_end(text, final)
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


class _Context(NamedTuple):
    """The input of a rendering."""

    variables: dict[str, object]
    mark: str | None
    """The mark before special-token text of users; None without one."""
    final: str | None
    """The text of the last message, if the prompt ends with it."""


def _mark_end(messages: Sequence[dict[str, Any]]) -> str:
    """Put `_END` after the text of the last message, and return the text without it.

    Raises:
      RowError: The last message has no text.
    """
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + _END
        return content
    for part in reversed(content or ()):
        if "text" in part:
            text = part["text"]
            part["text"] = text + _END
            return text
    raise RowError(
        "invalid_request",
        "continue_final_message: expected a text in the last message, got none.",
        "continue_final_message",
    )


def _until_end(rendered: str, final: str) -> str | TemplateFailure:
    """The rendering up to the end of the last message, as transformers cuts it."""
    tag = _END.strip()
    if tag not in rendered or final.strip() not in rendered:
        return TemplateFailure("it does not show the last message as it is, so nothing can go on")
    end = rendered.rindex(tag)
    # a template that strips contents has stripped the space after the tag, too
    is_whole = rendered[end : end + len(_END)] == _END
    return rendered[:end] if is_whole else rendered[:end].rstrip()


def _template_error(failure: TemplateFailure) -> RowError:
    reason = str(failure).rstrip(".")
    return RowError(
        "chat_template_error",
        f"messages: expected a conversation that the chat template renders, got a failure of the "
        f"template: {reason}. Change the messages, correct the template, or ask for a completion.",
        "messages",
    )
