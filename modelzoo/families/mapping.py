"""How published tensors fill the parameters of a decoder: names and axis patterns, as data.

Knows nothing of files, dtypes or devices. A loader reads it in two directions: to fill a parameter
from slices of tensors, and to prove that every tensor is used once and every parameter filled.

An axis pattern says how a published tensor becomes (part of) a parameter, in the notation of
einops: `"(n h) d -> d n h"` reads a `[N*H, D]` matrix as `[D, N, H]`. Both sides hold the same
names, but for two things that may stand on the right only: a literal `1`, which inserts an axis of
size one, and a name with a size, along which everything repeats: `"(k h) -> (k r) h"` with r = 2
holds each row twice, copies side by side.
"""

from dataclasses import dataclass, replace

Sizes = tuple[tuple[str, int], ...]
"""How many entries an axis of each name has."""


@dataclass(frozen=True)
class TensorPrefix:
    """The prefixes of tensor names in a model alone, and where it is part of a larger model."""

    alone: str = ""
    whole: str = ""

    def to_whole(self, name: str) -> str:
        """The name in the whole model of a tensor of the model alone."""
        return self._exchanged(name, self.alone, self.whole)

    def to_alone(self, name: str) -> str:
        """The name in the model alone of a tensor of the whole model."""
        return self._exchanged(name, self.whole, self.alone)

    @staticmethod
    def _exchanged(name: str, old: str, new: str) -> str:
        return new + name.removeprefix(old) if name.startswith(old) else name


PLAIN = TensorPrefix()


@dataclass(frozen=True)
class TensorPart:
    """One published tensor and the axis pattern that turns it into (part of) a parameter."""

    tensor: str
    axes: str
    sizes: Sizes = ()
    """Sizes of the names inside parentheses, all but at most one per group, and of repetitions."""
    rows: tuple[int, int] | None = None
    """The tensor's rows from the first number up to the second; None means all."""
    block: int | None = None
    """The tensor is blocks of this many rows, and `rows` are of each; None means one block."""
    stacked: int = 0
    """`tensor` holds `{e}` and stands for so many tensors, numbered from 0, stacked along a new
    first axis; 0 for one tensor as it is."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors that the part is read from."""
        if not self.stacked:
            return (self.tensor,)
        return tuple(self.tensor.replace("{e}", str(e)) for e in range(self.stacked))


@dataclass(frozen=True)
class ParameterSource:
    """A parameter as its parts, concatenated along `concat_axis` in the given order."""

    parameter: str
    """Dotted path in the parameter tree, e.g. `layers.3.attention.qkv`."""
    parts: tuple[TensorPart, ...]
    concat_axis: int = 0
    padding_rows: int = 0
    """Rows of zeros that follow what the parts fill, along axis 0."""

    def renamed(self, beginning: TensorPrefix) -> "ParameterSource":
        """The same source with tensors named as in the whole model."""
        parts = tuple(replace(part, tensor=beginning.to_whole(part.tensor)) for part in self.parts)
        return replace(self, parts=parts)
