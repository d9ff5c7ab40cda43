"""A chat template of a model: its process, and the conversations that it can render.

The forms of messages that the template shows are found by probes (`template_forms`), when the first
conversation needs them. Does not know about tokens. Guarantees: a template that leaves out the
texts of users is refused; tools and variables that the template does not read are refused.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from ..errors import InvalidTokenizer, RowError, invalid_request
from .chat_messages import normalise_json
from .template_forms import Message, TemplateForms, find_forms
from .template_process import TemplateFailure, TemplateLimits, TemplateProcess
from .tokenizer import ChatTemplate

# variables of templates that a request cannot set
_RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "chat_template", "bos_token", "eos_token", "unk_token", "pad_token"),
    }
)
_TESTS_NULL = re.compile(r"content['\"]?\]?\s*(is\s+(not\s+)?|[!=]=\s*)none\b", re.IGNORECASE)
"""Finds a test in a template whether a content is null, as that of DeepSeek-R1 has it."""
_PROBE_FUNCTION = {
    "name": "probe",
    "description": "Probes.",
    "parameters": {"type": "object", "properties": {}},
}
_PROBE_TOOLS = [{"type": "function", "function": _PROBE_FUNCTION}]


class ModelTemplate:
    """A chat template; the first use starts its process."""

    def __init__(
        self,
        template: ChatTemplate,
        named_tokens: Mapping[str, str],
        limits: TemplateLimits,
        now: datetime,
    ):
        """Start nothing yet.

        Args:
          template: The template.
          named_tokens: The texts of tokens by the variables of the template.
          limits: The limits of one rendering.
          now: The local time that the template sees.
        """
        self.text, self.source = template
        self._named_tokens = named_tokens
        self._tests_null = _TESTS_NULL.search(self.text) is not None
        self.process = TemplateProcess(self.text, limits, now)
        self._forms: dict[bool, TemplateForms] = {}

    @property
    def gave_up(self) -> str | None:
        """The place of a template that is no longer used, and the reason; None while in use."""
        reason = self.process.gave_up
        return reason and f"{self.source}: {reason}"

    def shaped(self, messages: Sequence[Message], *, has_tools: bool) -> list[Message]:
        """Messages in the forms that the template shows.

        Raises:
          InvalidTokenizer: The template leaves out the texts of users.
          RowError: The template leaves out the text of a message.
        """
        if (forms := self._forms.get(has_tools)) is None:
            forms = self._forms[has_tools] = find_forms(partial(self._probe, has_tools))
        if not forms.shows_users:
            raise InvalidTokenizer(
                f"{self.source}: expected a template that shows the text of a user's message, got "
                f"one that leaves it out, as a text and as a list of parts. Take the template of "
                f"the model's publisher, or give prompts instead of messages."
            )
        return self._with_nulls(forms.of(messages))

    def context(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        tools: Sequence[Any] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> dict[str, Any]:
        """The variables of the template for a conversation."""
        return {
            **self._named_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }

    def checked_tools(self, tools: Sequence[Mapping[str, object]] | None) -> list[Any] | None:
        """A copy of the tools of a conversation; RowError if the template does not show them."""
        if tools is None:
            return None
        if "tools" not in self._variables():
            raise invalid_request(
                "tools",
                "expected none, as the model's chat template does not show them, got some. "
                "Write them into the system message.",
            )
        return [normalise_json(tool, "tools") for tool in tools]

    def checked_variables(self, variables: Mapping[str, object] | None) -> dict[str, Any]:
        """A copy of the variables of a request; RowError if the template does not read one."""
        if not variables:
            return {}
        copied = normalise_json(variables, "chat_template_kwargs")
        known = self._variables() - _RESERVED
        for name in copied:
            if name not in known:
                raise invalid_request(
                    "chat_template_kwargs",
                    f"expected variables of the template, {sorted(known)}, got {name!r}.",
                )
        return copied

    def _probe(
        self, has_tools: bool, conversations: Sequence[Sequence[Message]]
    ) -> list[str | TemplateFailure]:
        tools = _PROBE_TOOLS if has_tools else None
        made = [self.context(self._with_nulls(messages), {}, tools) for messages in conversations]
        reads_clock = self.process.reads_clock
        rendered = self.process.render(made)
        # rows may give the variables without which the template reads the clock
        self.process.reads_clock = reads_clock
        return rendered

    def _with_nulls(self, messages: Sequence[Message]) -> list[Message]:
        if not self._tests_null:
            return list(messages)
        return [message | {"content": message.get("content")} for message in messages]

    def _variables(self) -> frozenset[str]:
        try:
            return self.process.variables()
        except TemplateFailure as failure:
            raise template_error(failure) from None


def template_error(failure: TemplateFailure) -> RowError:
    """The error of a conversation that a template could not render."""
    reason = str(failure).rstrip(".")
    return RowError(
        "chat_template_error",
        f"messages: expected a conversation that the chat template renders, got a failure of the "
        f"template: {reason}. Change the messages, correct the template, or ask for a completion.",
        "messages",
    )
