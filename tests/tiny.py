"""A small random decoder and helpers to run it, for tests of `sharding`, `compile`, `runtime`."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from alike import changed

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import build, plan_graphs
from noria.compile.expert_plan import LOSSLESS_EXPERTS, ExpertPlan
from noria.compile.graphs import signatures
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.targets import find_target
from noria.modelzoo.config import DecoderConfig
from noria.runtime.devices.host_arrays import HostArrays
from noria.runtime.engine.admission import Admission
from noria.runtime.engine.generation import GenerationSession
from noria.runtime.engine.metrics import ExpertSetup
from noria.runtime.engine.model_runner import ModelRunner
from noria.runtime.engine.slot_calls import SlotCalls

CONFIG = DecoderConfig.alike(
    vocab_size=151,
    embed=24,
    mlp=40,
    num_query_heads=6,
    num_kv_heads=2,
    head_dim=8,
    windows=(None, 7, None),
    max_position=128,
)
TWO_LAYERS = changed(CONFIG, windows=(7, None))
"""A model with one layer of each kind of cache, which compiles sooner."""
GRID = BucketGrid(
    max_length=64,
    prefill=((8, 3), (16, 2), (48, 1)),
    decode_slots=4,
    page=8,
    steps_per_call=4,
    score=True,
)
"""A grid for whole prompts, which end within pages, with pages enough for all slots."""
CHUNK_GRID = replace(GRID, prefill=((64, 2, 8),), page=16, pages=16, chunks_per_decode=3)
"""A grid with chunks longer than the window and shorter than a page."""
TAIL_GRID = replace(GRID, prefill=((64, 3, 4), (64, 2, 16)), chunks_per_decode=3)
"""A grid with chunks longer and shorter than the window and than a page."""
FEW_PAGES_GRID = replace(GRID, pages=8)
"""A grid with pages for one of the longest rows, so that rows wait and are computed again."""
FEW_PAGES_CHUNK_GRID = replace(TAIL_GRID, prefill=((64, 2, 4), (64, 2, 16)), pages=8, row_tokens=16)
"""A grid with as few pages, with chunks, and with pages of each slot for windows."""
EOS_ID = 2


def random_parameters(definition: AbstractModel, seed: int = 0) -> dict[str, jax.Array]:
    """Return weights so large that logits are far apart and mistakes show."""
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(scale=0.4, size=shape.shape).astype(np.float32))
        for name, shape in definition.abstract_parameters(jnp.float32).items()
    }


class TinyModel:
    """One compiled tiny model; generators over it share its executables."""

    def __init__(
        self,
        config: DecoderConfig = CONFIG,
        grid: BucketGrid = GRID,
        experts: ExpertPlan = LOSSLESS_EXPERTS,
    ):
        self.config, self.grid = config, grid
        self.placement = find_target("cpu").placement()
        self.definition = AbstractModel(config)
        self.parameters = random_parameters(self.definition)
        self.experts = None
        if config.moe is not None:
            self.experts = ExpertSetup(config.moe.routing, config.sparse_layers, experts)
        planned = plan_graphs(
            self.definition, grid, self.placement, jnp.dtype(jnp.float32), experts
        )
        self.graphs = build(grid, planned)
        self._empty = partial(signatures.decode_state, self.definition, grid, jnp.float32)
        self._forward = jax.jit(self._logits)

    def generator(
        self, parameters=None, *, experts=None, tokenizer=None, structures=None, run_seed=0
    ) -> GenerationSession:
        host = HostArrays(self.placement.replicated)
        admission = Admission(
            self.grid,
            self.config.vocab_size,
            self.config.max_position,
            (EOS_ID,),
            tokenizer,
            run_seed,
            structures=structures,
        )
        tables = structures and host.put(structures.tables)
        return GenerationSession(
            runner=ModelRunner(self.graphs, parameters or self.parameters, host, self._empty()),
            slots=SlotCalls(self.grid, self.config.vocab_size, tables),
            admission=admission,
            experts=experts or self.experts,
        )

    def next_logits(self, tokens: list[int]) -> np.ndarray:
        """Return the logits after these tokens, from a plain forward pass over all of them."""
        padded = np.zeros((1, self.grid.max_length), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(self._forward(self.parameters, padded, np.array([len(tokens)])))[0]

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Compute the reference: one whole forward pass for each token."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.next_logits(tokens).argmax()))
            if tokens[-1] == EOS_ID:
                break
        return tokens[len(prompt) :]

    def _logits(self, parameters, tokens_BT, true_length_B):
        decoder = self.definition.bind(parameters)
        x_BTD, *_ = decoder.forward(tokens_BT, true_length_B)
        return decoder.logits(x_BTD[:, true_length_B[0] - 1])


def prompts(count: int, seed: int = 1, longest: int = 40) -> list[list[int]]:
    """Return random prompts of random lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    return [rng.integers(3, CONFIG.vocab_size, n).tolist() for n in lengths]
