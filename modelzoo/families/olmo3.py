"""OLMo 3 and FlexOLMo: the blocks of OLMo 2 with windows, or with experts.

Options and names are those of `olmo3` and `flex_olmo` in transformers.
"""

from dataclasses import replace

from .config_reader import ConfigReader
from .expert_options import read_experts
from .family import Family, Options
from .olmo2 import OPTIONS
from .rope_options import read_ropes_by_kind
from .windows import windows_except_every

_THETA = 500_000.0
_PERIOD, _WINDOW = 4, 4096


def _olmo3_options(config: ConfigReader, num_layers: int) -> Options:
    rope, local_rope = read_ropes_by_kind(config, _THETA)
    windows = windows_except_every(_PERIOD, config, num_layers, _WINDOW)
    options = replace(OPTIONS, windows=windows, rope=rope, local_rope=local_rope)
    return options.with_biases(config)


def _flex_options(config: ConfigReader, num_layers: int) -> Options:
    del num_layers
    moe = read_experts(config, num_experts=7, num_chosen=5, has_option=True)
    return replace(OPTIONS, moe=moe).with_biases(config)


OLMO_3 = Family("olmo3", "Olmo3ForCausalLM", _olmo3_options)
"""OLMo 3: OLMo 2 with a window in three of four layers; only the fourth scales positions."""
FLEX_OLMO = Family("flex_olmo", "FlexOlmoForCausalLM", _flex_options, hf_theta=_THETA)
"""FlexOLMo: OLMo 2 with the experts of OLMoE."""
