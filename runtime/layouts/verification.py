"""Compare the logits of a layout with the logits of one device for the same prompts.

Runs the real weights on a present target, simulated devices included: prefill of random prompts,
then some decode steps, with a comparison of logits after each call. A row is compared as long as
both runs have chosen the same token ids. Does not know about reports.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from ...compile.attention_kernels import AUTO_ATTENTION, AttentionPlan
from ...compile.build import build, plan_graphs
from ...compile.graphs.graph_kinds import DECODE, GraphKey
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.grid_defaults import GridDefaults, round_up
from ...compile.grids.prefill_bucket import PrefillBucket
from ...compile.targets import Target
from ...sharding.layout import Layout
from .. import session
from ..checkpoint import ModelFiles
from ..devices.host_arrays import HostArrays
from ..engine.model_runner import GraphCall, ModelRunner
from ..engine.padding import decode_pages, pack_greedy
from ..errors import UserError

NUM_PROMPTS, LENGTH, NUM_STEPS = 8, 32, 4
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1}
"""The largest difference of a logit from one device under a right layout, as a part of the largest
logit: sums run in another order, and in bfloat16 tokens may go to other experts."""


class NotFinite(UserError):
    """A layout with a logit that is not finite."""


@dataclass
class Verification:
    """Compares layouts with one device, whose logits are computed once."""

    files: ModelFiles
    target: Target
    dtype: str
    scan_layers: bool = False
    """Whether layouts run the layers as a loop; the reference has unrolled layers."""
    attention: AttentionPlan = AUTO_ATTENTION
    """The kernels of layouts; the reference has those that are chosen for it."""
    length: int = LENGTH
    """The minimum length to which layouts pad prompts, as some kernels serve no short prompts."""
    page: int | None = None
    """The entries of a page of the cache of layouts; None for those that suit the layout."""
    _reference: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def read_reference(self) -> None:
        """Compute the logits of one device, for which all weights are read."""
        first = Target(self.target.name, self.target.platform, self.target.devices[:1], True)
        reference = Verification(self.files, first, self.dtype)
        self._reference = list(reference._logits(None))

    @property
    def tolerance(self) -> float:
        """The largest difference of a layout that is equal to one device."""
        largest = max(float(np.abs(logits_BV).max()) for _, logits_BV in self._reference)
        return TOLERANCES[self.dtype] * max(1.0, largest)

    def max_abs_diff(self, layout: Layout) -> float:
        """The largest difference between a logit under the layout and the same logit on one device.

        `read_reference` has been called.

        Raises:
          NotFinite: A difference is not finite.
        """
        worst = 0.0
        same_B = np.ones(NUM_PROMPTS, bool)
        logits = self._logits(layout)
        steps = zip(self._reference, logits, strict=True)
        for (tokens_B, logits_BV), (our_tokens_B, our_logits_BV) in steps:
            same_B &= tokens_B == our_tokens_B
            difference_B = np.abs(logits_BV - our_logits_BV).max(axis=-1)
            difference = float(difference_B[same_B].max(initial=0.0))
            if not math.isfinite(difference):
                # max(0.0, nan) would be 0.0
                raise NotFinite(
                    f"--verify {layout.name}: expected finite logits, got a difference of "
                    f"{difference} from one device in {self.dtype}. Try --dtype float32; if it "
                    f"fails too, the layout or the weights are at fault."
                )
            worst = max(worst, difference)
        return worst

    def _logits(self, layout: Layout | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Chosen token ids [B] and logits [B, V], after prefill and after each decode step."""
        options = session.LoadOptions(self.dtype, layout, self.scan_layers)
        model = session.load_model(self.files, self.target, options)
        grid, dtype = _grid(layout, self.length, self.page), jnp.dtype(self.dtype)
        placement = model.placement
        planned = plan_graphs(model.definition, grid, placement, dtype, attention=self.attention)
        graphs, host = build(grid, planned), HostArrays(placement.replicated)
        runner = ModelRunner(graphs, model.parameters, host, graphs.empty_state())
        vocab_size, padded_vocab = model.definition.config.vocab_size, model.definition.padded_vocab
        bucket = grid.prefill[0]
        prompts = _prompts(vocab_size)
        for start in range(0, NUM_PROMPTS, bucket.batch):
            rows = prompts[start : start + bucket.batch]
            packed = pack_greedy(rows, start, bucket, grid, padded_vocab)
            runner.call(GraphCall(GraphKey("prefill", bucket), packed))
        no_tokens_B = np.zeros(NUM_PROMPTS, np.int32)
        yield no_tokens_B, np.asarray(runner.decode_state.logits_BV)[:NUM_PROMPTS, :vocab_size]
        is_live_B = np.arange(grid.decode_slots) < NUM_PROMPTS
        decode = GraphCall(DECODE, (is_live_B, decode_pages(grid)))
        for _ in range(NUM_STEPS):
            tokens_B = jax.device_get(runner.call(decode).tokens_BQ)[:NUM_PROMPTS, 0]
            yield tokens_B, np.asarray(runner.decode_state.logits_BV)[:NUM_PROMPTS, :vocab_size]


def _grid(layout: Layout | None, min_length: int, page: int | None) -> BucketGrid:
    """The smallest grid for the prompts, or longer ones, with sizes that the layout can split."""
    shape = GridDefaults.for_layout(layout)
    length = round_up(max(LENGTH, min_length), shape.length_multiple)
    batch = round_up(NUM_PROMPTS, shape.batch_multiple)
    slots = round_up(NUM_PROMPTS, shape.slot_multiple)
    return BucketGrid(
        length + NUM_STEPS + 1,
        (PrefillBucket(length, batch),),
        slots,
        steps_per_call=1,
        slot_groups=shape.slot_groups if shape.slot_groups > 1 else None,
        page=shape.page if page is None else page,
    )


def _prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, LENGTH + 1, NUM_PROMPTS)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]
