"""How weights are quantised, as the `quantization_config` of a config.json publishes it.

Data alone: which tensors hold what, and the arithmetic, are known to whoever reads them. Which
modules are quantised is not read here, as the tensors show it by their scales. Guarantees: a method
or an option that would change the values is understood, or refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .config_reader import ConfigReader

MAX_BLOCK = 2**16
REMEDY = "; convert the model to plain weights first"


@dataclass(frozen=True)
class BlockFloat8:
    """Matrices of eight-bit floats (e4m3), with one scale for each block of rows and columns.

    Source: "DeepSeek-V3 Technical Report" (2412.19437), section 3.3, and the README_WEIGHTS.md of
    its release.
    """

    rows: int
    columns: int


@dataclass(frozen=True)
class Mxfp4:
    """Experts of four-bit floats (e2m1), with a power of two for each 32 along their inputs.

    Source: "OCP Microscaling Formats (MX) Specification", version 1.0, as GPT-OSS publishes them.
    """


Quantisation = BlockFloat8 | Mxfp4

# Lists of modules, and what transformers did or would do when it saves or loads.
_IGNORED_KEYS = ("modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize")


def read_quantisation(config: ConfigReader) -> Quantisation | None:
    """Read `quantization_config`; None where weights are plain."""
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
    # Weights alone are read as they were quantised; a static scheme has scales of activations too
    table.expect("activation_scheme", "dynamic", REMEDY)
    table.expect("expert_dtype", "fp8", REMEDY)
    table.ignore(("scale_fmt",))  # how scales were rounded; their tensors hold the outcome
    if not table.has("weight_block_size"):
        raise table.error("weight_block_size", f"a list of two integers{REMEDY}")
    return BlockFloat8(*table.integers("weight_block_size", count=2, maximum=MAX_BLOCK))


_METHODS: Mapping[str, Callable[[ConfigReader], Quantisation]] = {
    "fp8": _block_float8,
    "mxfp4": lambda table: Mxfp4(),
}
