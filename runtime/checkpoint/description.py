"""Describe the content of a model on disk, as text for `noria inspect`.

A model that no family supports is described too, with the reason why it cannot run. Of the weights,
it reads only headers and small tensors, except for their digest. Does not know about terminals.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...modelzoo.families.config_reader import listing
from ...modelzoo.layer_config import BothSides, Chunk
from ..console import plural
from ..errors import InvalidConfig, InvalidTokenizer
from ..files.small_files import has_file, read_json_object
from ..text.tokenizer import DEFAULT
from ..text.tokenizer_directory import read_chat_templates
from .formats.published_formats import CodedSource
from .model_files import ModelFiles
from .tensor_source import TensorSource
from .unread_parts import counted


def describe(model: ModelFiles, *, digest_weights: bool = False) -> str:
    """Return the description, one `subject  value` pair in each line.

    `digest_weights` adds the digest of the weights, which reads all their bytes.
    """
    tensors_of_model = _tensors(model)
    tensors = tensors_of_model.tensors
    num_bytes, counts = Counter(), Counter()
    for info in tensors.values():
        num_bytes[info.stored_as] += info.num_bytes
        counts[info.stored_as] += 1
    stored = ", ".join(
        f"{kind} {_bytes(size)} in {counts[kind]}" for kind, size in num_bytes.most_common()
    )
    lines = [
        ("model", f"{model.name} ({model.path})"),
        ("kind", model.kind),
        *_architecture(model),
        ("tensors", f"{len(tensors)}, {_bytes(sum(num_bytes.values()))}: {stored}"),
        *_kept(tensors_of_model),
        ("parameters", f"{sum(info.size for info in tensors.values()):,}"),
        ("tokenizer", _tokenizer(model.tokenizer_files)),
        ("chat template", _chat_template(model.tokenizer_files)),
        ("end tokens", ", ".join(map(str, model.generation_defaults.eos_ids)) or "none"),
        ("sampling", _pairs(model.generation_defaults.sampling) or "no defaults"),
        ("fingerprint", model.fingerprint()),
    ]
    if digest_weights:
        lines.append(("weights", model.weights_digest().result()))
    return "\n".join(f"{subject:<16} {value}" for subject, value in lines)


def _chat_template(files: Path | Mapping[str, Any]) -> str:
    """Whether the tokenizer files contain the chat template of chat requests."""
    try:
        return "yes" if has_chat_template(files) else "no"
    except InvalidTokenizer as error:
        return f"cannot be read: {error}"


def has_chat_template(files: Path | Mapping[str, Any]) -> bool:
    """Whether the tokenizer files contain the chat template of chat requests.

    Raises:
        InvalidTokenizer: The template is no UTF-8.
    """
    if isinstance(files, Mapping):
        return "tokenizer.chat_template" in files
    name = "tokenizer_config.json"
    config = read_json_object(files / name) if has_file(files, name) else {}
    return DEFAULT in read_chat_templates(files, config)


def _tensors(model: ModelFiles) -> TensorSource:
    """The tensors that parameters are read from; the stored ones if they cannot be dequantised."""
    try:
        return model.tensors
    except InvalidConfig:
        return model.stored_tensors


def _kept(tensors: TensorSource) -> list[tuple[str, str]]:
    """The codes that a plan with `numbers.weights = "as_published"` may keep, by format."""
    if not isinstance(tensors, CodedSource) or not tensors.kept:
        return []
    counts = Counter(str(codes) for codes in tensors.kept.values())
    listed = ", ".join(f"{form} in {count}" for form, count in counts.most_common())
    num_others = len(tensors.tensors) - len(tensors.kept)
    return [("as published", f"{listed}, float in {num_others}")]


def _architecture(model: ModelFiles) -> list[tuple[str, str]]:
    config = model.published_config
    published = config.get("architectures") or config.get("general.architecture")
    named = ", ".join(published) if isinstance(published, list) else published
    lines = [("architecture", str(named))] if named else []
    try:
        spec = model.spec
    except ValueError as error:
        return [*lines, ("family", f"not supported: {error}")]
    fields = {f.name: getattr(spec.config, f.name) for f in dataclasses.fields(spec.config)}
    kinds = Counter(fields.pop("layers"))
    fields = {"num_layers": spec.config.num_layers, **fields}
    lines += [("family", spec.family), ("config", _pairs(fields))]
    lines += [(plural(count, "layer"), _short(layer)[1:-1]) for layer, count in kinds.items()]
    if model.unread.keys:
        lines.append(("keys not read", listing(model.unread.keys)))
    if unread := model.unread.all_tensors:
        lines.append(("not read", counted(unread)))
    return lines


def _tokenizer(files: Path | Mapping[str, Any]) -> str:
    if isinstance(files, Mapping):
        tokens = files.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list):
            return "none"
        kind, pre = files.get("tokenizer.ggml.model"), files.get("tokenizer.ggml.pre")
        return f"GGUF vocabulary ({kind}{f', {pre}' if pre else ''}), {len(tokens)} tokens"
    for name in ("tokenizer.json", "tokenizer.model"):
        if has_file(files, name):
            return name
    return "none"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_short(value)}" for key, value in values.items())


def _short(value: Any) -> str:
    if isinstance(value, Chunk | BothSides):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = {f.name: (getattr(value, f.name), f.default) for f in dataclasses.fields(value)}
        return f"({_pairs({key: item for key, (item, usual) in inner.items() if item != usual})})"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _bytes(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
