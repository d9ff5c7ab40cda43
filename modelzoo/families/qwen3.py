"""Qwen3, dense: query and key heads are normed before rotation; the head size is independent."""

from .config_reader import ConfigReader
from .family import Family, Options, fixed_options
from .windows import windows_if_used


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    config.expect("use_qk_norm", True)
    windows = windows_if_used(config, num_layers)
    return Options(windows=windows, qk_norm="head").with_biases(config)


FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    _hf_options,
    fixed_options(Options(qk_norm="head")),
    {"head_dim": 128},
)
