"""Qwen2 and Qwen2.5: biases on queries, keys and values; the latter layers may slide a window."""

from .config_reader import ConfigReader
from .family import Family, Options, always
from .hugging_face import latter_layers_windowed


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    return Options(windows=latter_layers_windowed(config, num_layers), qkv_bias=True)


FAMILY = Family("qwen2", "Qwen2ForCausalLM", _hf_options, always(Options(qkv_bias=True)))
