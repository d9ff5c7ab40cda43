"""The bridge from the NNX definition to pure functions of flat parameter dictionaries.

Executables take `{"layers.0.attention.qkv": array, ...}`: NNX serves definition and tracing and
stays out of the hot path. Knows nothing of buckets or devices.
"""

from collections.abc import Mapping

import jax
from flax import nnx

from ..modelzoo.attention import Attend, attend_dense
from ..modelzoo.config import DecoderConfig
from ..modelzoo.decoder import Constrain, Decoder, unconstrained


class Definition:
    """One decoder's structure: its abstract parameters, and the module bound to real ones."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        attend: Attend = attend_dense,
        constrain: Constrain = unconstrained,
    ):
        self.config = config
        module = nnx.eval_shape(
            lambda: Decoder(config, rngs=nnx.Rngs(0), attend=attend, constrain=constrain)
        )
        self._graphdef, state = nnx.split(module)
        self._variables = {
            ".".join(map(str, path)): (path, variable)
            for path, variable in nnx.to_flat_state(state)
        }

    def abstract_parameters(self, dtype: jax.typing.DTypeLike) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of all parameters by dotted path, in the dtype that weights are kept in."""
        return {
            name: jax.ShapeDtypeStruct(variable.get_value().shape, dtype)
            for name, (_, variable) in self._variables.items()
        }

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        """The logical axes that each parameter declares."""
        return {
            name: variable.get_metadata()["logical_axes"]
            for name, (_, variable) in self._variables.items()
        }

    def bind(self, parameters: Mapping[str, jax.Array]) -> Decoder:
        """The decoder over these arrays, for use inside a trace."""
        flat = [
            (path, variable.replace(parameters[name]))
            for name, (path, variable) in self._variables.items()
        ]
        return nnx.merge(self._graphdef, nnx.from_flat_state(flat))
