"""Readers of the options of mixtures of experts that several families publish in the same way.

Knows nothing of tensors. Guarantees: every count is within bounds, and at most all experts are
chosen; otherwise the error names the key.
"""

from ..moe_config import MoeConfig, Routing, Scoring
from .config_reader import ConfigReader
from .hugging_face import MAX_EXPERTS, MAX_LAYERS, MAX_MLP

GATING_FUNCTIONS: dict[int, Scoring] = {1: "softmax", 2: "sigmoid"}
"""Values of `expert_gating_func` (gguf.constants.ExpertGatingFuncType)."""


def read_experts(
    config: ConfigReader,
    *,
    num_experts: int,
    num_chosen: int,
    width_key: str = "intermediate_size",
    scoring: Scoring = "softmax",
    is_normalized: bool = True,
    has_option: bool = False,
) -> MoeConfig:
    """Read the mixture of experts of config.json.

    Args:
      config: The table of config.json.
      num_experts: The default number of experts, as in the reference.
      num_chosen: The default number of chosen experts, as in the reference.
      width_key: The key of the hidden size of an expert.
      scoring: The scoring of the family.
      is_normalized: Whether weights are normalized in the family; not used with `has_option`.
      has_option: Whether the key `norm_topk_prob` tells if weights are normalized; its default is
        false.
    """
    if has_option:
        is_normalized = config.flag("norm_topk_prob", default=False)
    count = _num_experts(config, num_experts)
    chosen = config.integer("num_experts_per_tok", maximum=count, default=num_chosen)
    routing = Routing(count, chosen, scoring, is_normalized)
    return MoeConfig(routing, config.integer(width_key, maximum=MAX_MLP))


def sparse_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """The sparse layers: every `decoder_sparse_step`-th one, except `mlp_only_layers`."""
    step = config.integer("decoder_sparse_step", maximum=MAX_LAYERS, default=1)
    dense: tuple[int, ...] = ()
    if config.has("mlp_only_layers"):
        dense = config.integers("mlp_only_layers", minimum=0, maximum=num_layers - 1)
    return tuple((i + 1) % step == 0 and i not in dense for i in range(num_layers))


def sparse_after_dense(config: ConfigReader, key: str, num_layers: int) -> tuple[bool, ...]:
    """The sparse layers: all but the first ones, whose number is published under `key`."""
    num_dense = config.integer(key, minimum=0, maximum=num_layers - 1)
    return tuple(i >= num_dense for i in range(num_layers))


def read_gguf_experts(
    config: ConfigReader,
    *,
    scoring: Scoring = "softmax",
    is_normalized: bool = True,
    is_width_shared: bool = False,
) -> MoeConfig:
    """Read the mixture of experts of GGUF metadata.

    Args:
      config: The metadata of the architecture.
      scoring: The default scoring.
      is_normalized: Whether weights are normalized by default.
      is_width_shared: Whether the default hidden size of an expert is `feed_forward_length` divided
        by the number of chosen experts, instead of `feed_forward_length`.
    """
    count = config.integer("expert_count", maximum=MAX_EXPERTS)
    chosen = config.integer("expert_used_count", maximum=count)
    width = config.integer("feed_forward_length", maximum=MAX_MLP)
    if is_width_shared:
        width //= chosen
    width = config.integer("expert_feed_forward_length", maximum=MAX_MLP, default=width)
    if config.has("expert_gating_func"):
        function = config.integer("expert_gating_func", maximum=max(GATING_FUNCTIONS))
        scoring = GATING_FUNCTIONS[function]
    is_normalized = config.flag("expert_weights_norm", default=is_normalized)
    scale = config.number("expert_weights_scale", above=0.0, default=1.0)
    routing = Routing(count, chosen, scoring, is_normalized, scale)
    return MoeConfig(routing, width)


def _num_experts(config: ConfigReader, default: int) -> int:
    """The number of experts, under either of its two keys, or under both with the same value."""
    names = [name for name in ("num_experts", "num_local_experts") if config.has(name)]
    counts = {config.integer(name, maximum=MAX_EXPERTS) for name in names} or {default}
    if len(counts) > 1:
        raise config.error("num_experts", "the same number as num_local_experts")
    return counts.pop()
