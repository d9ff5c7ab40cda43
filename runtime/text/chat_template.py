"""Render chat messages with the template of a model, and encode them as token ids.

The template runs in a separate process with limits (`template_process`). Text of users never
becomes a special token: see `special_tokens`. All other ids equal those of transformers'
`apply_chat_template`: BOS is where the template puts it, and is not added otherwise.

Does not know about requests or batches. Guarantees: invalid messages are refused with their place
before the template sees them; a template that fails or takes too long fails one row and not the
job.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from ..errors import RowError, invalid_request
from .chat_messages import invalid_value, iterate_strings, normalise_messages
from .model_template import ModelTemplate, template_error
from .special_tokens import unused_character
from .template_process import TemplateFailure, TemplateLimits
from .tokenizer import DEFAULT, TOOL_USE, MarkedText, Tokenizer

_END = "CONTINUE_FINAL_MESSAGE_TAG "
"""Text after the last message that shows where it ends in the rendering, as in transformers."""


class Conversation(NamedTuple):
    """Messages, and the variables of the template for them."""

    messages: object
    template_kwargs: Mapping[str, object] | None = None
    """Variables that the template reads, such as `enable_thinking`."""
    add_generation_prompt: bool = True
    """Whether the beginning of the assistant's answer is appended."""
    tools: Sequence[Mapping[str, object]] | None = None
    """The tools that the template shows, as in a chat request."""
    continue_final_message: bool = False
    """Whether the prompt ends with the content of the last message, so that the answer continues
    it; then no answer may begin."""


class ChatRenderer:
    """Renders and encodes conversations for a tokenizer; close it."""

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
        limits, now = limits or TemplateLimits(), now or datetime.now()
        self._templates = {
            name: ModelTemplate(template, tokenizer.named_tokens, limits, now)
            for name, template in tokenizer.chat_templates.items()
            if name in (DEFAULT, TOOL_USE)
        }

    @property
    def reads_clock(self) -> bool:
        """Whether a rendering has read the date or time."""
        return any(template.process.reads_clock for template in self._templates.values())

    @property
    def gave_up(self) -> str | None:
        """The place of a template that is no longer used, and the reason; None while in use."""
        return next(filter(None, (template.gave_up for template in self._templates.values())), None)

    def encode(self, messages: object, **options: Any) -> list[int]:
        """Encode a conversation, by default up to the beginning of the assistant's answer.

        Args:
          messages: The messages of the conversation, as in a chat request.
          options: The other fields of `Conversation`.

        Raises:
          RowError: With the code `invalid_request` if an argument is invalid, and
            `chat_template_error` if the template fails or is missing.
        """
        conversation = Conversation(messages, **options)
        _, template_kwargs, begins_answer, tools, continues = conversation
        if not isinstance(template_kwargs, Mapping | None):
            raise invalid_value("chat_template_kwargs", "a mapping of variables", template_kwargs)
        if not isinstance(tools, list | tuple | None):
            raise invalid_value("tools", "a list of tools", tools)
        if not isinstance(begins_answer, bool):
            raise invalid_value("add_generation_prompt", "True or False", begins_answer)
        if continues and begins_answer:
            expected = "False beside continue_final_message"
            raise invalid_value("add_generation_prompt", expected, begins_answer)
        (ids,) = self.encode_all([conversation])
        if isinstance(ids, RowError):
            raise ids
        return ids

    def encode_all(self, conversations: Sequence[Conversation]) -> list[list[int] | RowError]:
        """Encode many conversations at once; the item of a failed conversation is its error.

        Raises:
          InvalidTokenizer: The template leaves out the texts of users.
        """
        outcomes: dict[int, list[int] | RowError] = {}
        prepared: dict[ModelTemplate, dict[int, _Prepared]] = {}
        for index, conversation in enumerate(conversations):
            try:
                template = self._template(conversation)
                prepared.setdefault(template, {})[index] = self._prepare(template, conversation)
            except RowError as error:
                outcomes[index] = error
        rendered: dict[int, MarkedText] = {}
        for template, renderings in prepared.items():
            texts = template.process.render([one.context for one in renderings.values()])
            for (index, one), outcome in zip(renderings.items(), texts, strict=True):
                if isinstance(text := _marked(outcome, one), RowError):
                    outcomes[index] = text
                else:
                    rendered[index] = text
        encoded = self._tokenizer.encode_rendered(list(rendered.values()))
        outcomes.update(zip(rendered, encoded, strict=True))
        return [outcomes[index] for index in range(len(conversations))]

    def close(self) -> None:
        """End the processes of the templates."""
        for template in self._templates.values():
            template.process.close()

    def _template(self, conversation: Conversation) -> ModelTemplate:
        """The template of a conversation: a model may have one of its own for rows with tools."""
        has_own = conversation.tools is not None and TOOL_USE in self._templates
        name = TOOL_USE if has_own else DEFAULT
        if name not in self._templates:
            message = (
                "the tokenizer has no chat template; send /v1/completions or use a model with one"
            )
            if names := ", ".join(self._tokenizer.chat_templates):
                message = f"messages: expected a chat template with the name {DEFAULT}, got only "
                message += f"{names}. Copy the one for all rows to chat_template.jinja."
            raise RowError("chat_template_error", message, "messages")
        return self._templates[name]

    def _prepare(self, template: ModelTemplate, conversation: Conversation) -> "_Prepared":
        """The variables of the template; raises RowError if the conversation is invalid."""
        messages = normalise_messages(conversation.messages)
        variables = template.checked_variables(conversation.template_kwargs)
        tools = template.checked_tools(conversation.tools)
        messages = template.shaped(messages, has_tools=tools is not None)
        mark = None
        if any(map(self._special.may_occur_in, iterate_strings([messages, variables, tools]))):
            mark = _mark(template.text, messages, variables, tools)
            messages, variables, tools = (
                self._protected(value, mark) for value in (messages, variables, tools)
            )
        final = _mark_end(messages) if conversation.continue_final_message else None
        prompt = conversation.add_generation_prompt
        context = template.context(messages, variables, tools, add_generation_prompt=prompt)
        return _Prepared(context, mark, final)

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


class _Prepared(NamedTuple):
    """The input of a rendering."""

    context: dict[str, Any]
    mark: str | None
    """The mark before special-token text of users; None without one."""
    final: str | None
    """The text of the last message, if the prompt ends with it."""


def _mark(template: str, *values: object) -> str:
    mark = unused_character([template, *iterate_strings([*values])])
    if mark is None:
        raise invalid_request(
            "messages",
            "expected a text without at least one private-use character of plane 16, "
            "got a text with all of them. Remove one.",
        )
    return mark


def _marked(text: str | TemplateFailure, prepared: _Prepared) -> MarkedText | RowError:
    mark = prepared.mark
    if prepared.final is not None and not isinstance(text, TemplateFailure):
        text = _until_end(text, prepared.final)
    if isinstance(text, TemplateFailure):
        return template_error(text)
    if mark is None:
        return text, None
    # a template may have written the mark as an ASCII escape in JSON
    return text.replace(json.dumps(mark)[1:-1], mark), mark


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
    raise invalid_request(
        "continue_final_message", "expected a text in the last message, got none."
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
