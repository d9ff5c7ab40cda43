"""OLMo 2: norms after attention and MLP instead of before; joint norms of all query or key heads.

Source: "2 OLMo 2 Furious" (2501.00656), section 3.2.
"""

from .config_reader import ConfigReader
from .family import Family, Options, fixed_options

OPTIONS = Options(qk_norm="projection", norm_placement="after")


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    del num_layers
    return OPTIONS.with_biases(config)


FAMILY = Family("olmo2", "Olmo2ForCausalLM", _hf_options, fixed_options(OPTIONS))
