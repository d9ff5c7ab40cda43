"""Llama 2, 3, 3.1, 3.2 and SmolLM2: grouped queries, rotary scaling of several kinds, biases.

GGUF files of Mistral and Mixtral models have this architecture, too. Some have a window, some have
experts.
"""

from .config_reader import ConfigReader
from .expert_options import read_gguf_experts
from .family import Family, Options
from .hugging_face import MAX_EXPERTS
from .rope_options import MAX_POSITION


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    del num_layers
    return Options(mlp_bias=config.flag("mlp_bias", default=False)).with_biases(config)


def _gguf_options(config: ConfigReader, num_layers: int) -> Options:
    window = config.integer("attention.sliding_window", minimum=0, maximum=MAX_POSITION, default=0)
    is_sparse = config.integer("expert_count", minimum=0, maximum=MAX_EXPERTS, default=0) > 0
    moe = read_gguf_experts(config) if is_sparse else None
    return Options(windows=(window or None,) * num_layers, moe=moe)


FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    _hf_options,
    _gguf_options,
    hf_defaults={"max_position_embeddings": 2048},
    gguf_interleaved=True,
)
