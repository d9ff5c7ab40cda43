"""The plan file: target, model, numbers, buckets, layout, attention, experts, compiler options.

Reads and writes the text of the file, and touches no disk.

Guarantees: `Plan.from_table(tomllib.loads(plan.to_toml())) == plan`; unknown keys are refused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..modelzoo.config_values import check_choice
from ..modelzoo.errors import UserError
from ..modelzoo.weights.weight_formats import BYTE_DTYPES, SCALE_DTYPES, WeightFormat
from ..sharding.layout import PHASES, Layout
from .attention_kernels import AUTO_ATTENTION, AttentionPlan
from .compiler_options import CompilerOptions, read_options
from .expert_plan import ExpertPlan
from .graphs.graph_kinds import GRAPH_KINDS
from .grids.bucket_grid import BucketGrid
from .plan_evidence import PlanEvidence
from .plan_tables import (
    PlanTable,
    check_flag,
    check_keys,
    check_text,
    key_lines,
    keys_of,
    table_lines,
)
from .target_names import TargetName
from .weight_rules import FLOAT, KEPT, WeightRules

SCHEMA = 3
_LAYOUT_KEYS = {"layout", "max_replicated", "mesh", "rules", *PHASES}
DTYPES = ("float32", "bfloat16")
ACTIVATIONS = (FLOAT, "int8")
WEIGHTS = {"int8": "int8", "float8": "float8_e4m3fn", "int4": "int4"}
"""The dtype of codes, by format of weights that are rounded while they load."""
CACHES = {FLOAT: None, "int8": "int8", "float8": "float8_e4m3fn", "int4": "int4"}
"""The dtype of codes of the cache, by its name in a plan; None for float."""


@dataclass(frozen=True)
class PlannedModel(PlanTable, name="model"):
    """The model for which a plan was made."""

    source: str
    """The name of the model, as `--model` gave it."""
    fingerprint: str
    """The fingerprint of the model's files, `sha256:...`. If it is empty, the plan may be used with
    any model that fits it."""
    scan_layers: bool = False
    """Whether layers that repeat a pattern run in a loop. Then graphs of deep models compile in a
    fraction of the time, but run slower on the CPU."""

    def __post_init__(self):
        """Refuse values of a wrong type."""
        check_text("model.source", self.source)
        check_text("model.fingerprint", self.fingerprint)
        check_flag("model.scan_layers", self.scan_layers)


@dataclass(frozen=True)
class Numbers(PlanTable, name="numbers"):
    """The table `[numbers]` of a plan."""

    dtype: str
    """The dtype of activations and of weights that are not quantised: `float32` or `bfloat16`."""
    weights: str = FLOAT
    """The weights of products: `float`, which means `dtype`, or codes with scales: `int8`, `float8`
    (e4m3) or `int4`. Weights are rounded to codes while they load. Embeddings, the head and
    routers stay in float unless a rule quantises them. Norms and biases always stay in float.
    `as_published` keeps the codes and scales of the checkpoint."""
    group: int = 0
    """The input features of a weight that share a scale; 0 for one scale per output feature.
    A smaller group loses less; `int4` should have 32 to 128. Unit: features."""
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Exceptions by parameter path: a pattern, such as `layers.0.*` or `*.mlp.down`, and a table
    with its own `weights` and `group`, such as `{weights = "int8", group = 0}`. The last rule that
    matches a parameter decides."""
    cache: str = FLOAT
    """The keys and values of the cache: `float`, which means `dtype` (on a CPU float32,
    unless its kernels serve), or codes with a scale for each token and head: `int8`, `float8`
    (e4m3) or `int4`."""
    activations: str = FLOAT
    """The activations of products with weights in codes: `float`, which means `dtype`, or `int8`,
    rounded in each product with one scale for a token. `int8` needs weights of `int8` without
    groups."""
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The formats of the checkpoint that `as_published` keeps, by parameter path: a pattern, and a
    table such as `{codes = "uint4", group = 32, scales = "float16", offsets = true}`. noria writes
    it when it reads the checkpoint, and refuses a checkpoint with other formats."""

    def __post_init__(self):
        """Refuse an unknown dtype or format."""
        if self.dtype not in DTYPES:
            raise UserError(f"numbers.dtype: expected {' or '.join(DTYPES)}, got {self.dtype!r}.")
        if self.weights != KEPT:
            _check_format("numbers", self.weights, self.group, (KEPT,))
        elif self.group:
            raise UserError(
                f"numbers.group: expected 0, as published weights have their own groups, got "
                f"{self.group!r}. Remove it."
            )
        check_choice("numbers.cache", self.cache, CACHES)
        check_choice("numbers.activations", self.activations, ACTIVATIONS)
        for name in ("rules", "published"):
            if not isinstance(value := getattr(self, name), Mapping):
                raise UserError(f"numbers.{name}: expected a table, got {value!r}.")
        _check_published(self.weights, self.published)
        for pattern, rule in self.rules.items():
            where = f"numbers.rules {pattern!r}"
            check_keys(where, rule, {"weights"}, {"group"})
            _check_format(where, rule["weights"], rule.get("group", 0))
        formats = {self.weights, *(rule["weights"] for rule in self.rules.values())}
        if self.activations != FLOAT and formats == {FLOAT}:
            raise UserError(
                f"numbers.activations: with {self.activations!r}, expected weights in int8, got "
                f"float weights alone. Change weights, or set activations = {FLOAT!r}."
            )

    @property
    def weight_rules(self) -> WeightRules:
        """The format of every weight."""
        rules = (
            (pattern, _format(rule["weights"], rule.get("group", 0)))
            for pattern, rule in self.rules.items()
        )
        rounds = self.activations != FLOAT
        if self.weights != KEPT:
            default = _format(self.weights, self.group)
            return WeightRules(default, tuple(rules), rounds_activations=rounds)
        if not self.published:
            raise UserError(
                f"numbers.published: expected the formats of the checkpoint, as weights is "
                f"{KEPT}, got none. Make the plan with the weights of the model."
            )
        published = ((name, published_format(x)) for name, x in self.published.items())
        return WeightRules(None, tuple(rules), tuple(published), rounds)

    @property
    def cache_codes(self) -> str | None:
        """The dtype of cache entries in codes; None for float entries."""
        return CACHES[self.cache]


def published_format(table: Mapping[str, Any]) -> WeightFormat:
    """The format that an entry of the table `numbers.published` describes."""
    group, flags = table.get("group", 0), (table.get(key, False) for key in ("offsets", "order"))
    return WeightFormat(table["codes"], group, table["scales"], *flags)


def published_table(form: WeightFormat) -> dict[str, Any]:
    """The entry of the table `numbers.published` for a format; defaults are left out."""
    table = {"codes": form.codes, "group": form.group, "scales": form.scales}
    table |= {"offsets": form.has_offsets, "order": form.is_ordered}
    return {key: value for key, value in table.items() if value}


def _check_published(weights: str, published: Mapping[str, Any]) -> None:
    """Refuse entries of the table `numbers.published` that no checkpoint has."""
    if published and weights != KEPT:
        raise UserError(
            f"numbers.published: expected none, as weights is {weights!r}, got "
            f"{len(published)} formats. Remove it, or set weights = {KEPT!r}."
        )
    for pattern, table in published.items():
        where = f"numbers.published {pattern!r}"
        check_keys(where, table, {"codes", "scales"}, {"group", "offsets", "order"})
        for key, known in (("codes", BYTE_DTYPES), ("scales", SCALE_DTYPES)):
            check_choice(f"{where}.{key}", table[key], known)
        _check_group(where, table.get("group", 0))
        for key in ("offsets", "order"):
            check_flag(f"{where}.{key}", table.get(key, False))


def _check_format(where: str, weights: Any, group: Any, others: tuple[str, ...] = ()) -> None:
    """Refuse unknown codes, and groups that no weight can have."""
    check_choice(f"{where}.weights", weights, (FLOAT, *WEIGHTS, *others))
    _check_group(where, group)
    if weights == FLOAT and group:
        raise UserError(
            f"{where}.group: expected 0, as float weights have no scales, got {group}. Remove it, "
            f'or set weights = "int8" or "int4".'
        )
    if weights == "float8" and group:
        raise UserError(
            f"{where}.group: expected 0, as float8 weights have one scale for each output feature, "
            f"got {group}. Remove it."
        )


def _check_group(where: str, group: Any) -> None:
    if type(group) is not int or group < 0 or group == 1:
        raise UserError(
            f"{where}.group: expected 0 for one scale per output feature, or at least 2 input "
            f"features, got {group!r}."
        )


def _format(weights: str, group: int) -> WeightFormat | None:
    return None if weights == FLOAT else WeightFormat(WEIGHTS[weights], group)


@dataclass(frozen=True)
class Plan:
    """Everything that decides which graphs exist."""

    TABLES = (PlanEvidence, PlannedModel, Numbers, BucketGrid, AttentionPlan, ExpertPlan)
    """The fields that are tables, in the order of the file."""

    target: str
    """The hardware that graphs are compiled for: `cpu`, `cpu:8`, `tpu:v5e:2x4`, `gpu:h100:8`."""
    model: PlannedModel
    """The model, and how its layers run."""
    numbers: Numbers
    """The dtype of the run, and the formats of its weights, activations and cache."""
    buckets: BucketGrid
    """The shapes of all graphs."""
    layout: Layout | None = None
    """The layout of the model on several devices; None for one device."""
    experts: ExpertPlan | None = None
    """The dispatch of tokens to experts; None means without loss."""
    attention: AttentionPlan = AUTO_ATTENTION
    """The attention kernels that the plan asks for by name."""
    compiler: CompilerOptions = field(default_factory=dict)
    """Options of XLA's compiler that the plan sets. The platform's defaults are added when graphs
    are compiled."""
    max_length_reason: str = ""
    """The reason why rows without `max_tokens` end at `buckets.max_length`, although the model's
    context is longer. It is empty if the context is not longer, or if the user set the limit."""
    evidence: PlanEvidence | None = None
    """The evidence of the plan's seconds; None without a prediction."""

    def __post_init__(self):
        """Refuse an unknown target, and compiler options for graphs that are not built."""
        TargetName.parse(self.target)
        check_text("plan max_length_reason", self.max_length_reason)
        has_capacity = self.experts is not None and self.experts.prefill.kind == "capacity"
        if has_capacity and self.buckets.embed:
            raise UserError(
                "plan [experts.prefill]: expected lossless dispatch with buckets.embed, as the "
                "other texts of a call decide what a capacity drops. Set dispatch = "
                '"lossless".'
            )
        if has_capacity and self.buckets.prefixes is not None:
            raise UserError(
                "plan [prefixes]: expected none with experts of a fixed capacity in prefill, where "
                'the other rows of a call decide what a prefix loses. Set dispatch = "lossless" in '
                "[experts.prefill], or leave [prefixes] out."
            )
        self._check_experts_of_pages()
        built = {kind.options for kind in GRAPH_KINDS.values() if kind.is_built(self.buckets)}
        if unused := [kind for kind in self.compiler if kind not in built]:
            raise UserError(
                f"plan [compiler]: expected options for graphs that the plan has, got {unused}. "
                f"Remove them."
            )

    def _check_experts_of_pages(self) -> None:
        pages, most = self.buckets.pages, self.buckets.most_pages
        if self.experts is None or pages is None or pages >= most:
            return
        for phase in PHASES:
            dispatch = getattr(self.experts, phase)
            if dispatch.kind != "capacity":
                continue
            raise UserError(
                f"plan [experts.{phase}]: expected lossless dispatch, or at least {most} "
                f"buckets.pages, got a capacity_factor of {dispatch.capacity_factor:g} and {pages} "
                "pages: rows that lack pages are computed again beside other rows, and these would "
                "decide what a capacity drops. Give more pages, so that none lacks any, or set "
                'dispatch = "lossless".'
            )

    def to_toml(self) -> str:
        """The plan as TOML text."""
        head = {"schema": SCHEMA, "target": self.target}
        head["max_length_reason"] = self.max_length_reason or None
        lines = key_lines(head)
        for kind in self.TABLES:
            if (table := getattr(self, kind.NAME)) is not None:
                lines += table.to_lines()
        for kind, options in self.compiler.items():
            lines += table_lines(f"compiler.{kind}", options)
        if self.layout is not None:
            table = self.layout.to_table()
            table["layout"] = table.pop("name")
            scalars = ("layout", "max_replicated")
            lines[2:2] = key_lines({key: table.pop(key) for key in scalars})
            for phase in PHASES:
                table[f"{phase}.rules"] = table.pop(phase, {}).get("rules", {})
            for name, values in table.items():
                if values:
                    lines += table_lines(name, values)
        return "\n".join(lines) + "\n"

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> "Plan":
        """Read a parsed TOML table.

        Raises:
          ValueError: A key or value is wrong, or a key is missing; the error names it.
        """
        schema = table.get("schema", SCHEMA)
        if schema != SCHEMA or type(schema) is not int:
            raise UserError(
                f"plan schema: expected {SCHEMA}, got {schema!r}. Plan again with this version, "
                f"or use the version of noria that wrote the plan."
            )
        required, optional = keys_of(cls)
        optional |= _LAYOUT_KEYS | {kind.NAME for kind in BucketGrid.TABLES}
        check_keys("plan", table, required | {"schema"}, optional)
        BucketGrid.check(table["buckets"])

        def read(kinds: Iterable[type[PlanTable]], table: Mapping[str, Any]) -> dict[str, Any]:
            return {x.NAME: x.from_table(table[x.NAME]) for x in kinds if x.NAME in table}

        buckets = {**table["buckets"], **read(BucketGrid.TABLES, table)}
        return cls(
            target=table["target"],
            layout=_layout(table),
            compiler=read_options(table.get("compiler", {})),
            max_length_reason=table.get("max_length_reason", ""),
            **read(cls.TABLES, {**table, "buckets": buckets}),
        )


def _layout(table: Mapping[str, Any]) -> Layout | None:
    layout = {key: table[key] for key in _LAYOUT_KEYS if key in table}
    if not layout:
        return None
    layout["name"] = layout.pop("layout", "of the plan")
    return Layout.from_table(layout, "plan")
