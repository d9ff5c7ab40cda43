"""Mistral: Llama blocks, with a sliding window in all layers if the file has one.

GGUF has no architecture for Mistral: GGUF files of Mistral models have the architecture `llama`.
"""

from .config_reader import ConfigReader
from .family import Family, Options
from .rope_options import read_growing_rope
from .windows import read_window, windows_by_kind


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    if not config.has("sliding_window") and not config.is_null("sliding_window"):
        # the reference would use 4096, but later releases have no window
        raise config.error("sliding_window", "a size, or null for no window")
    return Options(windows=(read_window(config),) * num_layers)


def _ministral_options(config: ConfigReader, num_layers: int) -> Options:
    if not config.has("layer_types"):
        return _hf_options(config, num_layers)
    return Options(windows=windows_by_kind(config, num_layers, read_window(config)))


def _ministral3_options(config: ConfigReader, num_layers: int) -> Options:
    return Options(windows=(read_window(config),) * num_layers, rope=read_growing_rope(config))


FAMILY = Family("mistral", "MistralForCausalLM", _hf_options, gguf_architecture="llama")
MINISTRAL = Family(
    "ministral",
    "MinistralForCausalLM",
    _ministral_options,
    hf_defaults={"sliding_window": 4096},
)
"""Ministral 8B: Mistral with a window in some layers."""
MINISTRAL_3 = Family(
    "ministral3", "Ministral3ForCausalLM", _ministral3_options, hf_defaults={"head_dim": 128}
)
"""Ministral 3 and Devstral 2: Mistral with a factor on queries that grows with the position."""
