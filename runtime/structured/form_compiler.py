"""Compiles one form of answers to the automaton over the tokens of a vocabulary.

Does not know about jobs or devices. Guarantees: a form that cannot be compiled is a `RowError`,
whose message names the keyword and its place.
"""

import json
from collections.abc import Callable, Collection, Iterable

from ..errors import RowError
from .byte_automaton import TooLarge, compile_language
from .grammar import read_grammar
from .language import Alternatives, Language, Literal, Origin, ReadLanguage, TooManyParts
from .params import StructuredOutputsParams
from .pattern import PatternError, read_pattern
from .schemas.json_scalars import SchemaError, too_large
from .schemas.json_schema import read_schema
from .schemas.json_text import any_value, json_map
from .token_automaton import NoTokens, TokenAutomaton, TokenTrie, compile_tokens

DEPTH_OF_OBJECTS = 4
"""Maximum number of arrays and objects inside each other in an answer that is any JSON object."""
RECURSIONS = (4, 2, 1, 0)
"""The numbers of times that a reference may lead to itself, tried until the tables are small."""


def compile_form(form: StructuredOutputsParams, trie: TokenTrie) -> TokenAutomaton:
    """The automaton of a form.

    Raises:
      RowError: The form is wrong, not supported, too large, or the model cannot write it.
    """
    if not trie.end_ids:
        raise refused("expected a model with an end token, got one without")
    try:
        return _compiled(form, trie)
    except (SchemaError, PatternError) as error:
        raise refused(str(error)) from None
    except TooManyParts:
        expected = "a schema or grammar of fewer parts, those of references included"
        raise refused(f"expected {expected}") from None
    except TooLarge as error:
        raise refused(str(too_large(error, Origin("schema", "")))) from None
    except NoTokens:
        raise refused("expected a text that the vocabulary can spell, got none") from None


def _compiled(form: StructuredOutputsParams, trie: TokenTrie) -> TokenAutomaton:
    """The automaton of a form, with the deepest recursion that the limits of its size allow."""
    for recursion in RECURSIONS:
        is_recursive = True
        try:
            language, is_recursive = read_form(form, recursion)
            automaton = compile_language(language)
            if automaton.is_empty:
                raise SchemaError("expected a form that some text has, got one that none has")
            return compile_tokens(automaton, trie)
        except (TooLarge, TooManyParts):
            if recursion == RECURSIONS[-1] or not is_recursive:
                raise
    raise AssertionError("the last recursion returns or raises")


def read_form(form: StructuredOutputsParams, recursion: int = 0) -> ReadLanguage:
    """The language of a form."""
    if isinstance(form.json, str):
        return read_schema(json.loads(form.json), recursion)
    kind = next((k for k in ("grammar", "regex", "choice") if getattr(form, k) is not None), "")
    try:
        if form.grammar is not None:
            return read_grammar(form.grammar, recursion)
        return ReadLanguage(_read_other(form), is_recursive=False)
    except PatternError as error:
        raise PatternError(f"{kind}: {error}") from None


def _read_other(form: StructuredOutputsParams) -> Language:
    """The language of a form without recursion."""
    if form.regex is not None:
        return read_pattern(form.regex, origin=Origin("regex", ""))
    if form.choice is None:
        return json_map(any_value(DEPTH_OF_OBJECTS - 1))
    try:
        "".join(form.choice).encode()
    except UnicodeEncodeError:
        raise PatternError("expected texts without lone surrogates") from None
    return Alternatives(tuple(map(Literal, form.choice)), Origin("choice", ""))


def make_trie(
    token_bytes: Callable[[int], bytes],
    num_tokens: int,
    special_ids: Iterable[int],
    end_ids: Collection[int],
) -> TokenTrie:
    """The tokens of a vocabulary that texts are made of, which excludes special tokens."""
    special = frozenset(special_ids)
    texts = [b"" if token in special else token_bytes(token) for token in range(num_tokens)]
    return TokenTrie(texts, end_ids)


def refused(message: str) -> RowError:
    """The error of a row whose form cannot be used; no key is named, as several ask for forms."""
    return RowError("invalid_request", f"structured output: {message}.")
