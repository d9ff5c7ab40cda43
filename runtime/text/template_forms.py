"""Find by probes in which forms a chat template reads the contents and the calls of messages.

A request has a content as a text or as a list of text parts, and the arguments of a call as a text
in JSON. A template may read either form of them, or both; the other form fails, is printed in the
notation of Python, or vanishes. The probes are short conversations with words that no template has,
in each form. A template shows a form if the words are in the rendered text, and nothing else of the
form is.

Does not know about processes, tokens or requests.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from ..errors import RowError
from .chat_messages import ROLES, parsed_arguments
from .template_process import TemplateFailure

Message = dict[str, Any]
Outcome = str | TemplateFailure
Render = Callable[[Sequence[Sequence[Message]]], Sequence[Outcome]]
"""Renders conversations; the item of a failed one is its failure."""

_WORDS, _FILLER = ("Zqvxjk", "Jkwqzv"), "x"
_LEAK = "Vwzkqj"
"""The value of a key that no template reads, so that only a printed part shows it."""
_PARTS = [{"type": "text", "text": word, "probe": _LEAK} for word in _WORDS]
_ARGUMENTS = {"probe": _WORDS[0]}
_CALL_ID = "probe0001"  # some templates demand nine letters and digits


class ContentForm(Enum):
    """A form of contents that a template shows for the messages of a role."""

    BOTH = auto()
    """Texts and lists of parts."""
    TEXT = auto()
    PARTS = auto()
    NONE = auto()
    """The text of the messages is left out."""


class TemplateForms(NamedTuple):
    """The forms of messages that a template shows."""

    contents: Mapping[str, ContentForm]
    """The form of contents for each role."""
    has_text_arguments: bool
    """Whether the arguments of calls are shown as a text in JSON, and not as an object."""

    @property
    def shows_users(self) -> bool:
        """Whether the texts of users are shown at all."""
        return self.contents["user"] is not ContentForm.NONE

    def of(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the forms that the template shows; line ends join the texts of parts.

        Raises:
          RowError: The template leaves the text of a message out.
        """
        return [self._shaped(message, f"messages[{i}]") for i, message in enumerate(messages)]

    def _shaped(self, message: Message, where: str) -> Message:
        content, calls = message.get("content"), message.get("tool_calls")
        form = self.contents.get(message["role"]) or self.contents["user"]
        if content and form is ContentForm.NONE:
            raise RowError(
                "chat_template_error",
                f"{where}: expected a role whose text the chat template shows, got "
                f"{message['role']!r}. Write the text into a message of another role.",
                "messages",
            )
        if isinstance(content, list) and form is ContentForm.TEXT:
            message = message | {"content": "\n".join(part["text"] for part in content)}
        elif isinstance(content, str) and form is ContentForm.PARTS:
            message = message | {"content": [{"type": "text", "text": content}]}
        if calls:
            message = message | {"tool_calls": [self._call(call, where) for call in calls]}
        return message

    def _call(self, call: Message, where: str) -> Message:
        if not isinstance(function := call.get("function"), dict):
            return call
        arguments = function.get("arguments")
        if isinstance(arguments, str) and not self.has_text_arguments:
            arguments = parsed_arguments(arguments, f"{where}.tool_calls")
        elif isinstance(arguments, dict) and self.has_text_arguments:
            arguments = json.dumps(arguments, ensure_ascii=False)
        else:
            return call
        return call | {"function": function | {"arguments": arguments}}


def find_forms(render: Render) -> TemplateForms:
    """The forms that a template shows; texts for the roles that it refuses."""
    user = _content_form(render, [lambda content: [_message("user", content)]])[0]
    is_parts = user is ContentForm.PARTS
    filler = [{"type": "text", "text": _FILLER}] if is_parts else _FILLER
    question, answer = _message("user", filler), _message("tool", filler, tool_call_id=_CALL_ID)
    has_text_arguments = _reads_text_arguments(render, question, answer)
    call = _call_message(json.dumps(_ARGUMENTS) if has_text_arguments else _ARGUMENTS)
    conversations: dict[str, Callable[[Any], list[Message]]] = {
        "system": lambda content: [_message("system", content), question],
        "developer": lambda content: [_message("developer", content), question],
        "assistant": lambda content: [question, _message("assistant", content), question],
        "tool": lambda content: [question, call, answer | {"content": content}],
    }
    forms = _content_form(render, list(conversations.values()))
    contents = {"user": user, **dict(zip(conversations, forms, strict=True))}
    assert set(contents) == set(ROLES)
    return TemplateForms(contents, has_text_arguments)


def _message(role: str, content: Any, **keys: Any) -> Message:
    return {"role": role, "content": content, **keys}


def _call_message(arguments: Any) -> Message:
    function = {"name": "probe", "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _content_form(
    render: Render, conversations: Sequence[Callable[[Any], list[Message]]]
) -> list[ContentForm]:
    """The form of contents in each conversation, which is made with a content."""
    made = [make(content) for make in conversations for content in (_WORDS[0], _PARTS)]
    outcomes = iter(render(made))
    return [_form(text, parts) for text, parts in zip(outcomes, outcomes, strict=True)]


def _form(text: Outcome, parts: Outcome) -> ContentForm:
    has_text = _shows(text, _WORDS[:1])
    has_parts = _shows(parts, _WORDS) and not _shows(parts, [_LEAK])
    if has_text or has_parts:
        both = ContentForm.BOTH if has_text else ContentForm.PARTS
        return both if has_parts else ContentForm.TEXT
    # a template that refuses the conversation says so in the row's own error
    return ContentForm.TEXT if isinstance(text, TemplateFailure) else ContentForm.NONE


def _reads_text_arguments(render: Render, question: Message, answer: Message) -> bool:
    forms = (_ARGUMENTS, json.dumps(_ARGUMENTS))
    calls = [_call_message(arguments) for arguments in forms]
    # templates may look for calls only in messages without a content, or fail without one
    calls += [call | {"content": ""} for call in calls]
    outcomes = render([[question, call, answer] for call in calls])
    shown = [_shows(outcome, _WORDS[:1]) for outcome in outcomes]
    is_python = [_shows(outcome, [str(_ARGUMENTS)]) for outcome in outcomes]
    shows_objects = any(shown[i] and not is_python[i] for i in (0, 2))
    return not shows_objects and (shown[1] or shown[3])


def _shows(outcome: Outcome, words: Iterable[str]) -> bool:
    # templates may change the case of a text
    return isinstance(outcome, str) and all(word.lower() in outcome.lower() for word in words)
