"""Options of mixtures of experts, as families publish them alike in config.json and in GGUF.

Knows nothing of tensors. Guarantees: every count is within bounds and no more experts are chosen
than there are, or the key that says otherwise is named.
"""

from ..moe.config import MoeConfig, Routing, Scoring
from .config_reader import ConfigReader
from .hugging_face import MAX_EXPERTS, MAX_LAYERS, MAX_MLP

GATING_FUNCTIONS: dict[int, Scoring] = {1: "softmax", 2: "sigmoid"}
"""Values of `expert_gating_func` (gguf.constants.ExpertGatingFuncType)."""


def read_routing(
    config: ConfigReader,
    *,
    num_experts: int,
    num_chosen: int,
    scoring: Scoring = "softmax",
    is_normalized: bool = True,
    has_option: bool = False,
) -> Routing:
    """Routing of config.json; the numbers are those of the reference where the file is silent.

    With `has_option`, `norm_topk_prob` says whether weights are normalized; without that key they
    are not.
    """
    if has_option:
        is_normalized = config.flag("norm_topk_prob", default=False)
    count = _num_experts(config, num_experts)
    chosen = config.integer("num_experts_per_tok", maximum=count, default=num_chosen)
    return Routing(count, chosen, scoring, is_normalized)


def sparse_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Each `decoder_sparse_step`-th layer, but for `mlp_only_layers`."""
    step = config.integer("decoder_sparse_step", maximum=MAX_LAYERS, default=1)
    dense: tuple[int, ...] = ()
    if config.has("mlp_only_layers"):
        dense = config.integers("mlp_only_layers", minimum=0, maximum=num_layers - 1)
    return tuple((i + 1) % step == 0 and i not in dense for i in range(num_layers))


def read_gguf_experts(
    config: ConfigReader,
    num_layers: int,
    *,
    scoring: Scoring = "softmax",
    is_normalized: bool = True,
    is_width_shared: bool = False,
) -> MoeConfig:
    """The mixture of GGUF metadata, in all layers; what routing is where the file is silent.

    A file may leave out the width of an expert: it is `feed_forward_length`, which in some families
    the experts chosen share out among them.
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
    return MoeConfig(routing, width, layers=(True,) * num_layers)


def _num_experts(config: ConfigReader, default: int) -> int:
    """Under either of its two names, or under both alike."""
    names = [name for name in ("num_experts", "num_local_experts") if config.has(name)]
    counts = {config.integer(name, maximum=MAX_EXPERTS) for name in names} or {default}
    if len(counts) > 1:
        raise config.error("num_experts", "the same number as num_local_experts")
    return counts.pop()
