"""Qwen3, dense: query and key heads are normed before the rotation; heads need not be D / N."""

from .config_reader import ConfigReader
from .family import Family, Options, always
from .hugging_face import latter_layers_windowed


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    config.expect("use_qk_norm", True)
    windows = latter_layers_windowed(config, num_layers)
    return Options(windows, qk_norm=True).with_biases(config)


FAMILY = Family(
    "qwen3", "Qwen3ForCausalLM", _hf_options, always(Options(qk_norm=True)), {"head_dim": 128}
)
