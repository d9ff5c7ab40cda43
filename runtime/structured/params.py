"""The form that a request asks its answers to have, or the tokens that it allows in them.

Names are those of vLLM's `StructuredOutputsParams` (github.com/vllm-project/vllm,
sampling_params.py). Does not know about the meaning of schemas, tokens or endpoints.
"""

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

from ..parameters.checks import wrong_value
from ..parameters.vllm_options import STRUCTURED, also_accepts

_KINDS = ("json", "json_object", "regex", "choice", "grammar")


@also_accepts(STRUCTURED)
@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of an answer: exactly one of its fields.

    Attributes:
      json: A JSON Schema, as an object or as text. The order of keys matters.
      json_object: True for any JSON object.
      regex: A pattern that the whole answer matches.
      choice: Texts, one of which is the answer.
      grammar: Rules `name ::= ...` in the notation of llama.cpp; the answer has the rule `root`.

    Raises:
      RowError: A value has a wrong type, or not exactly one field is given.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self):
        """Check the fields; a schema becomes compact text, which keeps the order of keys."""
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise wrong_value("structured_outputs", f"one of {', '.join(_KINDS)}", given)
        if self.json_object is not None and self.json_object is not True:
            raise wrong_value("json_object", "true", self.json_object)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.regex is not None and not isinstance(self.regex, str):
            raise wrong_value("regex", "a pattern", self.regex)
        if self.grammar is not None and not isinstance(self.grammar, str):
            raise wrong_value("grammar", "rules as text", self.grammar)
        if (choice := self.choice) is not None:
            is_list = isinstance(choice, Sequence) and not isinstance(choice, str)
            if not is_list or not choice or not all(isinstance(c, str) and c for c in choice):
                raise wrong_value("choice", "a list of texts that are not empty", choice)
            object.__setattr__(self, "choice", tuple(choice))

    @cached_property
    def fingerprint(self) -> str:
        """The hash by which a plan names this form."""
        (kind,) = [kind for kind in _KINDS if getattr(self, kind) is not None]
        content = json_module.dumps([kind, getattr(self, kind)])
        return f"sha256:{sha256(content.encode()).hexdigest()}"


@dataclass(frozen=True)
class AllowedTokens:
    """The tokens that answers may have, of which a request gives at least one field.

    Attributes:
      token_ids: The ids that may be generated; None for all.
      bad_words: Texts whose tokens are never generated in their order, with or without a space
        before them.
    """

    token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """The hash by which a plan names these tokens."""
        content = json_module.dumps(["allowed", self.token_ids, self.bad_words])
        return f"sha256:{sha256(content.encode()).hexdigest()}"


def _schema_text(schema: Any) -> str:
    try:
        if isinstance(schema, str):
            schema = json_module.loads(schema)
        if isinstance(schema, Mapping | bool):
            return json_module.dumps(schema, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        pass
    raise wrong_value("json", "a JSON Schema (an object, true or false)", schema)
