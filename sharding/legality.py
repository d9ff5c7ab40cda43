"""Legality of a layout: every rule, axis and size is checked at once, before anything is lowered.

Sizes come from a model's configuration and, if there is one, from the shapes of a grid. Knows
nothing of devices or graphs. Guarantees: a layout without findings lowers, and each finding names
the axis, the rule and the number.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from ..modelzoo import axes
from ..modelzoo.config import DecoderConfig, head_copies
from ..modelzoo.config_values import check_count, is_count
from ..modelzoo.errors import UserError
from ..modelzoo.layer_config import Attention, Mlp
from ..modelzoo.moe_config import MoeConfig
from ..modelzoo.weights.weight_products import Axes
from .axis_rules import FOLLOWS, AxisRules
from .expert_exchange import ExpertExchange
from .layout import PHASES, Layout
from .mesh_layout import MESH_AXES

_DERIVED = (axes.LOGIT_BATCH, axes.HEAD_BATCH, axes.EXPERT_MLP)
RULE_AXES = tuple(axis for axis in axes.LOGICAL_AXES if axis not in _DERIVED)
_ARRAYS: dict[str, Axes] = {
    "the residual stream": axes.RESIDUAL,
    "queries": axes.HEADS,
    "the MLP's activations": axes.HIDDEN,
    "logits": axes.LOGITS,
    "the cache": axes.CACHE_HEADS,
}


class IllegalLayout(UserError):
    """An illegal layout, with all findings."""

    def __init__(self, layout: Layout, findings: Sequence[str]):
        self.layout, self.findings = layout, tuple(findings)
        listed = "".join(f"\n  {finding}" for finding in findings)
        super().__init__(f"layout {layout.name!r} ({layout.mesh}) is illegal:{listed}")

    def __reduce__(self):
        """Pickle all arguments, so that a worker's error reaches its parent process."""
        return type(self), (self.layout, self.findings)


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the model, the devices and the grid that a layout is checked against."""

    config: DecoderConfig
    num_devices: int
    weights: Mapping[str, tuple[tuple[int, ...], Axes]]
    """Shape and logical axes of every published parameter."""
    batches: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Batch sizes of each phase's graphs; empty while no grid is known."""
    lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Tokens per row in each phase's graphs."""
    page: int | None = None
    """The entries of a page; None while no grid is known, or without slots."""
    slot_groups: int | None = None
    """Number of groups of slots on different devices; None without slots."""
    is_chunked: bool = False
    """Whether prompts are prefilled in chunks."""
    groups: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """The number of groups of each weight that is quantised in groups, and the logical axis of its
    first input."""


def check(layout: Layout, sizes: ModelSizes) -> list[str]:
    """Find everything that is wrong with a layout; the list is empty for a legal layout."""
    findings = [*_mesh_findings(layout, sizes.num_devices), *_name_findings(layout)]
    if findings:
        # sizes mean nothing while names or the mesh are wrong
        return findings
    by_phase = {phase: list(_phase_findings(layout, phase, sizes)) for phase in PHASES}
    in_both = set.intersection(*map(set, by_phase.values()))
    for phase, phase_findings in by_phase.items():
        findings += [f if f in in_both else f"{phase}: {f}" for f in phase_findings]
    if sizes.is_chunked:
        findings += _piece_findings(layout, sizes)
    return list(dict.fromkeys([*findings, *_weight_findings(layout, sizes)]))


def require(layout: Layout, sizes: ModelSizes) -> None:
    """Raise `IllegalLayout` unless the layout is legal."""
    if findings := check(layout, sizes):
        raise IllegalLayout(layout, findings)


def _mesh_findings(layout: Layout, num_devices: int) -> Iterable[str]:
    for axis, size in layout.mesh.axes:
        if axis not in MESH_AXES:
            yield f"[mesh] {axis}: expected an axis of {', '.join(MESH_AXES)}. Rename it."
            continue
        try:
            check_count(f"[mesh] {axis}", size)
        except ValueError as error:
            yield str(error)
    are_counts = all(map(is_count, layout.mesh.sizes.values()))
    if are_counts and layout.mesh.num_devices != num_devices:
        yield (
            f"[mesh] {layout.mesh}: the product of the sizes is {layout.mesh.num_devices}, the "
            f"number of the target's devices {num_devices}. Change a size, or the target."
        )


def _name_findings(layout: Layout) -> Iterable[str]:
    for where, table in _tables(layout):
        for axis, mesh_axes in table.items():
            if axis not in RULE_AXES:
                known = ", ".join(RULE_AXES)
                yield (
                    f"{where} {axis}: matches nothing. Rename it or leave it out; logical axes are "
                    f"{known}."
                )
            for mesh_axis in mesh_axes:
                if mesh_axis not in layout.mesh.sizes:
                    yield (
                        f"{where} {axis} = {_quoted(mesh_axes)}: the mesh has no axis "
                        f"{mesh_axis!r}, only {', '.join(layout.mesh.sizes)}. Add it to [mesh] or "
                        f"change the rule."
                    )
            if len(set(mesh_axes)) < len(mesh_axes):
                quoted = _quoted(mesh_axes)
                yield f"{where} {axis} = {quoted}: names a mesh axis twice. Name it once."
    if axes.CACHE_LENGTH in layout.prefill:
        yield (
            "[prefill.rules] cache_length: matches nothing, as prefill has no cache. Put it under "
            "[decode.rules]."
        )


def _tables(layout: Layout) -> list[tuple[str, Mapping[str, tuple[str, ...]]]]:
    return [
        ("[rules]", layout.rules.table),
        ("[prefill.rules]", layout.prefill),
        ("[decode.rules]", layout.decode),
    ]


def _phase_findings(layout: Layout, phase: str, sizes: ModelSizes) -> Iterable[str]:
    rules = layout.phase(phase)
    for name, logical_axes in _ARRAYS.items():
        yield from _collision(name, logical_axes, rules)
    yield from _order_findings(layout, rules)
    yield from _gathering_findings(layout.rules, rules)
    for attention in dict.fromkeys(sizes.config.attentions):
        yield from _head_findings(layout, rules, attention)
    if sizes.config.moe is not None:
        yield from _expert_findings(layout, rules, sizes.config.moe)
    yield from _shape_findings(layout, phase, sizes)
    yield from _division(layout, rules, axes.EMBED, "embed", sizes.config.embed)


def _shape_findings(layout: Layout, phase: str, sizes: ModelSizes) -> Iterable[str]:
    """Check batches and lengths of the graphs against the rules of rows and tokens."""
    rules = layout.phase(phase)
    row_axes = [axes.BATCH]
    # an axis that merely follows `batch` would repeat the same finding
    row_axes += [
        axis
        for axis, leader in FOLLOWS.items()
        if leader == axes.BATCH and rules[axis] != rules[axes.BATCH]
    ]
    for axis in row_axes:
        remedy = "Plan batches that do, or change the rule."
        for batch in sizes.batches.get(phase, ()):
            yield from _division(layout, rules, axis, "a graph's batch", batch, remedy)
    length_axes = [axes.LENGTH]
    if rules[axes.RESIDUAL_LENGTH] != rules[axes.LENGTH]:
        length_axes.append(axes.RESIDUAL_LENGTH)
    for length, axis in product(sizes.lengths.get(phase, ()), length_axes):
        what, remedy = "a row's length", "Plan lengths that do, or change the rule."
        if phase == "decode":
            remedy = "Put the rule under [prefill.rules]: decode has one token a row."
        elif sizes.is_chunked:
            what, remedy = "buckets.chunk", "Plan one that does, or change the rule."
        yield from _division(layout, rules, axis, what, length, remedy)
    if phase == "decode":
        # each device has the same number of slots and of pages
        pieces = layout.mesh.num_shards(rules[axes.ATTENTION_BATCH])
        if sizes.slot_groups not in (None, pieces):
            yield (
                f"attention_batch = {_quoted(rules[axes.ATTENTION_BATCH])}: expected "
                f"buckets.slot_groups to be the pieces that it splits slots into, {pieces}, got "
                f"{sizes.slot_groups}. Change slot_groups, or the rule."
            )
    if phase == "decode" and sizes.page is not None:
        remedy = "Plan a page that does, or change the rule."
        yield from _division(layout, rules, axes.CACHE_LENGTH, "buckets.page", sizes.page, remedy)


def _piece_findings(layout: Layout, sizes: ModelSizes) -> Iterable[str]:
    """Check that each device has as many tokens of every piece of a prompt, for its pages."""
    remedy = "Plan a chunk that does, or change the rule."
    for chunk in sizes.lengths.get("prefill", ()):
        rules = layout.phase("decode")
        yield from _division(layout, rules, axes.CACHE_LENGTH, "buckets.chunk", chunk, remedy)


def _collision(name: str, logical_axes: Axes, rules: AxisRules) -> Iterable[str]:
    """Check that an array is not split twice over one mesh axis."""
    by_mesh_axis: dict[str, list[str]] = {}
    for logical_axis in filter(None, logical_axes):
        for mesh_axis in rules[logical_axis]:
            by_mesh_axis.setdefault(mesh_axis, []).append(logical_axis)
    for mesh_axis, logical in by_mesh_axis.items():
        if len(logical) > 1:
            yield (
                f"mesh axis {mesh_axis!r} splits {name} twice, as {' and as '.join(logical)}. "
                f"Change one of the rules."
            )


def _order_findings(layout: Layout, rules: AxisRules) -> Iterable[str]:
    for axis, leader in FOLLOWS.items():
        what = "tokens" if leader == axes.LENGTH else "rows"
        begins = rules[axis][: len(rules[leader])]
        if begins != rules[leader]:
            yield (
                f"{axis} = {_quoted(rules[axis])}: expected to begin with the mesh axes of "
                f"{leader}, {_quoted(rules[leader])}: {what} are split further, not differently. "
                f"Name these axes first."
            )
    in_order = tuple(axis for axis, _ in layout.mesh.axes if axis in rules[axes.LENGTH])
    if rules[axes.LENGTH] != in_order:
        yield (
            f"length = {_quoted(rules[axes.LENGTH])}: expected the order of [mesh], "
            f"{_quoted(in_order)}: keys and values go around the ring in that order. Name them so."
        )
    heads, exchanged = rules[axes.QUERY_HEADS], rules.exchanged
    if heads[len(heads) - len(exchanged) :] != exchanged:
        yield (
            f"attention_batch = {_quoted(rules[axes.ATTENTION_BATCH])}: from the first mesh axis "
            f"of query_heads on, here {_quoted(exchanged)}, it must name the last ones of "
            f"query_heads ({_quoted(heads)}), in that order."
        )


def _gathering_findings(stored: AxisRules, used: AxisRules) -> Iterable[str]:
    for axis in axes.WEIGHT_AXES:
        if used[axis] != stored[axis][: len(used[axis])]:
            yield (
                f"{axis} = {_quoted(used[axis])}: expected the mesh axes of [rules], "
                f"{_quoted(stored[axis])}, or the first of them: a phase may gather weights, not "
                f"split them differently. Change the rule of [rules], or leave this one out."
            )


def _head_findings(layout: Layout, rules: AxisRules, attention: Attention) -> Iterable[str]:
    K, H = attention.num_kv_heads, attention.head_dim
    shards = layout.mesh.num_shards(rules[axes.KV_HEADS])
    wanted = rules.table.get(axes.KV_HEADS)
    if wanted and wanted != rules[axes.KV_HEADS]:
        yield (
            f"kv_heads = {_quoted(wanted)}: expected {_quoted(rules[axes.KV_HEADS])}, the mesh "
            f'axes of query_heads that attention_batch leaves, or "" for copies. Leave the '
            f"rule out."
        )
    if attention.latent is not None:
        # the cache has no heads to divide, and the heads of the projections are query heads
        return
    if wanted != () and K % shards:
        heads = "1 head does" if K == 1 else f"{K} heads do"
        yield (
            f"kv_heads: {heads} not divide over {shards} devices "
            f'({_quoted(rules[axes.KV_HEADS])}). Set kv_heads = "" to keep a copy of a head on '
            f"every device whose queries read it, or shard attention over batch "
            f"(attention_batch)."
        )
    stored = layout.mesh.num_shards(layout.rules[axes.QUERY_HEADS])
    surplus = head_copies(K, stored) // head_copies(K, shards)
    if rules.exchanged and H % surplus:
        yield (
            f"attention_batch: head_dim {H} does not divide over the {surplus} devices that hold "
            f"one KV head. Use fewer devices along {_quoted(rules[axes.QUERY_HEADS])}."
        )


def _expert_findings(layout: Layout, rules: AxisRules, moe: MoeConfig) -> Iterable[str]:
    experts = rules[axes.EXPERTS]
    if experts != layout.rules[axes.EXPERTS]:
        yield (
            f"experts = {_quoted(experts)}: expected {_quoted(layout.rules[axes.EXPERTS])} as in "
            f"[rules]: experts stay where they are stored. Leave this one out."
        )
    token_axes = {*rules[axes.RESIDUAL_BATCH], *rules[axes.RESIDUAL_LENGTH]}
    if token_axes & set(experts) and not token_axes >= set(experts):
        without = tuple(axis for axis in experts if axis not in token_axes)
        yield (
            f"experts = {_quoted(experts)}: some of these mesh axes split tokens, but not "
            f"{_quoted(without)}. Name this axis in batch, too, or remove it."
        )
    elif token_axes & set(experts):
        batch, length = ExpertExchange(rules, layout.rules).tokens
        if gathered := tuple(axis for axis in experts if axis not in batch + length):
            yield (
                f"experts = {_quoted(experts)}: tokens are gathered along {_quoted(gathered)} "
                f"before experts see them, so the exchange would send copies. In the rules of "
                f"residual_batch and residual_length, name it before the mesh axes of mlp."
            )
    yield from _division(
        layout, rules, axes.EXPERTS, "the number of experts", moe.routing.num_experts
    )
    yield from _division(layout, rules, axes.EXPERT_MLP, "mlp of an expert", moe.mlp)
    yield from _division(layout, rules, axes.MLP, "mlp of the shared expert", moe.shared_mlp)


def _weight_findings(layout: Layout, sizes: ModelSizes) -> Iterable[str]:
    config, rules = sizes.config, layout.rules
    # if the query heads divide over the devices, they also divide over the copies of key/value
    # heads: both the devices and the key/value heads then divide the number of query heads
    heads = "the number of query heads"
    for count in dict.fromkeys(attention.num_query_heads for attention in config.attentions):
        yield from _division(layout, rules, axes.QUERY_HEADS, heads, count)
    for mlp in dict.fromkeys(layer.feed_forward for layer in config.layers):
        if isinstance(mlp, Mlp):
            yield from _division(layout, rules, axes.MLP, "mlp", mlp.size)
    yield from _division(layout, rules, axes.EMBED_IN, "embed", config.embed)
    for name, (num_groups, axis) in sizes.groups.items():
        if axis:
            what = f"the number of groups of {name}, each of which must be on one device,"
            remedy = (
                "Take a smaller numbers.group, change the rule, or set the weights of this "
                'parameter to "float" in numbers.rules.'
            )
            yield from _division(layout, rules, axis, what, num_groups, remedy)
    kinds = {tuple(sorted(filter(None, a))) for _, a in sizes.weights.values()}
    for logical_axes in sorted(kinds):
        yield from _collision(f"a weight ({', '.join(logical_axes)})", logical_axes, rules)
    yield from _replication_findings(layout, sizes)


def _replication_findings(layout: Layout, sizes: ModelSizes) -> Iterable[str]:
    """Find mesh axes, except those of the batch, along which too many weights are whole."""
    batch_axes = {axis for phase in PHASES for axis in layout.phase(phase)[axes.BATCH]}
    total = sum(math.prod(shape) for shape, _ in sizes.weights.values())
    for mesh_axis, size in layout.mesh.axes:
        if size == 1 or mesh_axis in batch_axes:
            continue
        whole = {
            name: math.prod(shape)
            for name, (shape, logical_axes) in sizes.weights.items()
            if not any(axis and mesh_axis in layout.rules[axis] for axis in logical_axes)
        }
        share = sum(whole.values()) / total
        if share > layout.max_replicated:
            largest = max(whole, key=lambda name: whole[name])
            yield (
                f"mesh axis {mesh_axis!r}: {share:.0%} of the weights lie whole on each of its "
                f"{size} devices, the largest of them {largest}; max_replicated is "
                f"{layout.max_replicated:g}. Add a rule that splits them, or raise "
                f"max_replicated."
            )


def _division(
    layout: Layout,
    rules: AxisRules,
    axis: str,
    what: str,
    size: int,
    remedy: str = "Change the size of a mesh axis, or the rule.",
) -> Iterable[str]:
    shards = layout.mesh.num_shards(rules[axis])
    if size % shards:
        yield (
            f"{axis} = {_quoted(rules[axis])}: {what} is {size}, which does not divide over "
            f"{shards} devices. {remedy}"
        )


def _quoted(mesh_axes: tuple[str, ...]) -> str:
    """Mesh axes in the spelling of layout files."""
    quoted = [f'"{axis}"' for axis in mesh_axes]
    return f"[{', '.join(quoted)}]" if len(quoted) > 1 else "".join(quoted) or '""'
