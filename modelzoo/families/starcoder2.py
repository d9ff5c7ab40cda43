"""StarCoder2: layer norms with biases, an MLP without a gate, biases everywhere, a window.

Options and names are those of `starcoder2` in transformers.
"""

from .config_reader import ConfigReader
from .family import Family, Options
from .hugging_face import read_epsilon
from .windows import read_window

_MLP = "model.layers.{i}.mlp"


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    config.ignore(("residual_dropout", "embedding_dropout"))  # about training
    has_bias = config.flag("use_bias", default=True)
    return Options(
        windows=(read_window(config),) * num_layers,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
        norm="layer",
        norm_bias=True,
        norm_epsilon=read_epsilon(config, "norm_epsilon"),
        activation="gelu_tanh",
        is_gated=False,
    )


FAMILY = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    _hf_options,
    hf_defaults={"norm_epsilon": 1e-5, "tie_word_embeddings": True},
    hf_names={"up": f"{_MLP}.c_fc", "down": f"{_MLP}.c_proj"},
)
