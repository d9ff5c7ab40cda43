"""Quantisation of published weights, as `quantization_config` of config.json describes it.

The result is data; the loader knows the names of tensors and the arithmetic. The list of quantised
modules is not read, as a quantised tensor is recognised by its scales. Guarantees: a method or an
option that changes values is supported, or refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .config_reader import ConfigReader

MAX_BLOCK = 2**16
REMEDY = "; convert the model to plain weights first"


@dataclass(frozen=True)
class BlockFloat8:
    """8-bit floats (e4m3) with one scale for each block of rows and columns of a matrix.

    Source: "DeepSeek-V3 Technical Report" (2412.19437), section 3.3, and the README_WEIGHTS.md of
    its release.
    """

    rows: int
    columns: int


@dataclass(frozen=True)
class Mxfp4:
    """4-bit floats (e2m1) for experts, with a power of two as scale for 32 entries along inputs.

    Source: "OCP Microscaling Formats (MX) Specification", version 1.0, as GPT-OSS publishes them.
    """


Quantisation = BlockFloat8 | Mxfp4

# Lists of modules, and options of transformers for saving and loading.
_IGNORED_KEYS = ("modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize")


def read_quantisation(config: ConfigReader) -> Quantisation | None:
    """Read `quantization_config`; None if weights are not quantised."""
    if not config.has("quantization_config"):
        return None
    table = config.table("quantization_config")
    read = _METHODS.get(table.text("quant_method"))
    if read is None:
        known = " or ".join(_METHODS)
        raise table.error("quant_method", f"{known}, the implemented ones{REMEDY}")
    quantisation = read(table)
    table.ignore(_IGNORED_KEYS)
    table.refuse_rest()
    return quantisation


def _block_float8(table: ConfigReader) -> BlockFloat8:
    table.expect("fmt", "e4m3", REMEDY)
    # only weights are quantised here; a static scheme has scales of activations, too
    table.expect("activation_scheme", "dynamic", REMEDY)
    table.expect("expert_dtype", "fp8", REMEDY)
    table.ignore(("scale_fmt",))  # the rounding of scales, which tensors already have
    if not table.has("weight_block_size"):
        raise table.error("weight_block_size", f"a list of two integers{REMEDY}")
    return BlockFloat8(*table.integers("weight_block_size", count=2, maximum=MAX_BLOCK))


_METHODS: Mapping[str, Callable[[ConfigReader], Quantisation]] = {
    "fp8": _block_float8,
    "mxfp4": lambda table: Mxfp4(),
}
