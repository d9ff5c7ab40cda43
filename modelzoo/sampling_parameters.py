"""The table of sampling parameters: the default and the valid values of each, and where it stands.

Bodies of requests and generation_config.json have parameters under the names of these fields. All
code that lists, checks, packs or defaults parameters reads the table. Knows nothing of requests.
"""

from dataclasses import dataclass, fields
from typing import Annotated, NamedTuple, get_args

MAX_N = 128
MAX_INT = 2**31 - 1


class Parameter(NamedTuple):
    """The entry of a parameter, beside the type of its field."""

    dtype: str | None = None
    """The dtype of valid values: `bool`, an integer or a float; None for other values."""
    low: float = 0
    high: float = MAX_INT
    or_zero: bool = False
    """Whether 0 is valid besides the values from `low` to `high`."""
    array: str | None = None
    """The field of `SamplingState` with its values; None if graphs do not take them as they are."""
    in_body: bool = True
    """Whether its name in the body of a request has this meaning."""
    of_jobs: bool = False
    """Whether a job may set it for all rows."""
    published: bool = False
    """Whether publishers may give its default, in generation_config.json."""


def table_of(parameters: type) -> dict[str, Parameter]:
    """The entries of a dataclass by the names of its fields."""
    entries = {field.name: get_args(field.type)[-1:] for field in fields(parameters)}
    return {name: x for name, (x,) in entries.items() if isinstance(x, Parameter)}


@dataclass(frozen=True)
class SampledNumbers:
    """The sampling parameters of which every row has a number; `SamplingParams` has all.

    The bounds keep quotients of logits and sums of probabilities inside float32.

    Attributes:
      n: Number of continuations.
      presence_penalty: Subtracted from the logits of tokens that the output has.
      frequency_penalty: Subtracted from logits per occurrence of the token in the output.
      repetition_penalty: Divides positive logits, and multiplies negative logits, of tokens in the
        prompt or the output.
      temperature: Divides the logits; 0 is greedy.
      top_p: Sample from the fewest likeliest tokens that reach this total probability.
      top_k: Number of the likeliest tokens to sample from; 0 or -1 for no limit.
      min_p: Minimum probability of a token, as a share of the likeliest token's probability.
    """

    n: Annotated[int, Parameter("int32", 1, MAX_N)] = 1
    presence_penalty: Annotated[
        float, Parameter("float32", -2, 2, array="presence_B", of_jobs=True)
    ] = 0.0
    frequency_penalty: Annotated[
        float, Parameter("float32", -2, 2, array="frequency_B", of_jobs=True)
    ] = 0.0
    repetition_penalty: Annotated[
        float, Parameter("float32", 1e-10, 1e10, array="repetition_B", of_jobs=True, published=True)
    ] = 1.0
    temperature: Annotated[
        float,
        Parameter("float32", 1e-20, 1e20, True, "temperature_B", of_jobs=True, published=True),
    ] = 1.0
    top_p: Annotated[
        float, Parameter("float32", 1e-20, 1, array="top_p_B", of_jobs=True, published=True)
    ] = 1.0
    top_k: Annotated[int, Parameter("int32", -1, array="top_k_B", of_jobs=True, published=True)] = 0
    min_p: Annotated[
        float, Parameter("float32", 0, 1, array="min_p_B", of_jobs=True, published=True)
    ] = 0.0


ARRAYS = {name: (x.array, x.dtype) for name, x in table_of(SampledNumbers).items() if x.array}
"""The array and the dtype of each parameter that has an array."""
GREEDY = SampledNumbers(temperature=0)
"""The parameters of rows without any of their own."""
