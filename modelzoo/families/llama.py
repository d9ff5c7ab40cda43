"""Llama 2, 3, 3.1, 3.2 and what shares their architecture, SmolLM2 among them.

GGUF files of Mistral models carry this architecture too, some with a window.
"""

from .config_reader import ConfigReader
from .family import Family, Options
from .rope_options import MAX_POSITION


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    has_bias = config.flag("attention_bias", default=False)
    return Options(
        windows=(None,) * num_layers,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=config.flag("mlp_bias", default=False),
    )


def _gguf_options(config: ConfigReader, num_layers: int) -> Options:
    window = config.integer("attention.sliding_window", minimum=0, maximum=MAX_POSITION, default=0)
    return Options(windows=(window or None,) * num_layers)


FAMILY = Family("llama", "LlamaForCausalLM", _hf_options, _gguf_options, gguf_interleaved=True)
