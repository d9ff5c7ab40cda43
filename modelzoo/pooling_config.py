"""Configuration of a pooled result: one vector for each text, as frozen dataclasses.

Knows nothing of files, texts or the computation.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from .config_values import check_choice
from .errors import UserError

PoolingKind = Literal["first", "last", "mean", "max"]
"""The states of a text that are pooled: its first or its last one, their mean, or their maximum."""
ScoreActivation = Literal["softmax", "sigmoid", "none"]
ProjectionActivation = Literal["none", "tanh", "relu", "gelu"]


@dataclass(frozen=True)
class Projection:
    """A dense layer over pooled vectors."""

    size: int
    """The number of its output features."""
    has_bias: bool = True
    activation: ProjectionActivation = "none"
    norm_epsilon: float | None = None
    """Epsilon of a layer norm after the activation; None means no norm."""
    has_norm_bias: bool = False

    def __post_init__(self):
        if not isinstance(self.size, int) or self.size < 1:
            raise UserError(f"pooling: expected a positive size, got {self.size!r}.")
        check_choice("pooling activation", self.activation, get_args(ProjectionActivation))


@dataclass(frozen=True)
class Pooling:
    """The pooling that makes one vector of the final hidden states of a text."""

    kind: PoolingKind = "mean"
    projections: tuple[Projection, ...] = ()
    """Dense layers over the pooled vector, in order."""
    normalises: bool = False
    """Whether vectors are divided by their length."""
    labels: tuple[str, ...] = ()
    """The names of the classes of a classifier; empty for embeddings."""
    scores: ScoreActivation = "softmax"
    """The function from the outputs of a classifier to its scores."""
    prompt: str = ""
    """The text that is put before every text to embed."""
    max_tokens: int | None = None
    """The maximum number of tokens of a text; None means the maximum length of the model."""

    def __post_init__(self):
        check_choice("pooling", self.kind, get_args(PoolingKind))
        check_choice("pooling scores", self.scores, get_args(ScoreActivation))
        if self.labels and (not self.projections or self.projections[-1].size != len(self.labels)):
            raise UserError(
                f"pooling.labels: expected one for each output, got {len(self.labels)}."
            )

    def size(self, embed: int) -> int:
        """The size of a vector, for hidden states of a size."""
        return self.projections[-1].size if self.projections else embed

    def __str__(self) -> str:
        parts = [self.kind, *(f"dense {layer.size}" for layer in self.projections)]
        parts += ["length 1"] * self.normalises
        return ", ".join(parts + [f"after the prompt {self.prompt!r}"] * bool(self.prompt))


MEAN = Pooling()
"""The mean of all states: the pooling of sentence-transformers for models that name none."""
