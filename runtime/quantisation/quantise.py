"""Round the weights of a model to codes, layer by layer, and write them as a model directory.

Before they are rounded, weights may be rotated and smoothed; the model still computes the same
function. Guarantees: besides the residual stream of calibration rows, the host holds the float
weights of one layer and their codes, or one of the tables of tokens; rotations hold a weight twice.
GPTQ adds the Hessian of one product, of one expert in a sparse layer, and the inputs of the layer's
experts. The same weights stay in float as when weights are rounded while they load.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...compile.abstract_model import AbstractModel
from ...modelzoo.weights.weight_formats import SCALES, WeightFormat
from ..checkpoint import ModelFiles
from ..checkpoint.coverage import check_coverage
from ..checkpoint.formats.compressed_tensors import write_directory
from ..checkpoint.loader import read_parameter
from ..checkpoint.model_files import ModelStamp
from ..checkpoint.quantiser import dequantise
from ..errors import ConfigError, InvalidConfig
from .calibration import Calibration
from .published_form import Parameters, PublishedForm, pooling_files
from .rotation import Rotation
from .rounding import CLIP, GPTQ, MIN_TOKENS, NEAREST, round_weight
from .smoothing import smooth_layer

Say = Callable[[str], object]


@dataclass(frozen=True)
class QuantiseOptions:
    """A way to write weights in codes."""

    weight_format: WeightFormat
    """The format of weights."""
    method: str
    """A method of `rounding`."""
    rotates: bool = False
    """Whether the model is rotated first (`rotation`)."""
    smooths: bool = False
    """Whether the features that products read are balanced first (`smoothing`)."""
    dtype: str = "float32"
    """The dtype of scales and of weights in float."""

    def check(self, num_rows: int) -> None:
        """Check the method and its calibration rows; ConfigError says what is wrong."""
        method, weight_format = self.method, self.weight_format
        if (method == GPTQ or self.smooths) != bool(num_rows):
            raise ConfigError(
                f"--method {method}: expected calibration rows for {GPTQ} or --smooth, and none "
                f"otherwise, got {num_rows}. Give --calibration with --method {GPTQ} or --smooth, "
                f"and only then."
            )
        if method != NEAREST and not weight_format.codes.startswith("int"):
            raise ConfigError(
                f"--method {method}: expected {NEAREST} for {weight_format}, as other methods "
                f"round to integers, got {method}. Take --method {NEAREST}, or another format."
            )


def quantise(
    files: ModelFiles,
    folder: Path,
    options: QuantiseOptions,
    rows: Sequence[Sequence[int]] = (),
    *,
    stamp: ModelStamp | None = None,
    say: Say = lambda note: None,
) -> int:
    """Write a model with its weights in codes; returns the number of bytes of its tensors.

    Args:
      files: The model.
      folder: A new or empty folder.
      options: The format of weights, and the way to their codes.
      rows: Token ids of calibration rows, for `gptq` and `smooths`.
      stamp: The files as they were opened; by default as they are now.
      say: Called with lines about progress.

    Raises:
      CheckpointError: The model cannot be read, changes while it is read, or cannot be written in a
        published form.
      ValueError: A weight cannot have the format, or calibration rows are missing or unused.
    """
    options.check(len(rows))
    stamp, model = stamp or ModelStamp(files), _Model(files, options)
    form, paths = model.form, model.paths
    tensors = _checked(model.rounded(rows, say), stamp)
    return write_directory(folder, form.config, form.other_files, form.layout(paths), tensors)


def _checked(
    tensors: Iterator[tuple[str, np.ndarray]], stamp: ModelStamp
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors, and after the last one an error if a file of the model has changed."""
    yield from tensors
    stamp.check()


class _Model:
    """The weights of a model in float32, and the form in which it is written."""

    def __init__(self, files: ModelFiles, options: QuantiseOptions):
        self._files, self._options = files, options
        self._read, self._config = self._read_published, files.spec.config
        if options.rotates:
            if pooling_files(files):
                raise InvalidConfig(
                    f"--rotate: expected a model whose last states are read by its head alone, got "
                    f"a pooling ({files.spec.config.pooling}), whose vectors a rotation would "
                    f"change. Quantise it without --rotate."
                )
            rotation = Rotation(files.spec.config, self._read_published)
            self._read, self._config = rotation.read, rotation.config
        self.form = PublishedForm(files, options.weight_format, options.dtype, self._config)
        self._published = AbstractModel(files.spec.config).abstract_parameters(np.float32)
        check_coverage(files.spec, files.tensors, self._published)
        self._sources = {source.parameter: source for source in files.spec.sources}
        paths = AbstractModel(self._config).weights
        prefixes = [f"layers.{layer}." for layer in range(self._config.num_layers)]
        self._in_layers = [[x for x in paths if x.startswith(p)] for p in prefixes]
        self._others = [path for path in paths if not path.startswith("layers.")]
        self._has_enough_tokens: list[bool] = []

    @property
    def paths(self) -> list[str]:
        """The weights in the order in which they are written: those of layers, then the others."""
        return [path for paths in (*self._in_layers, self._others) for path in paths]

    def rounded(self, rows: Sequence[Sequence[int]], say: Say) -> Iterator[tuple[str, np.ndarray]]:
        """The published tensors, in the order of `paths`."""
        calibration = None
        if rows:
            table_VD = self._read("embedding.table")
            calibration = Calibration(self._config, rows, table_VD)
            say(f"calibration: {calibration.num_tokens} tokens of {len(rows)} rows")
            del table_VD
        for layer in range(len(self._in_layers)):
            yield from self._rounded_layer(layer, calibration)
            say(f"layer {layer + 1} of {len(self._in_layers)}")
        if num_few := self._has_enough_tokens.count(False):
            say(
                f"{num_few} of {len(self._has_enough_tokens)} inputs of products (those of each "
                f"expert count separately) had fewer calibration tokens than {MIN_TOKENS:.1%} of "
                f"their features: their weights are rounded by {CLIP}. Give more rows for {GPTQ}."
            )
        for path in self._others:
            yield from self.form.tensors(path, self._round(path, self._read(path))).items()

    def _rounded_layer(
        self, layer: int, calibration: Calibration | None
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors of a layer.

        With calibration, the products of the layer are rounded in their order, each with the
        Hessian of its input in the model that is rounded so far.
        """
        prefix = f"layers.{layer}."
        weights = {path.removeprefix(prefix): self._read(path) for path in self._in_layers[layer]}
        if calibration is not None and self._options.smooths:

            def mean_square(name: str) -> np.ndarray:
                squares = calibration.mean_square(layer, weights, name)
                return self._checked_squares(prefix + name, squares)

            weights = smooth_layer(weights, mean_square, self._config.norm_offset)
        rounded: dict[str, Parameters] = {}
        if calibration is not None and self._options.method == GPTQ:
            rounded = self._round_products(layer, weights, calibration)
            rounded |= self._round_experts(layer, weights, calibration)
        for name, weight in weights.items():
            if name not in rounded:
                rounded[name] = self._round(prefix + name, weight)
        if calibration is not None:
            values = {name: self._values(prefix + name, x) for name, x in rounded.items()}
            calibration.advance(layer, values)
        for name in weights:
            yield from self.form.tensors(prefix + name, rounded[name]).items()

    def _round_products(
        self, layer: int, weights: dict[str, np.ndarray], calibration: Calibration
    ) -> dict[str, Parameters]:
        """Round the products of a layer in their order, and set their weights to the new values."""
        prefix, rounded = f"layers.{layer}.", {}
        for names in calibration.layer(layer).products:
            # weights in float with the same input, such as routers, need no Hessian
            first = next((name for name in names if prefix + name in self.form.quantisations), None)
            if first is None:
                continue
            hessian_AA = None
            if self._has_tokens(prefix + first, weights[first], calibration.num_tokens):
                hessian_AA = calibration.hessian(layer, weights, first)
            for name in names:
                path = prefix + name
                rounded[name] = self._round(path, weights[name], hessian_AA)
                weights[name] = self._values(path, rounded[name])
        return rounded

    def _round_experts(
        self, layer: int, weights: Mapping[str, np.ndarray], calibration: Calibration
    ) -> dict[str, Parameters]:
        """Round the experts of a layer, each with the Hessians of its own tokens."""
        prefix, program = f"layers.{layer}.", calibration.layer(layer)
        if not program.experts:
            return {}
        gate_up, down = program.experts
        biases_EPF = weights.get(f"{gate_up}_bias")
        tokens = calibration.expert_tokens(layer, weights)
        parts: dict[str, list[Parameters]] = {gate_up: [], down: []}

        def round_one(name: str, expert: int, inputs_UA: np.ndarray) -> Parameters:
            path, weight, hessian_AA = prefix + name, weights[name][expert], None
            if self._has_tokens(path, weight, len(inputs_UA)):
                hessian_AA = inputs_UA.T @ inputs_UA
            parts[name].append(self._round(path, weight, hessian_AA))
            return parts[name][-1]

        for expert in range(len(weights[down])):
            x_UD = tokens.inputs(expert)
            gate_up_PDF = self._values(prefix + gate_up, round_one(gate_up, expert, x_UD))
            bias_PF = None if biases_EPF is None else biases_EPF[expert]
            round_one(down, expert, program.expert_hidden(x_UD, gate_up_PDF, bias_PF))
        return {
            name: {key: np.stack([part[key] for part in of_experts]) for key in of_experts[0]}
            for name, of_experts in parts.items()
        }

    def _has_tokens(self, path: str, weight: np.ndarray, num_tokens: int) -> bool:
        """Whether enough tokens for GPTQ reach a weight, or one expert of it; keeps the answer."""
        num_inputs = self.form.quantisations[path].num_inputs(weight.shape)
        self._has_enough_tokens.append(num_tokens >= MIN_TOKENS * num_inputs)
        return self._has_enough_tokens[-1]

    def _round(
        self, path: str, weight: np.ndarray, hessian_AA: np.ndarray | None = None
    ) -> Parameters:
        """Codes and scales of a weight, or a weight in float in the dtype in which it is stored.

        Raises:
          InvalidConfig: The weight, or its Hessian, has other numbers than finite ones.
        """
        if not _is_finite(weight):
            raise InvalidConfig(
                f"{self._files.name}: {path}: expected finite weights after --smooth and --rotate, "
                f"got NaN or infinite ones, as the given weights are too large for float32. Leave "
                f"out these options."
            )
        if hessian_AA is not None:
            self._checked_squares(path, hessian_AA)
        quantisation = self.form.quantisations.get(path)
        if quantisation is None:
            return {path: weight.astype(self.form.abstract[path].dtype)}
        dtype = self.form.abstract[path + SCALES].dtype
        codes, scales = round_weight(weight, quantisation, dtype, self._options.method, hessian_AA)
        return {path: codes, path + SCALES: scales}

    def _checked_squares(self, path: str, squares: np.ndarray) -> np.ndarray:
        """The squares or the Hessian of the calibration features that a weight reads."""
        if not _is_finite(squares):
            raise InvalidConfig(
                f"{self._files.name}: {path}: expected calibration features with finite squares, "
                f"got features that are too large for float32. Quantise without --smooth, and by "
                f"another method than {GPTQ}."
            )
        return squares

    def _values(self, path: str, rounded: Parameters) -> np.ndarray:
        """The values of a weight that `_round` returned, in float32."""
        quantisation = self.form.quantisations.get(path)
        if quantisation is None:
            return rounded[path].astype(np.float32)
        return dequantise(rounded[path], rounded[path + SCALES], quantisation)

    def _read_published(self, path: str) -> np.ndarray:
        source, shape = self._sources[path], self._published[path].shape
        weight = read_parameter(source, self._files.tensors, None, shape, np.float32)
        # no code is NaN
        if not _is_finite(weight):
            raise InvalidConfig(
                f"{self._files.name}: {path}: expected finite weights, as codes are, got NaN or "
                f"infinite ones. Fetch the model again."
            )
        return weight


def _is_finite(array: np.ndarray) -> bool:
    """Whether all numbers are finite; the largest and the smallest are NaN if one is."""
    return bool(np.isfinite([array.max(), array.min()]).all())
