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

from ...modelzoo.families.config_reader import ConfigReader, UnsupportedModel
from ...modelzoo.families.hugging_face import MAX_LAYERS
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


def read_adapter_config(values: Mapping[str, Any], where: str) -> AdapterConfig:
    """Read the table of adapter_config.json.

    Raises:
      InvalidAdapter: The adapter is no LoRA adapter, a value is malformed, or an option may change
        the answer and is not implemented.
    """
    try:
        return _read(ConfigReader(values), values, where)
    except UnsupportedModel as error:
        raise InvalidAdapter(f"{where}: {error}") from None


def _read(table: ConfigReader, values: Mapping[str, Any], where: str) -> AdapterConfig:
    if table.text("peft_type") != "LORA":
        raise table.error("peft_type", "LORA, as other adapters are not implemented")
    if table.text("bias", default="none") != "none":
        raise table.error("bias", "none, as adapters with biases are not implemented")
    table.ignore(("init_lora_weights", *_IGNORED))
    if values.get("init_lora_weights", True) not in _KEEPS_BASE:
        raise table.error(
            "init_lora_weights",
            "a start that keeps the weights of the model (true, gaussian, orthogonal, eva). "
            "Save the adapter again with path_initial_model_for_weight_conversion of peft",
        )
    layers, key = (), "layers_to_transform"
    if table.has(key):
        layers = (
            [table.integer(key, minimum=0, maximum=MAX_LAYERS)]
            if isinstance(values[key], int)
            else table.integers(key, minimum=0, maximum=MAX_LAYERS)
        )
    ranks, alphas = table.table("rank_pattern"), table.table("alpha_pattern")
    config = AdapterConfig(
        where,
        rank=table.integer("r", maximum=MAX_RANK, default=8),
        alpha=table.number("lora_alpha", above=-math.inf, default=8),
        uses_rslora=table.flag("use_rslora", default=False),
        uses_dora=table.flag("use_dora", default=False),
        targets=_names(table, values, "target_modules"),
        excluded=_names(table, values, "exclude_modules"),
        layers=frozenset(layers) or None,
        layers_patterns=_listed(table, values, "layers_pattern"),
        rank_pattern={name: ranks.integer(name, maximum=MAX_RANK) for name in ranks.names()},
        alpha_pattern={name: alphas.number(name, above=0) for name in alphas.names()},
        saved=_listed(table, values, "modules_to_save"),
    )
    if not config.targets:
        raise table.error("target_modules", "names of modules")
    table.ignore_rest(refused=values)
    patterns = [x for x in (config.targets, config.excluded) if isinstance(x, str)]
    patterns += [*config.layers_patterns, *config.rank_pattern, *config.alpha_pattern]
    _check_patterns(where, patterns)
    return config


def _names(table: ConfigReader, values: Mapping[str, Any], key: str) -> str | tuple[str, ...]:
    """A list of names, or a single text as it is."""
    if not table.has(key):
        return ()
    return table.text(key) if isinstance(values[key], str) else table.texts(key)


def _listed(table: ConfigReader, values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of names, also of a single one."""
    names = _names(table, values, key)
    return (names,) if isinstance(names, str) else names


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
