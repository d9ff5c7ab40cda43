"""Phi-3, 3.5 and Phi-4-mini: fused tensors, and LongRoPE with two sets of factors.

The long models rotate with short factors if a sequence fits the length of pretraining. For a longer
sequence, they rotate all tokens with long factors, so the reference must discard its cache at this
length. A graph has only one set of factors. Here it is the short one, and the maximum length of a
sequence is the length of pretraining: every token is rotated as in the reference, and a longer
sequence is refused by name. If both sets are the same, there is no such limit.

Source: "LongRoPE" (2402.13753), and `modeling_rope_utils.py` of transformers for the factor on
cosines and sines.
"""

import math

from ..rope_config import FactorScaling, RopeConfig
from .config_reader import ConfigReader, UnsupportedModel
from .family import Family, Options
from .partial_rope import read_rotated
from .rope_options import DEFAULT_THETA, MAX_POSITION, ROPE_KEYS, read_kind, read_theta, rope_table
from .windows import read_window

_ORIGINAL = "original_max_position_embeddings"
_DEFAULT_ORIGINAL = 4096
_QKV = "model.layers.{i}.self_attn.qkv_proj"
_GATE_UP = "model.layers.{i}.mlp.gate_up_proj"
HF_NAMES = {"query": _QKV, "key": _QKV, "value": _QKV, "gate": _GATE_UP, "up": _GATE_UP}


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    windows = (read_window(config),) * num_layers
    for key, value in {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}.items():
        config.expect(key, value)
    config.ignore(("resid_pdrop", "embd_pdrop"))  # about training
    rope, max_length = _read_rope(config)
    return Options(windows=windows, rope=rope, max_position=max_length)


def _read_rope(config: ConfigReader) -> tuple[RopeConfig, int]:
    """Read the rotation, and the maximum length of a sequence for which it is valid."""
    max_position = config.integer("max_position_embeddings", maximum=MAX_POSITION)
    table = rope_table(config)
    theta = read_theta(config, table, "rope_theta", DEFAULT_THETA)
    rotated = read_rotated(config, table)
    kind, original = read_kind(table), _read_original(config, table)
    if kind == "default":
        table.ignore_rest(refused=ROPE_KEYS)
        return RopeConfig(theta, rotated=rotated), max_position
    if kind not in ("longrope", "su"):
        raise UnsupportedModel(
            f"{table.name('rope_type')}: expected default, longrope or su, got {kind!r}, which is "
            "not implemented."
        )
    short, long = (
        table.numbers(key, count=rotated // 2, above=0.0) for key in ("short_factor", "long_factor")
    )
    factor = table.number("factor", above=0.0, default=max_position / original)
    # LongRoPE, section 3.3: the factor that keeps the entropy of attention
    temperature = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    attention_factor = table.number("attention_factor", above=0.0, default=temperature)
    table.ignore_rest(refused=ROPE_KEYS)
    max_length = max_position if short == long else min(max_position, original)
    return RopeConfig(theta, FactorScaling(short, attention_factor), rotated), max_length


def _read_original(config: ConfigReader, table: ConfigReader) -> int:
    """Read the length of pretraining; it must be the same outside and inside the table."""
    original = config.integer(_ORIGINAL, minimum=2, maximum=MAX_POSITION, default=_DEFAULT_ORIGINAL)
    if table.has(_ORIGINAL):
        inner = table.integer(_ORIGINAL, minimum=2, maximum=MAX_POSITION)
        if inner != original:
            raise table.error(_ORIGINAL, f"the same value as the outer {_ORIGINAL} ({original})")
    return original


FAMILY = Family("phi3", "Phi3ForCausalLM", _hf_options, hf_names=HF_NAMES)
