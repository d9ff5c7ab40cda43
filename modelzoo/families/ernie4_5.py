"""ERNIE 4.5: Llama blocks with adjacent rotated pairs, dense or with shared and routed experts.

Experts are chosen by a softmax and a bias; the weights of the chosen ones are normalized. Options
and names are those of `ernie4_5` and `ernie4_5_moe` in transformers.
"""

from dataclasses import replace

from ..moe_config import MoeConfig, Routing
from .config_reader import ConfigReader
from .family import Family, Options
from .hugging_face import MAX_EXPERTS, MAX_LAYERS, MAX_MLP, SHARED_EXPERTS, SPLIT_EXPERTS

_MLP = "model.layers.{i}.mlp"
_DEFAULTS = {"tie_word_embeddings": True}
_NAMES = {"is_interleaved": True}
_THETA = 500_000.0


def _dense_options(config: ConfigReader, num_layers: int) -> Options:
    del num_layers
    config.expect("use_bias", False)
    return Options()


def _sparse_options(config: ConfigReader, num_layers: int) -> Options:
    config.expect("use_bias", False)
    config.ignore(("moe_norm_min",))  # the smallest divisor of weights, far below all sums
    for second_name, key in {
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
    }.items():
        config.expect_equal(second_name, key)
    count = config.integer("moe_num_experts", maximum=MAX_EXPERTS, default=64)
    chosen = config.integer("moe_k", maximum=count, default=6)
    width = config.integer("moe_intermediate_size", maximum=MAX_MLP)
    shared = config.integer("moe_num_shared_experts", minimum=0, maximum=MAX_EXPERTS, default=2)
    first = config.integer("moe_layer_start_index", minimum=0, maximum=MAX_LAYERS, default=1)
    last = config.integer("moe_layer_end_index", minimum=-1, maximum=MAX_LAYERS, default=-1)
    every = config.integer("moe_layer_interval", maximum=MAX_LAYERS, default=1)
    last = num_layers - 1 if last == -1 else last
    return Options(
        moe=MoeConfig(Routing(count, chosen, has_choice_bias=True), width, shared * width),
        sparse=tuple(first <= i <= last and (i + 1) % every == 0 for i in range(num_layers)),
    )


_EXPERTS = replace(
    SPLIT_EXPERTS,
    choice_bias=f"{_MLP}.moe_statics.e_score_correction_bias",
    choice_bias_axes="s e -> (s e)",
)
DENSE = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    _dense_options,
    hf_defaults=_DEFAULTS | {"head_dim": 128},
    hf_names=_NAMES,
    hf_theta=_THETA,
)
"""ERNIE 4.5, dense: Llama blocks with adjacent rotated pairs."""
SPARSE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    _sparse_options,
    hf_defaults=_DEFAULTS,
    hf_names=_NAMES | SHARED_EXPERTS,
    hf_theta=_THETA,
    hf_experts=(_EXPERTS,),
    hf_unused_tensors=lambda config, num_layers: ("model.mtp_",),
)
"""ERNIE 4.5, sparse: shared experts, and experts chosen by a softmax and a bias."""
