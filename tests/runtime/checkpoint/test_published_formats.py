"""Published formats: values are those of the formats' documents, and damage is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from published_formats import ACT_ORDER, FORMATS, write_model
from safetensors.numpy import save_file
from tiny_llama import CONFIG, random_tensors, save

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.families.config_reader import ConfigReader
from noria.modelzoo.families.quantisation import read_quantisation
from noria.runtime.checkpoint import load_params, open_model
from noria.runtime.checkpoint.formats.dequantised_tensors import DequantisedTensors, dequantise
from noria.runtime.checkpoint.formats.safetensors import SafetensorsDirectory
from noria.runtime.errors import CheckpointMismatch, InvalidQuantisation

LLAMA = CONFIG | {"hidden_size": 32, "intermediate_size": 48}
RNG = np.random.default_rng(0)
COMPRESSED = [form for form in FORMATS if form.name.startswith("compressed")]
FORMS = pytest.mark.parametrize("form", (*FORMATS, ACT_ORDER), ids=lambda form: form.name)


def opened(path, form, stored) -> DequantisedTensors:
    save_file(stored, path / "model.safetensors")
    config = ConfigReader({"quantization_config": form.config})
    source = dequantise(SafetensorsDirectory(path), read_quantisation(config))
    assert isinstance(source, DequantisedTensors)
    return source


@FORMS
def test_values_are_codes_less_zero_points_times_scales(tmp_path, form):
    stored, values = form.write("a.weight", RNG.normal(size=(40, 64)).astype(np.float32))
    source = opened(tmp_path, form, stored | {"norm.weight": np.ones(4, np.float32)})
    assert source.tensors.keys() == {"a.weight", "norm.weight"}
    assert source.tensors["a.weight"].shape == (40, 64)
    np.testing.assert_array_equal(source.read("a.weight"), values)


@FORMS
def test_any_box_is_that_of_the_whole(tmp_path, form):
    stored, values = form.write("a.weight", RNG.normal(size=(40, 64)).astype(np.float32))
    source = opened(tmp_path, form, stored)
    for _ in range(20):
        rows, columns = (sorted(RNG.integers(0, size + 1, 2)) for size in values.shape)
        index = slice(*map(int, rows)), slice(*map(int, columns))
        np.testing.assert_array_equal(source.read("a.weight", index), values[index])


@FORMS
def test_an_array_of_another_shape_is_refused_by_name(tmp_path, form):
    stored, _ = form.write("a.weight", RNG.normal(size=(40, 64)).astype(np.float32))
    (scales,) = (name for name in stored if "scale" in name)
    stored[scales] = np.concatenate([stored[scales]] * 3)
    with pytest.raises(InvalidQuantisation, match=f"{scales}: expected shape .*for codes of"):
        opened(tmp_path, form, stored)


@FORMS
def test_a_missing_array_is_refused_by_name(tmp_path, form):
    stored, _ = form.write("a.weight", RNG.normal(size=(40, 64)).astype(np.float32))
    optional = (
        ("_shape", "_zero_point") if form is ACT_ORDER else ("_shape", "_zero_point", "g_idx")
    )
    for missing in stored:
        if missing.endswith(optional):
            continue
        others = {name: array for name, array in stored.items() if name != missing}
        with pytest.raises(InvalidQuantisation, match=r"a\.(weight|g_idx).*expected"):
            opened(tmp_path, form, others)


@pytest.mark.parametrize(
    ("read", "written"),
    [
        ("GPTQ without zero points", "GPTQ of 4 bits"),
        ("compressed int4 in groups", "compressed int4 with zero points"),
    ],
)
def test_zero_points_that_a_symmetric_format_cannot_have_are_refused(tmp_path, read, written):
    (symmetric,) = (form for form in FORMATS if form.name == read)
    (other,) = (form for form in FORMATS if form.name == written)
    stored, _ = other.write("a.weight", RNG.normal(size=(40, 64)).astype(np.float32))
    source = opened(tmp_path, symmetric, stored)
    # a plan that keeps codes reads their scales
    for tensors in (source, source.part("scales")):
        with pytest.raises(InvalidQuantisation, match=r"a\.weight: expected equal zero points"):
            tensors.read("a.weight")


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_that_a_file_leaves_out_are_zeros(tmp_path, bits):
    written = {4: "compressed int4 in groups", 8: "compressed int8 by channel"}[bits]
    read = {4: "compressed int4 with zero points", 8: "compressed int8 with zero points"}[bits]
    (form,) = (form for form in FORMATS if form.name == written)
    (other,) = (form for form in FORMATS if form.name == read)
    stored, values = form.write("a.weight", RNG.normal(size=(40, 64)).astype(np.float32))
    np.testing.assert_array_equal(opened(tmp_path, other, stored).read("a.weight"), values)


def test_a_group_that_does_not_exist_is_refused_by_name(tmp_path):
    stored, _ = ACT_ORDER.write("a.weight", RNG.normal(size=(40, 64)).astype(np.float32))
    stored["a.g_idx"][3] = 4
    source = opened(tmp_path, ACT_ORDER, stored)
    with pytest.raises(InvalidQuantisation, match=r"a.weight: expected groups below 4"):
        source.read("a.weight")


def test_scales_of_activations_are_not_read(tmp_path):
    (form,) = (form for form in FORMATS if form.name == "compressed float8 by tensor")
    stored, _ = form.write("a.weight", RNG.normal(size=(40, 64)).astype(np.float32))
    names = ("a.input_scale", "attn.k_scale", "attn.v_scale")
    others = {name: np.ones(1, np.float32) for name in names}
    assert opened(tmp_path, form, stored | others).tensors.keys() == {"a.weight"}


SPECS = {
    "qkv": PartitionSpec(None, "tensor"),
    "output": PartitionSpec("tensor"),
    "gate_up": PartitionSpec(None, None, "tensor"),
    "down": PartitionSpec("tensor"),
}


def load(path):
    """Load a model in float32 on two devices."""
    with open_model(path) as model:
        abstract = AbstractModel(model.spec.config).abstract_parameters(jnp.float32)
        mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
        shardings = {
            name: NamedSharding(mesh, SPECS.get(name.split(".")[-1], PartitionSpec()))
            for name in abstract
        }
        return load_params(model.spec, model.tensors, abstract, shardings)


def saved(path, form, others=()):
    written = write_model(random_tensors(LLAMA), form)
    config = LLAMA | {"quantization_config": form.config}
    return save(path, config, written.stored | dict(others)), written.numbers


@FORMS
def test_a_model_loads_as_the_same_numbers_written_out(tmp_path, form):
    coded, numbers = saved(tmp_path / "coded", form)
    params = load(coded)
    for name, value in load(save(tmp_path / "plain", LLAMA, numbers)).items():
        np.testing.assert_array_equal(params[name], value)


def test_a_bias_beside_codes_that_no_parameter_uses_must_be_zeros(tmp_path):
    (form,) = (form for form in FORMATS if form.name == "GPTQ of 4 bits")
    name = "model.layers.0.mlp.down_proj.bias"
    coded, _ = saved(tmp_path / "zeros", form, {name: np.zeros(32, np.float16)})
    assert load(coded)
    coded, _ = saved(tmp_path / "ones", form, {name: np.ones(32, np.float16)})
    with pytest.raises(CheckpointMismatch, match=f"that no parameter uses .1.:\n    {name}"):
        load(coded)


@pytest.mark.reference
@pytest.mark.parametrize("form", COMPRESSED, ids=lambda form: form.name)
def test_files_of_the_package_compressed_tensors_read_as_the_package_reads_them(tmp_path, form):
    """The package computes in the dtype of its scales."""
    torch = pytest.importorskip("torch")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    (scheme,) = form.config["config_groups"].values()
    args = quantization.QuantizationArgs(**scheme["weights"])
    stored, _ = form.write("a.weight", RNG.normal(size=(48, 64)).astype(np.float32))
    source = opened(tmp_path, form, stored)

    def tensor(suffix):
        array = stored.get(f"a.weight{suffix}")
        if array is None or array.dtype.kind in "iu":
            return None if array is None else torch.from_numpy(array)
        if array.dtype.itemsize == 1:
            return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
        dtype = torch.float32 if array.dtype == np.float32 else torch.bfloat16
        return torch.from_numpy(array.astype(np.float32)).to(dtype)

    scales, zeros = tensor("_scale"), tensor("_zero_point")
    codes = tensor("_packed")
    if codes is None:
        codes = tensor("")
    else:
        codes = packing.unpack_from_int32(codes, args.num_bits, (48, 64))
        if zeros is not None:
            shape = (48, scales.shape[-1])
            zeros = packing.unpack_from_int32(zeros, args.num_bits, shape, packed_dim=0)
    wanted = forward.dequantize(codes, scales, zeros, args)
    got = torch.from_numpy(source.read("a.weight").copy()).to(scales.dtype)
    np.testing.assert_array_equal(got.float().numpy(), wanted.float().numpy())
