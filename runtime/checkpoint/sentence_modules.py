"""Reads how a model turns states into one vector, from the module files of sentence-transformers.

`modules.json` lists modules, each with a folder: the transformer, its pooling, and then dense
layers and a normalisation, if there are any. Knows nothing of tensors or devices. Guarantees: a
module or an option that is not implemented is refused by name.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...modelzoo.families.config_reader import ConfigReader, UnsupportedModel
from ...modelzoo.pooling_config import Pooling, PoolingKind, Projection, ProjectionActivation
from ..errors import InvalidConfig
from ..files.small_files import has_file, parse_json_object, read_json_object, read_small

MODULES, OPTIONS = "modules.json", "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
_KINDS: dict[str, PoolingKind] = {
    "cls": "first",
    "lasttoken": "last",
    "max": "max",
    "mean": "mean",
}
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_ACTIVATIONS: dict[str, ProjectionActivation] = {
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
}
"""The activations of dense layers, as their files name them; without a name it is Tanh."""
_USUAL_ACTIVATION = "torch.nn.modules.activation.Tanh"
_DENSE, _VECTOR = "Dense", "sentence_embedding"
MAX_FEATURES = 2**20
_DIMENSIONS = ("word_embedding_dimension", "embedding_dimension")


def read_pooling(directory: Path, embed: int) -> Pooling | None:
    """Read the pooling of a model directory.

    Args:
      directory: The directory.
      embed: The size of the states of the transformer.

    Returns:
      The pooling; None if the directory has no `modules.json`.

    Raises:
      InvalidConfig: A file is malformed, or has a module or an option that is not implemented.
    """
    if not has_file(directory, MODULES):
        return None
    options = read_json_object(directory / OPTIONS) if has_file(directory, OPTIONS) else {}
    if options.get("do_lower_case"):
        raise InvalidConfig(
            f"{directory / OPTIONS}: expected do_lower_case false, got true, which is not "
            "implemented. Let the tokenizer write texts in lower case."
        )
    prompt = _default_prompt(directory)
    kind, normalises, layers = None, False, []
    for number, (name, folder) in enumerate(_modules(directory)):
        if name == "Transformer" and number == 0:
            if folder:
                raise InvalidConfig(
                    f"{directory / MODULES}: expected the transformer in the directory itself, got "
                    f"the folder {folder!r}. Give this folder as the model, without pooling."
                )
        elif name == "Pooling" and number == 1:
            kind = _pooling_kind(directory / folder / "config.json", embed, prompt)
        elif name == _DENSE and kind is not None and not normalises:
            size = layers[-1].size if layers else embed
            layers.append(_projection(directory / folder / "config.json", size))
        elif name == "Normalize" and kind is not None and not normalises:
            normalises = True
        else:
            raise InvalidConfig(
                f"{directory / MODULES}: expected a Transformer, a Pooling, any Dense and at most "
                f"a Normalize in this order, got {name!r} as module {number}, which is not "
                f"implemented here."
            )
    if kind is None:
        raise InvalidConfig(f"{directory / MODULES}: expected a module Pooling, got none.")
    return Pooling(
        kind,
        tuple(layers),
        normalises=normalises,
        prompt=prompt,
        max_tokens=_max_tokens(directory / OPTIONS, options),
    )


def dense_folders(directory: Path) -> tuple[str, ...]:
    """The folders of the dense layers of a model directory, in order."""
    if not has_file(directory, MODULES):
        return ()
    return tuple(folder for name, folder in _modules(directory) if name == _DENSE and folder)


def module_files(directory: Path) -> Iterable[tuple[str, bytes]]:
    """The names and contents of the files that `read_pooling` reads."""
    if not has_file(directory, MODULES):
        return
    yield MODULES, read_small(directory / MODULES)
    for name in (OPTIONS, PROMPTS):
        if has_file(directory, name):
            yield name, read_small(directory / name)
    for _, folder in _modules(directory):
        if folder and has_file(directory / folder, "config.json"):
            yield f"{folder}/config.json", read_small(directory / folder / "config.json")


@contextmanager
def naming_file(name: Path | str) -> Iterator[None]:
    """Add the file of a model, or the model's name, to the error that refuses the model."""
    try:
        yield
    except UnsupportedModel as error:
        raise InvalidConfig(f"{name}: {error}") from None


def _modules(directory: Path) -> list[tuple[str, str]]:
    """The class and the folder of each module; the class without the name of its package."""
    path = directory / MODULES
    # the strict reader takes objects only, and this file is a list
    content = b'{"modules":' + read_small(path, InvalidConfig) + b"}"
    entries = parse_json_object(content, str(path))["modules"]
    if not isinstance(entries, list):
        raise InvalidConfig(f"{path}: expected a list of modules, got {type(entries).__name__}.")
    return [_module(path, entry) for entry in entries]


def _module(path: Path, entry: Any) -> tuple[str, str]:
    kind, folder = (entry.get(key) if isinstance(entry, dict) else None for key in ("type", "path"))
    if not isinstance(kind, str) or not isinstance(folder, str):
        raise InvalidConfig(f"{path}: expected modules with a type and a path, got {entry!r:.80}.")
    if "/" in folder or "\\" in folder or folder.startswith("."):
        raise InvalidConfig(f"{path}: expected the bare name of a folder, got {folder!r:.80}.")
    return kind.rpartition(".")[2], folder


def _max_tokens(path: Path, options: Mapping[str, Any]) -> int | None:
    """The length to which texts are cut, as in sentence-transformers; None for any length."""
    if options.get("max_seq_length") is None:
        return None
    with naming_file(path):
        return ConfigReader(options).integer("max_seq_length", maximum=MAX_FEATURES)


def _default_prompt(directory: Path) -> str:
    """The prompt that sentence-transformers puts before texts for which no other is asked."""
    if not has_file(directory, PROMPTS):
        return ""
    table = read_json_object(directory / PROMPTS)
    name, prompts = table.get("default_prompt_name"), table.get("prompts")
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise InvalidConfig(
            f"{directory / PROMPTS}: expected a text in prompts for default_prompt_name, got none "
            f"for {name!r:.80}. Add the prompt, or remove the key."
        )
    return prompt


def _pooling_kind(path: Path, embed: int, prompt: str) -> PoolingKind:
    """The pooling that the file of a pooling module names."""
    config = ConfigReader(read_json_object(path))
    with naming_file(path):
        for key in _DIMENSIONS:
            config.expect(key, embed)
        if prompt:
            # without it, the states of the prompt would not be pooled
            config.expect("include_prompt", True, " beside a default prompt")
        config.ignore(("include_prompt",))
        modes = [mode for key, mode in _MODES.items() if config.flag(key, default=False)]
        if config.has("pooling_mode"):
            modes = [config.text("pooling_mode")]
        config.refuse_rest()
    if len(modes) != 1 or modes[0] not in _KINDS:
        raise InvalidConfig(
            f"{path}: expected one pooling of {', '.join(_KINDS)}, got {modes or 'none'}. No other "
            f"pooling is implemented."
        )
    return _KINDS[modes[0]]


def _projection(path: Path, num_inputs: int) -> Projection:
    """The dense layer that the file of a module describes."""
    config = ConfigReader(read_json_object(path))
    with naming_file(path):
        config.expect("in_features", num_inputs)
        for key in ("module_input_name", "module_output_name"):
            config.expect(key, _VECTOR)
        config.expect("use_residual", False)
        activation = config.text("activation_function", default=_USUAL_ACTIVATION)
        if activation not in _ACTIVATIONS:
            raise config.error("activation_function", f"one of {', '.join(_ACTIVATIONS)}")
        size = config.integer("out_features", maximum=MAX_FEATURES)
        has_bias = config.flag("bias", default=True)
        config.refuse_rest()
    return Projection(size, has_bias, _ACTIVATIONS[activation])
