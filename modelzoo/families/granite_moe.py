"""Granite 3, sparse: the factors of Granite, and experts weighted by a softmax of the chosen ones.

Some models have a shared expert, too. Models of Granite 4 without states have attention in all
layers, with or without rotation, and an MLP that is named like the shared expert. Names and
meanings are those of `granitemoe`, `granitemoeshared` and `granitemoehybrid` in transformers and,
for GGUF, of llama.cpp.
"""

from dataclasses import replace

from ..rope_config import NoRope
from .config_reader import ConfigReader
from .expert_options import read_experts, read_gguf_experts
from .expert_sources import ExpertNames, fused_experts
from .family import Family, Options
from .granite import factor_options, gguf_factor_options
from .hugging_face import MAX_EXPERTS, MAX_MLP
from .rope_options import read_rope

_BLOCK = "model.layers.{i}.block_sparse_moe"
_PUBLISHED = ExpertNames(
    router=f"{_BLOCK}.router.layer.weight",
    gate=f"{_BLOCK}.input_linear.weight",
    up=f"{_BLOCK}.input_linear.weight",
    down=f"{_BLOCK}.output_linear.weight",
)


_EXPERTS = (_PUBLISHED, fused_experts(_BLOCK))
_MLP = "model.layers.{i}.shared_mlp"
_DENSE = {
    "gate": f"{_MLP}.input_linear",
    "up": f"{_MLP}.input_linear",
    "down": f"{_MLP}.output_linear",
}
_SHARED = {f"shared_{part}": tensor for part, tensor in _DENSE.items()}


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    moe = read_experts(config, num_experts=8, num_chosen=2, scoring="softmax_of_chosen")
    return replace(factor_options(config, num_layers), moe=moe)


def _shared_options(config: ConfigReader, num_layers: int) -> Options:
    options = _hf_options(config, num_layers)
    assert options.moe is not None, "all layers have experts"
    size = config.integer("shared_intermediate_size", minimum=0, maximum=MAX_MLP, default=0)
    return replace(options, moe=replace(options.moe, shared_mlp=size))


def _hybrid_options(config: ConfigReader, num_layers: int) -> Options:
    key = "layer_types" if config.has("layer_types") else "layers_block_type"
    config.expect_equal("layers_block_type", key)
    kinds = config.texts(key) if config.has(key) else ()
    if len(kinds) != num_layers or not set(kinds) <= {"attention", "full_attention"}:
        raise config.error(key, f"{num_layers} entries of 'attention': states are not implemented")
    config.ignore_beginning("mamba_")
    config.ignore(("time_step_limit",))
    mlp = config.integer("shared_intermediate_size", maximum=MAX_MLP)
    if config.integer("num_local_experts", minimum=0, maximum=MAX_EXPERTS, default=8):
        options = _shared_options(config, num_layers)
    else:
        config.ignore(("num_experts_per_tok", "intermediate_size"))
        options = factor_options(config, num_layers)
    rope = read_rope(config)
    position = config.text("position_embedding_type", default="nope")
    if position not in ("rope", "nope"):
        raise config.error("position_embedding_type", "rope or nope")
    return replace(options, mlp=mlp, rope=rope if position == "rope" else NoRope())


def _gguf_options(config: ConfigReader, num_layers: int) -> Options:
    moe = read_gguf_experts(config, scoring="softmax_of_chosen")
    return replace(gguf_factor_options(config, num_layers), moe=moe)


FAMILY = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    _hf_options,
    _gguf_options,
    hf_experts=_EXPERTS,
    gguf_interleaved=True,
)
SHARED = Family(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    _shared_options,
    hf_names=_SHARED,
    hf_experts=_EXPERTS,
)
"""Granite 3, with a shared expert: the sparse model and an expert that all tokens take."""
HYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    _hybrid_options,
    hf_names=_DENSE | _SHARED,
    hf_experts=_EXPERTS,
)
"""Granite 4 without states: attention in all layers, with or without rotation."""
