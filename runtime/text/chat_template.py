"""Render chat messages with the template of a model, and encode them as token ids.

The template runs in a separate process with limits (`template_process`). Text of users never
becomes a special token: see `special_tokens`. All other ids equal those of transformers'
`apply_chat_template`: BOS is where the template puts it, and is not added otherwise.

Does not know about requests or batches. Guarantees: invalid messages are refused with their place
before the template sees them; a template that fails or takes too long fails one row and not the
job.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from ..errors import RowError
from .chat_messages import invalid_value, iterate_strings, normalise_messages
from .model_template import ModelTemplate, template_error
from .special_tokens import unused_character
from .template_process import TemplateFailure, TemplateLimits
from .tokenizer import DEFAULT, TOOL_USE, MarkedText, Tokenizer


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
            texts = _render(template, renderings.values())
            for index, text in zip(renderings, texts, strict=True):
                if isinstance(text, RowError):
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

    def __enter__(self) -> "ChatRenderer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

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
        prompt = conversation.add_generation_prompt
        context = template.context(messages, variables, tools, add_generation_prompt=prompt)
        return _Prepared(context, mark)

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
    """The variables of a template, and the mark that protects text of users, if needed."""

    context: dict[str, Any]
    mark: str | None


def _mark(template: str, *values: object) -> str:
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
    template: ModelTemplate, renderings: Collection[_Prepared]
) -> list[MarkedText | RowError]:
    texts = template.process.render([context for context, _ in renderings])
    return [_marked(text, mark) for text, (_, mark) in zip(texts, renderings, strict=True)]


def _marked(text: str | TemplateFailure, mark: str | None) -> MarkedText | RowError:
    if isinstance(text, TemplateFailure):
        return template_error(text)
    if mark is None:
        return text, None
    # a template may have written the mark as an ASCII escape in JSON
    return text.replace(json.dumps(mark)[1:-1], mark), mark
