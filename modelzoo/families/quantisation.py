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


@dataclass(frozen=True)
class Gptq:
    """Integers with a scale and a zero point for each group of inputs and each output.

    Source: "GPTQ" (2210.17323), in the files that AutoGPTQ and GPTQModel write.
    """

    bits: int
    group: int
    """The input features of a group; 0 if all inputs of an output share a scale."""
    is_symmetric: bool
    """Whether all zero points are half of the range."""
    is_ordered: bool
    """Whether groups have input features in the order of their activations (act-order)."""
    zero_bias: int
    """The number to add to a stored zero point: 1 in the first version of the format."""


@dataclass(frozen=True)
class Awq:
    """4-bit integers with a scale and a zero point for each group of inputs and each output.

    Source: "AWQ" (2306.00978), in the files that AutoAWQ writes for its kernel `gemm`.
    """

    group: int
    """The input features of a group; 0 if all inputs of an output share a scale."""


@dataclass(frozen=True)
class CompressedTensors:
    """Integers or 8-bit floats in the files of the package `compressed-tensors`.

    If `block` is None, the shape of the scales says whether a row or the whole matrix shares one.
    """

    bits: int
    is_float: bool
    is_symmetric: bool
    is_packed: bool
    """Whether several codes share a word of 32 bits."""
    block: tuple[int, int] | None
    """The outputs and inputs that share a scale: `(1, group)` for groups, two sizes for blocks of
    both axes, and None if a whole row or matrix shares a scale."""


Quantisation = BlockFloat8 | Mxfp4 | Gptq | Awq | CompressedTensors

# Lists of modules, and options of transformers for saving and loading.
_IGNORED_KEYS = ("modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize")
# About calibration, files, and the kernels of other programs.
_IGNORED_GPTQ_KEYS = (
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
    "damp_auto_increment", "damp_percent", "dataset", "disable_exllama", "exllama_config",
    "lm_head", "max_input_length", "meta", "method", "model_file_base_name", "mse",
    "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "pad_token_id", "quantizer", "static_groups", "tokenizer",
    "true_sequential", "use_cuda_fp16", "use_exllama",
)  # fmt: skip
_IGNORED_AWQ_KEYS = (
    "backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse",
)  # fmt: skip
# Activations and caches are not quantised here.
_IGNORED_COMPRESSED_KEYS = (
    "global_compression_ratio", "ignore", "kv_cache_scheme", "quantization_status",
    "run_compressed", "version",
)  # fmt: skip
_IGNORED_SCHEME_KEYS = ("input_activations", "output_activations", "targets")
_IGNORED_WEIGHT_KEYS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_DENSE = "dense"
"""The format of weights whose zeros are stored as other numbers are."""
_COMPRESSED_LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def read_quantisation(config: ConfigReader) -> Quantisation | None:
    """Read `quantization_config`; None if weights are not quantised. Null keys count as absent."""
    if not config.has("quantization_config"):
        return None
    table = config.table("quantization_config").without_nulls()
    read = _METHODS.get(table.text("quant_method"))
    if read is None:
        known = " or ".join(_METHODS)
        raise table.error("quant_method", f"{known}, the implemented ones{REMEDY}")
    quantisation = read(table)
    table.ignore(_IGNORED_KEYS)
    table.refuse_rest()
    return quantisation


def _block_float8(table: ConfigReader) -> BlockFloat8:
    # two names of the same format
    if table.has("fmt") and table.text("fmt") not in ("e4m3", "float8_e4m3fn"):
        raise table.error("fmt", f"'e4m3', the only one implemented{REMEDY}")
    # only weights are quantised here; a static scheme has scales of activations, too
    table.expect("activation_scheme", "dynamic", REMEDY)
    table.expect("expert_dtype", "fp8", REMEDY)
    table.ignore(("scale_fmt",))  # the rounding of scales, which tensors already have
    if not table.has("weight_block_size"):
        raise table.error("weight_block_size", f"a list of two integers{REMEDY}")
    return BlockFloat8(*table.integers("weight_block_size", count=2, maximum=MAX_BLOCK))


def _gptq(table: ConfigReader) -> Gptq:
    bits = table.integer("bits", maximum=32)
    if bits not in (4, 8):
        raise table.error("bits", f"4 or 8, the implemented ones{REMEDY}")
    versions = {"gptq": 1, "gptq_v2": 0}
    version = table.text("checkpoint_format", default=table.text("format", default="gptq"))
    if version not in versions:
        raise table.error("checkpoint_format", f"{' or '.join(versions)}{REMEDY}")
    table.expect("is_marlin_format", False, REMEDY)
    table.expect("pack_dtype", "int32", REMEDY)
    modules = table.table("dynamic")
    modules.ignore_beginning("-:")  # modules without codes; others have other bits or groups
    modules.refuse_rest()
    table.ignore(_IGNORED_GPTQ_KEYS)
    return Gptq(
        bits,
        _group(table, "group_size"),
        table.flag("sym", default=True),
        table.flag("desc_act", default=False),
        versions[version],
    )


def _awq(table: ConfigReader) -> Awq:
    table.expect("bits", 4, REMEDY)
    table.expect("zero_point", True, REMEDY)
    version = table.text("version", default="gemm")
    if version.lower() != "gemm":
        raise table.error("version", f"gemm, the implemented one{REMEDY}")
    table.ignore(_IGNORED_AWQ_KEYS)
    return Awq(_group(table, "group_size"))


def _group(table: ConfigReader, key: str) -> int:
    """The published size of a group; 0 if it is -1, which means all input features."""
    group = table.integer(key, minimum=-1, maximum=MAX_BLOCK)
    if group == 0:
        raise table.error(key, "a size, or -1 for all input features")
    return max(group, 0)


def _compressed_tensors(table: ConfigReader) -> CompressedTensors | None:
    """Read config groups, which must agree on the format of weights; None without groups."""
    table.ignore(_IGNORED_COMPRESSED_KEYS)
    table.table("transform_config").refuse_rest()  # rotations of activations
    sparsity = table.table("sparsity_config")
    if sparsity.names() and sparsity.text("format", default="") != _DENSE:
        raise sparsity.error("format", f"{_DENSE}, the implemented one{REMEDY}")
    groups = table.table("config_groups")
    names = groups.names()
    if not names and table.text("format", default="") == _DENSE:
        return None
    layout = _layout(table, "")
    schemes = {_scheme(groups.table(name), layout) for name in names}
    if len(schemes) != 1:
        raise table.error("config_groups", f"one format for all weights{REMEDY}")
    return schemes.pop()


def _layout(table: ConfigReader, default: str) -> str:
    """The name of the way in which codes are stored; `default` if the table does not say."""
    layout = table.text("format", default=default)
    if layout and layout not in _COMPRESSED_LAYOUTS:
        raise table.error("format", f"{', '.join(_COMPRESSED_LAYOUTS)}{REMEDY}")
    return layout


def _scheme(scheme: ConfigReader, layout: str) -> CompressedTensors:
    """Read one group of modules; its activations are not quantised here."""
    layout = _layout(scheme, layout)
    weights = scheme.table("weights")
    bits = weights.integer("num_bits", maximum=32)
    is_float = weights.text("type", default="int") == "float"
    if bits not in ((8,) if is_float else (4, 8)):
        raise weights.error("num_bits", f"8, or 4 for integers{REMEDY}")
    if not is_float:
        weights.expect("type", "int", REMEDY)
    elif layout == "pack-quantized":
        raise weights.error("type", f"int, as the format is pack-quantized{REMEDY}")
    weights.expect("dynamic", False, REMEDY)
    is_symmetric = weights.flag("symmetric", default=True)
    strategy = weights.text("strategy", default="")
    block = None
    if weights.has("group_size") and (group := _group(weights, "group_size")):
        block = (1, group)
    if strategy == "block":
        rows, columns = weights.integers("block_structure", count=2, maximum=MAX_BLOCK)
        block = (rows, columns)
    elif strategy not in ("", "tensor", "channel", "group"):
        raise weights.error("strategy", f"tensor, channel, group or block{REMEDY}")
    # the order of activations is stored in the tensors, or only calibration used it
    weights.ignore(("actorder", "block_structure", *_IGNORED_WEIGHT_KEYS))
    weights.refuse_rest()
    scheme.ignore(_IGNORED_SCHEME_KEYS)
    scheme.refuse_rest()
    is_packed = layout == "pack-quantized" or (not layout and bits < 8)
    return CompressedTensors(bits, is_float, is_symmetric, is_packed, block)


_METHODS: Mapping[str, Callable[[ConfigReader], Quantisation | None]] = {
    "fp8": _block_float8,
    "mxfp4": lambda table: Mxfp4(),
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
}
