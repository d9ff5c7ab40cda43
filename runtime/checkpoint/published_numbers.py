"""The numbers of a plan that keeps the weights of its model as they are published.

A plan has the formats of the checkpoint, so its graphs and the keys of its executables follow from
the plan alone. Reads headers of files only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...compile.plan import Numbers, published_table
from ...compile.weight_rules import KEPT
from ..errors import ModelNotFound, UserError
from ..files.run_config import apply_overrides
from .formats.published_formats import by_pattern, published_formats
from .model_files import ModelFiles


def override_plan(table: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The table of a plan, changed by overrides.

    A changed plan loses its evidence, which was of another plan. A plan that no longer keeps
    published weights loses the formats of its checkpoint, too.
    """
    changed = apply_overrides(table, overrides)
    if overrides:
        changed.pop("evidence", None)
    before, numbers = table.get("numbers"), changed.get("numbers")
    if not isinstance(before, Mapping) or not isinstance(numbers, dict):
        return changed
    if before.get("weights") == KEPT != numbers.get("weights"):
        numbers.pop("published", None)
    return changed


def overridden_numbers(numbers: Numbers, overrides: Sequence[str]) -> Numbers:
    """The numbers of a plan, changed by the user's overrides of any keys of the plan."""
    table = override_plan({"numbers": numbers.to_table()}, overrides)["numbers"]
    return Numbers.from_table(table)


def keep_published(numbers: Numbers, files: ModelFiles) -> Numbers:
    """Numbers with the formats of the checkpoint, if its weights are kept as they are published.

    Raises:
      ValueError: No weight of the checkpoint is in codes, or the numbers have other formats.
    """
    if numbers.weights != KEPT:
        return numbers
    # imported here, as a start from a bundle loads executables before it imports flax
    from ...compile.abstract_model import AbstractModel

    weights = AbstractModel(files.spec.config).weights
    try:
        tensors = files.tensors
    except ModelNotFound:
        if not numbers.published:
            raise
        # a plan may be compiled where the weights are not
        return numbers
    formats = by_pattern(published_formats(files.spec, tensors, weights), weights)
    if not formats:
        raise UserError(
            f"numbers.weights: expected a checkpoint with weights in codes, as {KEPT} keeps them, "
            f'got {files.name} without any. Set "float", or "int8" or "int4" to round weights.'
        )
    found = {pattern: published_table(form) for pattern, form in formats.items()}
    if numbers.published and numbers.published != found:
        raise UserError(
            f"numbers.published: expected the formats of {files.name}, {found}, got "
            f"{numbers.published}. Plan again for this model, or remove the table."
        )
    return replace(numbers, published=found)
