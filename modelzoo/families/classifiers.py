"""Heads of models for sequence classification: their labels, layers and scores, as data.

Knows nothing of files.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..pooling_config import Pooling, PoolingKind, Projection, ScoreActivation
from .config_reader import ConfigReader

MAX_LABELS = 2**16
_PROBLEMS: dict[str, ScoreActivation] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}
_FUNCTIONS: dict[str, ScoreActivation] = {"Sigmoid": "sigmoid", "Identity": "none"}
"""Functions of sentence-transformers, by the name of their class."""


@dataclass(frozen=True)
class Classifier:
    """The head of a family's models for sequence classification."""

    dense: tuple[str, ...]
    """The tensor names of its dense layers, in order."""
    layers: Callable[[ConfigReader, int], tuple[Projection, ...]]
    """A function from a configuration and the size of states to the layers before the last one."""
    kind: Callable[[ConfigReader], PoolingKind] = lambda config: "first"
    """The pooling, by the configuration."""
    norm: str = ""
    """The tensor name of a norm after a layer."""
    has_bias: bool = True
    """Whether the last layer has a bias."""

    def pooling(self, config: ConfigReader, embed: int) -> Pooling:
        """The pooling, the layers and the labels of a model.

        Args:
          config: The table of config.json.
          embed: The size of states.

        Raises:
          UnsupportedModel: A value is malformed.
        """
        labels = _labels(config)
        last = Projection(len(labels), has_bias=self.has_bias)
        layers = (*self.layers(config, embed), last)
        scores = _scores(config, len(labels))
        return Pooling(self.kind(config), layers, labels=labels, scores=scores)


LAST_STATE = Classifier(("score",), lambda config, embed: (), lambda config: "last", has_bias=False)
"""The head of decoders: one product with the state of the last token."""


def _labels(config: ConfigReader) -> tuple[str, ...]:
    """The names of the classes; without names there are two, as in the reference."""
    table = config.table("id2label")
    if not table.names():
        count = config.integer("num_labels", maximum=MAX_LABELS, default=2)
        return tuple(f"LABEL_{i}" for i in range(count))
    ids = [str(name) for name in table.names()]
    if sorted(ids) != sorted(map(str, range(len(ids)))):
        raise config.error("id2label", f"names of the ids from 0 to {len(ids) - 1}")
    found = dict(zip(ids, table.names(), strict=True))
    return tuple(table.text(found[str(i)]) for i in range(len(ids)))


def _scores(config: ConfigReader, num_labels: int) -> ScoreActivation:
    """The function for scores: that of sentence-transformers, that of the problem, or the usual."""
    own = config.table("sentence_transformers")
    for table, key in ((own, "activation_fn"), (config, "sbert_ce_default_activation_function")):
        if table.has(key):
            name = table.text(key).rpartition(".")[2]
            if name not in _FUNCTIONS:
                raise table.error(key, f"one of {', '.join(_FUNCTIONS)}, the only ones implemented")
            return _FUNCTIONS[name]
    if config.has("problem_type"):
        problem = config.text("problem_type")
        if problem not in _PROBLEMS:
            raise config.error("problem_type", f"one of {', '.join(_PROBLEMS)}")
        return _PROBLEMS[problem]
    return "sigmoid" if num_labels == 1 else "softmax"
