"""Read the tokenizer settings of a model directory, without the vocabulary.

The files are `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`,
`chat_template.jinja` and `additional_chat_templates/*.jinja`. Does not know about vocabularies:
tokens are given by their texts, and `resolve` asks the vocabulary for their ids. Code that the
files refer to (`auto_map`) is never read.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.small_files import has_file, read_small, template_files
from ..errors import InvalidTokenizer
from .tokenizer import DEFAULT, ChatTemplate, TextSettings

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True)
class AddedToken:
    """A token that is not in the file of the vocabulary."""

    text: str
    is_special: bool


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
    tokens = {**token_map, **config}
    return DirectorySettings(
        directory=directory,
        named_tokens={role: _token_text(tokens[role]) for role in _ROLES if role in tokens},
        add_bos=add_bos,
        add_eos=bool(add_eos),
        chat_templates=read_chat_templates(directory, config),
        added_tokens=_added_tokens(directory, config),
    )


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


def _added_tokens(directory: Path, config: Mapping[str, object]) -> dict[int, AddedToken]:
    added: dict[int, AddedToken] = {}
    for text, token in _read_json(directory / "added_tokens.json").items():
        if isinstance(token, int):
            added[token] = AddedToken(text, is_special=False)
    entries = config.get("added_tokens_decoder")
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        text = _token_text(entry)
        if text is not None and isinstance(entry, dict) and key.isdecimal():
            added[int(key)] = AddedToken(text, is_special=entry.get("special") is True)
    return added
