"""Command A, Command R7B and Tiny Aya: Cohere where only layers with windows rotate.

Every fourth layer sees all tokens, and has no position encoding. Options and names are those of
`cohere2` in transformers.
"""

from dataclasses import replace

from ..rope_config import NoRope
from .cohere import hf_options
from .config_reader import ConfigReader
from .family import Family, Options
from .rope_options import read_rope
from .windows import windows_by_pattern

_PERIOD, _WINDOW = 4, 4096


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    config.expect("use_qk_norm", False)
    return replace(
        hf_options(config, num_layers),
        windows=windows_by_pattern(config, num_layers, period=_PERIOD, default=_WINDOW),
        rope=NoRope(),
        local_rope=read_rope(config),
    )


FAMILY = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    _hf_options,
    hf_defaults={"tie_word_embeddings": True},
    hf_names={"is_interleaved": True},
)
