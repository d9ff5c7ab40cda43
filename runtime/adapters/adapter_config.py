"""Read the configuration of an adapter: adapter_config.json of peft, for LoRA.

peft matches modules by the same rules (github.com/huggingface/peft, tuners/tuners_utils.py): an
entry of `target_modules` is the whole name of a module or its end after a dot, and a text is a
regular expression of whole names. Knows nothing of tensors. Guarantees: every key either is read,
or cannot change the answer, or has a value without effect; all others are refused by name.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidAdapter

ALL_LINEAR = "all-linear"
MAX_RANK = 2**14

# keys that do not change the answer: provenance, training, and how peft runs or saves the adapter
_IGNORED = frozenset({
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode",
    "peft_version", "lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "megatron_config", "megatron_core", "runtime_config", "velora_config", "qalora_group_size",
    "ensure_weight_tying",
})  # fmt: skip
_READ = frozenset({
    "peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "modules_to_save",
    "bias", "init_lora_weights",
})  # fmt: skip
_NO_EFFECT = (None, False, [], {}, "")
_KEEPS_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the weights of the model as they are."""


@dataclass(frozen=True)
class AdapterConfig:
    """The options of a LoRA adapter that decide its weights."""

    where: str
    """The file, which begins every message."""
    rank: int
    alpha: float
    uses_rslora: bool
    uses_dora: bool
    targets: str | tuple[str, ...]
    """Names or ends of names of modules, or a regular expression, or `all-linear`."""
    excluded: str | tuple[str, ...] = ()
    layers: frozenset[int] | None = None
    """The layers that are adapted; None for all."""
    layers_patterns: tuple[str, ...] = ()
    """The names before the numbers of layers; empty for any name."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    saved: tuple[str, ...] = ()
    """The modules whose weights the adapter replaces."""

    def rank_of(self, module: str) -> int:
        """The rank of a module's pair of matrices."""
        return self.rank_pattern.get(_matching_key(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of the product of a module's pair of matrices.

        Sources: Hu et al. 2021, "LoRA" (2106.09685), section 4.1; for rsLoRA, Kalajdzievski 2023
        (2312.03732).
        """
        alpha = self.alpha_pattern.get(_matching_key(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.uses_rslora else rank)

    def targets_module(self, module: str) -> bool:
        """Whether the adapter should have matrices for a module."""
        if _is_named(self.excluded, module) or self.saves(module):
            return False
        if self.targets == ALL_LINEAR:
            return True
        if not _is_named(self.targets, module):
            return False
        return isinstance(self.targets, str) or self._has_layer(module)

    def saves(self, module: str) -> bool:
        """Whether the adapter replaces the weights of a module."""
        return any(re.match(rf"(^|.*\.){re.escape(name)}($|\..*)", module) for name in self.saved)

    def unknown_targets(self, modules: Collection[str]) -> list[str]:
        """The entries of `target_modules` that name no module."""
        if isinstance(self.targets, str):
            is_found = self.targets == ALL_LINEAR or any(
                _is_named(self.targets, m) for m in modules
            )
            return [] if is_found else [self.targets]
        return [name for name in self.targets if not any(_is_named((name,), m) for m in modules)]

    def _has_layer(self, module: str) -> bool:
        if self.layers is None:
            return True
        patterns = self.layers_patterns or (r"[^.]*",)
        # the first number is that of the layer, a later one that of an expert
        for pattern in patterns:
            if match := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module):
                return int(match[1]) in self.layers
        return False


@dataclass(frozen=True)
class _Table:
    """The table of adapter_config.json, whose values are checked when they are read."""

    values: Mapping[str, Any]
    where: str

    def refuse(self, key: str, expected: str) -> InvalidAdapter:
        """The error of a key."""
        got = repr(self.values[key]) if key in self.values else "no such key"
        return InvalidAdapter(f"{self.where}: {key}: expected {expected}, got {got[:100]}.")

    def read(self, key: str, kind: type | tuple[type, ...], expected: str, default: Any) -> Any:
        """A value of a kind; the default for a missing value and for null."""
        value = self.values.get(key)
        value = default if value is None else value
        is_number = kind is not bool and isinstance(value, bool)
        if not isinstance(value, kind) or is_number:
            raise self.refuse(key, expected)
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names, or one name."""
        listed = self.read(key, (list, str), "a list of names", [])
        listed = [listed] if isinstance(listed, str) else listed
        if not all(isinstance(name, str) and name for name in listed):
            raise self.refuse(key, "a list of names")
        return tuple(listed)

    def numbers(self, key: str) -> dict[str, Any]:
        """A table of positive numbers by patterns of names."""
        table = self.read(key, dict, "a table of numbers", {})
        kinds = int if key == "rank_pattern" else (int, float)
        for number in table.values():
            if isinstance(number, bool) or not isinstance(number, kinds) or not number > 0:
                raise self.refuse(key, "a table of positive numbers")
        _check_patterns(f"{self.where}: {key}", table)
        return table

    def layers(self) -> frozenset[int] | None:
        """The layers that the adapter changes; None for all."""
        layers = self.read("layers_to_transform", (list, int), "numbers of layers", [])
        layers = [layers] if isinstance(layers, int) else layers
        if not all(isinstance(layer, int) for layer in layers):
            raise self.refuse("layers_to_transform", "numbers of layers")
        return frozenset(layers) if layers else None

    def check_kind(self) -> None:
        """Refuse other adapters than LoRA, and options that are not implemented."""
        if self.values.get("peft_type") != "LORA":
            raise self.refuse("peft_type", "LORA, as other adapters are not implemented")
        if self.read("bias", str, "none", "none") != "none":
            raise self.refuse("bias", "none, as adapters with biases are not implemented")
        if self.values.get("init_lora_weights", True) not in _KEEPS_BASE:
            raise self.refuse(
                "init_lora_weights",
                "a start that keeps the weights of the model (true, gaussian, orthogonal, eva). "
                "Save the adapter again with path_initial_model_for_weight_conversion of peft",
            )
        for key in sorted(self.values.keys() - _READ - _IGNORED):
            if self.values[key] not in _NO_EFFECT:
                raise self.refuse(key, "no such option, as it is not implemented")


def read_adapter_config(values: Mapping[str, Any], where: str) -> AdapterConfig:
    """Read the table of adapter_config.json.

    Raises:
      InvalidAdapter: The adapter is no LoRA adapter, a value is malformed, or an option may change
        the answer and is not implemented.
    """
    table = _Table(values, where)
    table.check_kind()
    layers = table.layers()
    targets = values.get("target_modules")
    if not isinstance(targets, str):
        targets = tuple(sorted(table.names("target_modules")))
    excluded = values.get("exclude_modules")
    excluded = (
        excluded if isinstance(excluded, str) and excluded else table.names("exclude_modules")
    )
    config = AdapterConfig(
        where,
        rank=table.read("r", int, "a rank", 8),
        alpha=table.read("lora_alpha", (int, float), "a number", 8),
        uses_rslora=table.read("use_rslora", bool, "true or false", False),
        uses_dora=table.read("use_dora", bool, "true or false", False),
        targets=targets,
        excluded=excluded,
        layers=layers,
        layers_patterns=table.names("layers_pattern"),
        rank_pattern=table.numbers("rank_pattern"),
        alpha_pattern=table.numbers("alpha_pattern"),
        saved=table.names("modules_to_save"),
    )
    patterns = [config.targets, excluded, *(config.layers_patterns)]
    _check_patterns(where, (pattern for pattern in patterns if isinstance(pattern, str)))
    if not all(0 < rank <= MAX_RANK for rank in (config.rank, *config.rank_pattern.values())):
        raise table.refuse("r", f"a rank from 1 to {MAX_RANK}")
    if not config.targets:
        raise table.refuse("target_modules", "names of modules")
    return config


def _check_patterns(where: str, patterns: Iterable[str]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise InvalidAdapter(
                f"{where}: expected a regular expression, got {pattern!r} ({error})."
            ) from None


def _is_named(names: str | tuple[str, ...], module: str) -> bool:
    """Whether a module has one of the names or ends in one, or matches a regular expression."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _matching_key(patterns: Iterable[str], module: str) -> str:
    """The first pattern that matches the end of a module's name; the name itself if none does."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)
