"""The formats of a model's weights: one for all, and rules for parameters by path.

The last rule whose pattern matches a parameter decides. Some parameters are not quantised unless a
rule of the plan says so. Knows nothing of arrays.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..modelzoo.errors import UserError
from ..modelzoo.layer_groups import single_layer_names
from ..modelzoo.weights.weight_formats import Quantisation, WeightFormat, common_format

FLOAT = "float"
KEPT = "as_published"
"""The value of `numbers.weights` for weights in the codes of the checkpoint."""
FLOAT_BY_DEFAULT = ("embedding.table", "head.table", "*.router", "*.shared_gate")
"""Patterns of weights that stay in float unless a rule names them.

The table of embeddings is read by rows, so a call reads few of its bytes. Errors of the head change
the choice of the next token directly. Routers and gates are small, and a small error may choose
other experts. Norms and biases are no weights of products, and are never quantised.
"""
Rule = tuple[str, WeightFormat | None]
"""A pattern of parameter paths, and the format of what it matches; None for float."""


@dataclass(frozen=True)
class WeightRules:
    """The format of every weight of a model."""

    default: WeightFormat | None = None
    """The format of weights that no rule matches; None for float."""
    rules: tuple[Rule, ...] = ()
    """The rules of the plan."""
    published: tuple[Rule, ...] = ()
    """The published formats that the plan keeps, for weights that no rule matches."""
    rounds_activations: bool = False
    """Whether products with quantised weights round their activations to int8, too."""

    def quantisations(
        self, weights: Mapping[str, tuple[tuple[int, ...], tuple[int, ...] | None]]
    ) -> dict[str, Quantisation]:
        """The quantisation of each quantised weight.

        Args:
          weights: The shape and the inputs of each parameter; the inputs are None for parameters
            that are no weights of products, such as norms.

        Raises:
          ValueError: A rule matches nothing, or a weight cannot have its format.
        """
        names = [name for parameter in weights for name in single_layer_names(parameter)]
        patterns = [("rules", pattern) for pattern, _ in self.rules]
        patterns += [("published", pattern) for pattern, _ in self.published]
        for key, pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UserError(
                    f"numbers.{key} {pattern!r}: expected a pattern of parameter paths such as "
                    f"'layers.*.mlp.down', got one that matches no parameter of the model. "
                    f"Change or remove it."
                )
        found = {}
        for parameter, (shape, inputs) in weights.items():
            weight_format = self._of(parameter, is_weight=inputs is not None)
            if weight_format is not None:
                assert inputs is not None, "only weights are quantised"
                if self.rounds_activations:
                    _check_has_integers(parameter, weight_format)
                found[parameter] = Quantisation(weight_format, inputs, self.rounds_activations)
                _check_groups(parameter, found[parameter], shape)
        return found

    def _of(self, parameter: str, *, is_weight: bool) -> WeightFormat | None:
        """The format of a parameter, which may be that of several layers."""
        names = single_layer_names(parameter)
        formats = {self._of_layer(name, is_weight) for name in names}
        if self.published and not any(_matches(name, dict(self.rules)) for name in names):
            return common_format(formats)
        if len(formats) > 1:
            raise UserError(
                f"numbers.rules: with model.scan_layers, expected one format for {parameter}, got "
                f"{' and '.join(sorted(str(x or FLOAT) for x in formats))}. Write rules that hold "
                f"for all of these layers, or do not scan layers."
            )
        return formats.pop()

    def _of_layer(self, name: str, is_weight: bool) -> WeightFormat | None:
        matching = [rule for rule in self.rules if fnmatchcase(name, rule[0])]
        if matching:
            pattern, weight_format = matching[-1]
            if weight_format is not None and not is_weight:
                raise UserError(
                    f"numbers.rules {pattern!r}: expected to match weights of products, got "
                    f"{name}, which is always float. Write a narrower pattern."
                )
            return weight_format
        if self.published:
            kept = [x for pattern, x in self.published if fnmatchcase(name, pattern)]
            return kept[-1] if kept else None
        is_float = not is_weight or _matches(name, FLOAT_BY_DEFAULT)
        return None if is_float else self.default


ALL_FLOAT = WeightRules()


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_has_integers(parameter: str, weight_format: WeightFormat) -> None:
    """Check that products of a weight can multiply integers.

    An order of inputs is not checked, because only weights with groups have one.
    """
    form = weight_format
    if (form.codes, form.group, form.has_offsets) != ("int8", 0, False):
        raise UserError(
            f'numbers.activations: with "int8", expected int8 without groups and offsets, or '
            f"float, for {parameter}, got {form}. Write a rule for this parameter, or set "
            f"activations = {FLOAT!r}."
        )


def _check_groups(parameter: str, quantisation: Quantisation, shape: tuple[int, ...]) -> None:
    """Check that a weight has whole groups."""
    group, num_inputs = quantisation.format.group, quantisation.num_inputs(shape)
    if group and num_inputs % group:
        raise UserError(
            f"numbers.group: expected a divisor of the {num_inputs} input features of {parameter}, "
            f"got {group}. Take another group, or write a rule for this parameter."
        )
