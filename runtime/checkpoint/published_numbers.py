"""The numbers of a plan that keeps the weights of its model as they are published.

A plan has the formats of the checkpoint, so its graphs and the keys of its executables follow from
the plan alone. Reads headers of files only.
"""

from dataclasses import replace

from ...compile.plan import Numbers, published_table
from ...compile.weight_rules import KEPT
from ..errors import ModelNotFound
from .model_files import ModelFiles
from .published_formats import by_pattern, published_formats


def keep_published(numbers: Numbers, files: ModelFiles) -> Numbers:
    """Numbers with the formats of the checkpoint, if its weights are kept as they are published.

    Raises:
      ValueError: No weight of the checkpoint is in codes, or the numbers have other formats.
    """
    if numbers.weights != KEPT:
        return numbers
    # a start from a bundle loads executables before flax
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
        raise ValueError(
            f"numbers.weights: expected a checkpoint with weights in codes, as {KEPT} keeps them, "
            f'got {files.name} without any. Set "float", or "int8" or "int4" to round weights.'
        )
    found = {pattern: published_table(form) for pattern, form in formats.items()}
    if numbers.published and numbers.published != found:
        raise ValueError(
            f"numbers.published: expected the formats of {files.name}, {found}, got "
            f"{numbers.published}. Plan again for this model, or remove the table."
        )
    return replace(numbers, published=found)
