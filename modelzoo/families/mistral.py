"""Mistral: Llama blocks, with a sliding window in all layers if the file has one.

GGUF has no architecture for Mistral: GGUF files of Mistral models have the architecture `llama`.
"""

from .config_reader import ConfigReader
from .family import Family, Options
from .rope_options import MAX_POSITION


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    window = None
    if config.has("sliding_window"):
        window = config.integer("sliding_window", maximum=MAX_POSITION)
    elif not config.is_null("sliding_window"):
        # the reference would use 4096, but later releases have no window
        raise config.error("sliding_window", "a size, or null for no window")
    return Options(windows=(window,) * num_layers)


FAMILY = Family("mistral", "MistralForCausalLM", _hf_options, gguf_architecture="llama")
