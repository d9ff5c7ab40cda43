"""Where the parameters of sparse layers come from: one tensor an expert, one for all, or one fused.

Knows nothing of files. Guarantees: exactly one source for every parameter of a sparse layer.
"""

import itertools
from collections.abc import Sequence, Set
from dataclasses import dataclass

from ..moe.config import MoeConfig
from .mapping import ParameterSource, TensorPart


@dataclass(frozen=True)
class ExpertNames:
    """What a format calls the tensors of a sparse layer; `{i}` is the layer, `{e}` the expert.

    Names are whole. Where gate and up have one name, they are one tensor.
    """

    router: str
    gate: str
    up: str
    down: str
    gate_up_axes: str = "e (p f) d"
    """Axes of the tensor that holds gate and up; `p` tells them apart."""
    down_axes: str = "e d f"
    router_bias: str = ""
    choice_bias: str = ""
    gate_bias: str = ""
    up_bias: str = ""
    down_bias: str = ""
    shared_router: str = ""
    """Of the gate that weighs the shared expert."""
    shared_router_axes: str = "s d -> (s d)"

    def tensor_name(self, template: str, layer: int, expert: str = "{e}") -> str:
        """A tensor's name in one layer; still a template if experts have tensors of their own."""
        return template.replace("{i}", str(layer)).replace("{e}", expert)

    def tensors(self, moe: MoeConfig) -> frozenset[str]:
        """Those that hold the routers and experts of a model."""
        experts = [str(e) for e in range(moe.routing.num_experts)]
        layers = [i for i, is_sparse in enumerate(moe.layers) if is_sparse]
        templates = (self.router, self.gate, self.up, self.down)
        return frozenset(
            self.tensor_name(*which) for which in itertools.product(templates, layers, experts)
        )


def form_of_experts(
    moe: MoeConfig | None, forms: Sequence[ExpertNames], tensor_names: Set[str]
) -> ExpertNames:
    """The form of which the largest share is there; the first one where all are alike."""
    if moe is None:
        return forms[0]

    def share(form: ExpertNames) -> float:
        tensors = form.tensors(moe)
        return len(tensors & tensor_names) / len(tensors)

    return max(forms, key=share)


def sparse_sources(moe: MoeConfig, names: ExpertNames, i: int) -> list[ParameterSource]:
    """Sources of a sparse layer's router and experts; the shared expert is an MLP like any."""
    routing = moe.routing
    sources = [_source(names, i, "router", names.router, "e d -> d e")]
    if routing.has_bias:
        sources.append(_source(names, i, "router_bias", names.router_bias, "e -> e"))
    if routing.has_choice_bias:
        sources.append(_source(names, i, "choice_bias", names.choice_bias, "e -> e"))
    E = routing.num_experts
    gate_up = (names.gate, names.up)
    sources += [
        _gate_up(names, i, "gate_up", gate_up, f"{names.gate_up_axes} -> e p d f", E),
        _source(names, i, "down", names.down, f"{names.down_axes} -> e f d", E),
    ]
    if moe.has_bias:
        fused = names.gate_up_axes.replace(" d", "")
        biases = (names.gate_bias, names.up_bias)
        sources += [
            _gate_up(names, i, "gate_up_bias", biases, f"{fused} -> e p f", E),
            _source(names, i, "down_bias", names.down_bias, "e d -> e d", E),
        ]
    if moe.has_shared_gate:
        shared = names.shared_router_axes
        sources.append(_source(names, i, "shared_gate", names.shared_router, shared))
    return sources


def _source(
    names: ExpertNames, i: int, parameter: str, tensor: str, axes: str, num_experts: int = 0
) -> ParameterSource:
    part = _part(names.tensor_name(tensor, i), axes, num_experts)
    return ParameterSource(f"layers.{i}.mlp.{parameter}", (part,))


def _gate_up(
    names: ExpertNames, i: int, parameter: str, tensors: tuple[str, str], fused: str, E: int
) -> ParameterSource:
    """Gate and up as one tensor, or side by side from two."""
    path = f"layers.{i}.mlp.{parameter}"
    gate, up = (names.tensor_name(tensor, i) for tensor in tensors)
    if gate == up:
        return ParameterSource(path, (_part(gate, fused, E, sizes=(("p", 2),)),))
    axes = "e f -> e 1 f" if parameter.endswith("bias") else "e f d -> e 1 d f"
    return ParameterSource(path, (_part(gate, axes, E), _part(up, axes, E)), concat_axis=1)


def _part(
    tensor: str, axes: str, num_experts: int, sizes: tuple[tuple[str, int], ...] = ()
) -> TensorPart:
    return TensorPart(tensor, axes, sizes, stacked=num_experts if "{e}" in tensor else 0)
