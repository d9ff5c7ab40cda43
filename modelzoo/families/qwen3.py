"""Qwen3, dense: query and key heads are normed before the rotation; heads need not be D / N."""

from .config_reader import ConfigReader
from .family import Family, Options
from .hugging_face import latter_layers_windowed


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    has_bias = config.flag("attention_bias", default=False)
    config.expect("use_qk_norm", True)
    return Options(
        windows=latter_layers_windowed(config, num_layers),
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=True,
    )


def _gguf_options(config: ConfigReader, num_layers: int) -> Options:
    del config
    return Options(windows=(None,) * num_layers, qk_norm=True)


FAMILY = Family("qwen3", "Qwen3ForCausalLM", _hf_options, _gguf_options, {"head_dim": 128})
