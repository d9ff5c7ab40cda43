"""OLMo 2: norms after attention and MLP, none before; all query heads are normed as one, keys too.

Source: "2 OLMo 2 Furious" (2501.00656), section 3.2.
"""

from .config_reader import ConfigReader
from .family import Family, Options


def _options(num_layers: int, has_bias: bool) -> Options:
    return Options(
        windows=(None,) * num_layers,
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=True,
        qk_norm_kind="projection",
        norm_placement="after",
    )


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    return _options(num_layers, config.flag("attention_bias", default=False))


def _gguf_options(config: ConfigReader, num_layers: int) -> Options:
    del config
    return _options(num_layers, has_bias=False)


FAMILY = Family("olmo2", "Olmo2ForCausalLM", _hf_options, _gguf_options)
