"""Gemma and VaultGemma: the blocks of Gemma 2 with norms only before attention and MLP.

Options and names are those of `gemma` and `vaultgemma` in transformers.
"""

from dataclasses import replace

from .config_reader import ConfigReader
from .family import Family, Options
from .gemma2 import HF_DEFAULTS, HF_NAMES, hf_options, shared_hf_options


def _gemma_options(config: ConfigReader, num_layers: int) -> Options:
    # old files say gelu without hidden_activation, and mean its approximation
    for key, also in (("hidden_act", "gelu"), ("hidden_activation", "gelu_pytorch_tanh")):
        if config.has(key) and config.text(key) not in (also, "gelu_pytorch_tanh"):
            raise config.error(key, "'gelu_pytorch_tanh', the only one implemented")
    options = shared_hf_options(config, (None,) * num_layers)
    return replace(options, norm_placement="before")


def _vault_options(config: ConfigReader, num_layers: int) -> Options:
    return replace(hf_options(config, num_layers), norm_placement="before")


GEMMA = Family("gemma", "GemmaForCausalLM", _gemma_options, hf_defaults=HF_DEFAULTS)
"""Gemma: scaled embeddings, norms with offsets, the approximated GELU; no windows and no caps."""
VAULT_GEMMA = Family(
    "vaultgemma",
    "VaultGemmaForCausalLM",
    _vault_options,
    hf_defaults=HF_DEFAULTS,
    hf_names=HF_NAMES,
)
"""VaultGemma: Gemma 2 without its norms after attention and MLP."""
