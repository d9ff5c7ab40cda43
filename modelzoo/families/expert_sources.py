"""Sources of the parameters of sparse layers: one tensor per expert, stacked or fused tensors.

Knows nothing of files. Guarantees: exactly one source for every parameter of a sparse layer.
"""

import itertools
from collections.abc import Sequence, Set
from dataclasses import dataclass

from ..config import DecoderConfig
from ..moe_config import MoeConfig
from .mapping import ParameterSource, TensorPart


@dataclass(frozen=True)
class ExpertNames:
    """The tensor names of a sparse layer in a format; `{i}` is the layer, `{e}` the expert.

    Names are complete. If gate and up have the same name, they are one tensor.
    """

    router: str
    gate: str
    up: str
    down: str
    gate_up_axes: str = "e (p f) d"
    """Axes of a tensor with gate and up; `p` is the axis of the two."""
    down_axes: str = "e d f"
    router_bias: str = ""
    choice_bias: str = ""
    choice_bias_axes: str = "e -> e"
    gate_bias: str = ""
    up_bias: str = ""
    down_bias: str = ""
    shared_router: str = ""
    """The tensor of the gate of the shared expert."""
    shared_router_axes: str = "s d -> (s d)"

    def tensors(self, num_experts: int, layers: Sequence[int]) -> frozenset[str]:
        """The tensors of the routers and experts of some layers."""
        templates = (self.router, self.gate, self.up, self.down)
        return frozenset(
            template.replace("{i}", str(i)).replace("{e}", str(e))
            for template, i, e in itertools.product(templates, layers, range(num_experts))
        )


def fused_experts(block: str) -> ExpertNames:
    """The names below a block in the memory of transformers, which has all experts in an array."""
    gate_up = f"{block}.experts.gate_up_proj"
    return ExpertNames(f"{block}.router.weight", gate_up, gate_up, f"{block}.experts.down_proj")


def find_expert_names(
    config: DecoderConfig, forms: Sequence[ExpertNames], tensor_names: Set[str]
) -> ExpertNames:
    """The form with the largest share of its tensors in `tensor_names`; ties go to the first."""
    if config.moe is None:
        return forms[0]
    num_experts, layers = config.moe.routing.num_experts, config.sparse_layers

    def share(form: ExpertNames) -> float:
        tensors = form.tensors(num_experts, layers)
        return len(tensors & tensor_names) / len(tensors)

    return max(forms, key=share)


def sparse_sources(moe: MoeConfig, names: ExpertNames) -> list[ParameterSource]:
    """The sources of the router and experts of a sparse layer, without the shared expert."""
    routing = moe.routing
    sources = [_source("router", names.router, "e d -> d e")]
    if routing.has_bias:
        sources.append(_source("router_bias", names.router_bias, "e -> e"))
    if routing.has_choice_bias:
        part = TensorPart(names.choice_bias, names.choice_bias_axes, (("s", 1),))
        sources.append(ParameterSource("mlp.choice_bias", (part,)))
    E = routing.num_experts
    fused = f"{names.gate_up_axes} -> e p d f"
    sources += [
        _gate_up("gate_up", (names.gate, names.up), fused, E),
        _source("down", names.down, f"{names.down_axes} -> e f d", E),
    ]
    if moe.has_bias:
        biases = (names.gate_bias, names.up_bias)
        sources += [
            _gate_up("gate_up_bias", biases, fused.replace(" d", ""), E),
            _source("down_bias", names.down_bias, "e d -> e d", E),
        ]
    if moe.has_shared_gate:
        part = TensorPart(names.shared_router, names.shared_router_axes, (("s", 1),))
        sources.append(ParameterSource("mlp.shared_gate", (part,)))
    return sources


def _source(parameter: str, tensor: str, axes: str, num_experts: int = 0) -> ParameterSource:
    return ParameterSource(f"mlp.{parameter}", (_part(tensor, axes, num_experts),))


def _gate_up(parameter: str, tensors: tuple[str, str], fused: str, E: int) -> ParameterSource:
    """The source of gate and up, from one tensor or from two."""
    path, (gate, up) = f"mlp.{parameter}", tensors
    if gate == up:
        return ParameterSource(path, (_part(gate, fused, E, sizes=(("p", 2),)),))
    axes = "e f -> e 1 f" if parameter.endswith("bias") else "e f d -> e 1 d f"
    return ParameterSource(path, (_part(gate, axes, E), _part(up, axes, E)), concat_axis=1)


def _part(
    tensor: str, axes: str, num_experts: int, sizes: tuple[tuple[str, int], ...] = ()
) -> TensorPart:
    return TensorPart(tensor, axes, sizes, stacked=num_experts if "{e}" in tensor else 0)
