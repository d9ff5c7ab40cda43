"""Sources of the parameters of a decoder: published tensor names and axis patterns, as data.

A loader uses them for two purposes: to fill a parameter from slices of tensors, and to check that
every tensor is used once and every parameter is filled. Knows nothing of files, dtypes or devices.

An axis pattern describes how a published tensor becomes a parameter, or a part of one, in the
notation of einops: `"(n h) d -> d n h"` reads a `[N*H, D]` matrix as `[D, N, H]`. Both sides have
the same names, with two exceptions. The right side may have a literal `1`, which inserts an axis of
size one. It may also have a name with a size that the left side does not have, which repeats the
array along a new axis: `"(k h) -> (k r) h"` with r = 2 repeats each k twice, side by side.
"""

from dataclasses import dataclass, replace

Sizes = tuple[tuple[str, int], ...]
"""The sizes of axes, by name."""


@dataclass(frozen=True)
class TensorPrefix:
    """The prefixes of tensor names in a standalone model and as part of a larger model."""

    standalone: str = ""
    whole: str = ""

    def to_whole(self, name: str) -> str:
        """The name in the whole model of a tensor of the standalone model."""
        return self._replace_prefix(name, self.standalone, self.whole)

    def to_standalone(self, name: str) -> str:
        """The name in the standalone model of a tensor of the whole model."""
        return self._replace_prefix(name, self.whole, self.standalone)

    @staticmethod
    def _replace_prefix(name: str, old: str, new: str) -> str:
        return new + name.removeprefix(old) if name.startswith(old) else name


NO_PREFIX = TensorPrefix()


@dataclass(frozen=True)
class TensorPart:
    """A published tensor and the axis pattern that makes it a parameter, or a part of one."""

    tensor: str
    axes: str
    sizes: Sizes = ()
    """Sizes of repeated axes and of axes inside parentheses; one per parenthesis may be left
    out."""
    rows: tuple[int, int] | None = None
    """The range of rows to read, start and end; None means all rows."""
    block: int | None = None
    """The number of rows per block, if `rows` is a range in each block; None means one block."""
    stacked: int = 0
    """The number of tensors, numbered from 0 at `{e}` in `tensor`, to stack along a new first axis;
    0 means a single tensor."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors that the part is read from."""
        if not self.stacked:
            return (self.tensor,)
        return tuple(self.tensor.replace("{e}", str(e)) for e in range(self.stacked))


@dataclass(frozen=True)
class ParameterSource:
    """A parameter as the concatenation of parts along `concat_axis`."""

    parameter: str
    """Dotted path in the parameter tree, e.g. `layers.3.attention.qkv`."""
    parts: tuple[TensorPart, ...]
    concat_axis: int = 0
    padding_rows: int = 0
    """The number of rows of zeros at the end of axis 0."""

    def in_layer(self, i: int) -> "ParameterSource":
        """The source of layer `i`, from a parameter of a layer and tensor names with `{i}`."""
        parts = tuple(
            replace(part, tensor=part.tensor.replace("{i}", str(i))) for part in self.parts
        )
        return replace(self, parameter=f"layers.{i}.{self.parameter}", parts=parts)

    def with_prefix(self, prefix: TensorPrefix) -> "ParameterSource":
        """The same source with the tensor names of the whole model."""
        parts = tuple(replace(part, tensor=prefix.to_whole(part.tensor)) for part in self.parts)
        return replace(self, parts=parts)
