"""EXAONE 4.0: norms after attention and MLP, normed heads; only layers with windows rotate.

Every fourth layer of models with windows has neither a window nor a rotation. All layers of models
without windows rotate. Options and names are those of `exaone4` in transformers.
"""

from dataclasses import replace

from ..rope_config import NoRope
from .config_reader import ConfigReader
from .family import Family, Options
from .rope_options import read_rope
from .windows import windows_by_pattern

_PERIOD, _WINDOW = 4, 4096
_OPTIONS = Options(qk_norm="head", norm_placement="after")


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    if config.is_null("sliding_window"):
        config.ignore(("sliding_window_pattern",))
        return _OPTIONS
    windows = windows_by_pattern(config, num_layers, period=_PERIOD, default=_WINDOW)
    rope = read_rope(config)
    return replace(_OPTIONS, windows=windows, rope=NoRope(), local_rope=rope)


FAMILY = Family("exaone4", "Exaone4ForCausalLM", _hf_options)
