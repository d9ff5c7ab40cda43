"""Qwen2 and Qwen2.5: biases on queries, keys and values; optional windows in the last layers."""

from .config_reader import ConfigReader
from .family import Family, Options, fixed_options
from .windows import windows_if_used


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    return Options(windows=windows_if_used(config, num_layers), qkv_bias=True)


FAMILY = Family("qwen2", "Qwen2ForCausalLM", _hf_options, fixed_options(Options(qkv_bias=True)))
