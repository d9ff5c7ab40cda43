"""Read the tokenizer settings of a model directory, without the vocabulary.

The files are `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`,
`chat_template.jinja` and `additional_chat_templates/*.jinja`. Does not know about vocabularies:
tokens are given by their texts, and `resolve` asks the vocabulary for their ids. Code that the
files refer to (`auto_map`) is never read.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import InvalidTokenizer
from ..files.small_files import has_file, read_small, template_files
from .tokenizer import DEFAULT, ChatTemplate, TextSettings

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_ROLES += ("mask_token",)
"""The roles that all models may have, in the order in which their tokens are added."""
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
"""Keys for further special tokens: a list, or an object with their roles."""
_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True)
class AddedToken:
    """A token that may not be in the file of the vocabulary."""

    text: str
    is_special: bool
    options: Mapping[str, bool] = field(default_factory=dict)
    """The options with which its text is found, as keys of the library `tokenizers`."""


@dataclass(frozen=True)
class DirectorySettings:
    """The tokenizer settings of a directory; tokens are given by their texts."""

    directory: Path
    named_tokens: Mapping[str, str | None]
    """The texts of tokens by role; None if a file says that there is no token for the role."""
    add_bos: bool | None
    add_eos: bool
    chat_templates: Mapping[str, ChatTemplate]
    added_tokens: Mapping[int, AddedToken]
    """The tokens whose ids the files give."""
    special_tokens: Sequence[AddedToken]
    """The named tokens and further special tokens, whose ids the files do not give."""

    def marked(self, token: AddedToken) -> AddedToken:
        """An added token, which is special if it has a role."""
        has_role = token.text in self.named_tokens.values()
        return replace(token, is_special=token.is_special or has_role)

    def wrong_id(self, text: str, expected: int, got: object) -> InvalidTokenizer:
        """The error for an added token that has another id in the vocabulary than in the files."""
        return InvalidTokenizer(
            f"{self.directory}: expected the added token {text!r} with the id {expected}, got "
            f"{got}. Take all files of the tokenizer from one model."
        )

    def resolve(
        self,
        id_of: Callable[[str], int | None],
        text_of: Callable[[int], str | None],
        *,
        default_bos: int | None,
        default_eos: int | None,
        default_add_bos: bool,
    ) -> TextSettings:
        """Turn the texts of tokens into ids.

        Args:
          id_of: The id of a text in the vocabulary.
          text_of: The text of an id in the vocabulary.
          default_bos, default_eos, default_add_bos: The settings in the file of the vocabulary,
            which are used if the directory has no others.

        Raises:
          InvalidTokenizer: A named token is not in the vocabulary.
        """
        named = dict(self.named_tokens)
        for role, token in (("bos_token", default_bos), ("eos_token", default_eos)):
            if token is not None:
                named.setdefault(role, text_of(token))
        bos, eos = (self._id(role, named.get(role), id_of) for role in ("bos_token", "eos_token"))
        implied = default_add_bos and bos is not None and bos == default_bos
        return TextSettings(
            bos_id=bos,
            eos_id=eos,
            add_bos=implied if self.add_bos is None else self.add_bos,
            add_eos=self.add_eos,
            chat_templates=self.chat_templates,
            named_tokens={role: text for role, text in named.items() if text is not None},
        )

    def _id(self, role: str, text: str | None, id_of: Callable[[str], int | None]) -> int | None:
        if text is None:
            return None
        token = id_of(text)
        if token is None:
            raise InvalidTokenizer(
                f"{self.directory}: expected {role} {text!r} in the vocabulary, got a vocabulary "
                "without it. Take all files of the tokenizer from one model."
            )
        return token


def read_directory(directory: Path) -> DirectorySettings:
    """Read the settings of `directory`; all files are optional.

    Raises:
      InvalidTokenizer: A file is invalid.
    """
    config = _read_json(directory / "tokenizer_config.json")
    token_map = _read_json(directory / "special_tokens_map.json")
    add_bos, add_eos = (_flag(directory, config, f"add_{end}_token") for end in ("bos", "eos"))
    # the map replaces the configuration in older models, as in transformers
    is_older = "added_tokens_decoder" not in config
    tokens = {**config, **token_map} if is_older else {**token_map, **config}
    extra = next((tokens[key] for key in _EXTRA if tokens.get(key)), ())
    roles = _token_roles(tokens) | (extra if isinstance(extra, dict) else {})
    further = extra if isinstance(extra, list) else ()
    special = [_added_token(value, is_special=True) for value in [*roles.values(), *further]]
    return DirectorySettings(
        directory=directory,
        named_tokens={role: _token_text(value) for role, value in roles.items()},
        add_bos=add_bos,
        add_eos=bool(add_eos),
        chat_templates=read_chat_templates(directory, config),
        added_tokens=_added_tokens(directory, config, {token.text for token in special if token}),
        special_tokens=[token for token in special if token is not None],
    )


def _token_roles(tokens: Mapping[str, object]) -> dict[str, object]:
    """The values of all keys for tokens with roles: the usual roles first, then others."""
    own = (key for key in tokens if key.endswith("_token") and key not in _ROLES)
    roles = {key: tokens[key] for key in (*_ROLES, *own) if key in tokens}
    return {key: x for key, x in roles.items() if x is None or _token_text(x) is not None}


def _added_token(value: object, *, is_special: bool) -> AddedToken | None:
    """A token that is given as a string or an object; None if it is neither."""
    if (text := _token_text(value)) is None:
        return None
    given = value if isinstance(value, dict) else {}
    options = {key: given[key] is True for key in _OPTIONS if key in given}
    return AddedToken(text, is_special or given.get("special") is True, options)


def _flag(directory: Path, config: Mapping[str, object], key: str) -> bool | None:
    value = config.get(key)
    if value is None or isinstance(value, bool):
        return value
    raise InvalidTokenizer(
        f"{directory / 'tokenizer_config.json'}: {key}: expected true or false, got {value!r}."
    )


def _read_json(path: Path) -> dict[str, object]:
    if not has_file(path.parent, path.name):
        return {}
    content = read_small(path)
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidTokenizer(f"{path}: expected JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidTokenizer(f"{path}: expected a JSON object, got {type(value).__name__}.")
    return value


def _token_text(value: object) -> str | None:
    """The text of a token, which is given as a string or as an object with the key `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def read_chat_templates(directory: Path, config: Mapping[str, object]) -> dict[str, ChatTemplate]:
    """The chat templates of a directory by name; `config` is tokenizer_config.json.

    Files of templates replace the templates in the configuration, as in transformers.
    """
    path = directory / "chat_template.jinja"
    files = {DEFAULT: path} if has_file(directory, path.name) else {}
    files |= {file.stem: file for file in template_files(directory)}
    if files:
        return {name: ChatTemplate(_template_text(file), str(file)) for name, file in files.items()}
    found = config.get("chat_template")
    named = found if isinstance(found, list) else [{"name": DEFAULT, "template": found}]
    source = f"{directory / 'tokenizer_config.json'}: chat_template"
    return {
        entry["name"]: ChatTemplate(entry["template"], source)
        for entry in named
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }


def _template_text(path: Path) -> str:
    try:
        return read_small(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidTokenizer(f"{path}: expected UTF-8 text: {error}") from None


def _added_tokens(
    directory: Path, config: Mapping[str, object], special_texts: Collection[str]
) -> dict[int, AddedToken]:
    """The tokens with ids: those of the configuration, or of the file that older models have."""
    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        older = _read_json(directory / "added_tokens.json")
        return {
            token: AddedToken(
                text, text in special_texts, {"normalized": text not in special_texts}
            )
            for text, token in older.items()
            if isinstance(token, int)
        }
    tokens = {
        int(key): _added_token(entry, is_special=False)
        for key, entry in entries.items()
        if key.isdecimal() and isinstance(entry, dict)
    }
    return {key: token for key, token in tokens.items() if token is not None}
