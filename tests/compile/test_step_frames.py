"""Few functions lie between a decode step and its softmax, so that a reader can follow them."""

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from tiny import CONFIG

from noria.compile.abstract_model import AbstractModel
from noria.compile.graphs import signatures
from noria.compile.graphs.steps import decode_step
from noria.compile.grids.bucket_grid import BucketGrid
from noria.modelzoo.attention import blockwise
from noria.modelzoo.attention.attend import attend_masked
from noria.modelzoo.decoder import Decoder

GRID = BucketGrid(64, ((48, 1),), 4, (16, 32, 64))


def test_eight_functions_lie_between_a_decode_step_and_its_softmax(monkeypatch):
    stacks = []

    def noted(*arguments):
        stacks.append([frame.name for frame in traceback.extract_stack() if is_ours(frame)])
        return attend_masked(*arguments)

    def step():
        decoder = Decoder(CONFIG, rngs=nnx.Rngs(0))
        state = signatures.decode_state(AbstractModel(CONFIG), GRID, jnp.float32)
        is_live_B = jnp.ones(GRID.decode_slots, bool)
        return decode_step(decoder, state, is_live_B, span=GRID.max_length, num_steps=2)

    monkeypatch.setattr(blockwise, "attend_masked", noted)
    jax.eval_shape(step)
    paths = {
        tuple(names[names.index("one_token") + 1 :]) for names in stacks if "one_token" in names
    }
    assert len(paths) == 1
    assert len(paths.pop()) <= 8


def is_ours(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename)
    return path != Path(__file__) and bool({"compile", "modelzoo"} & set(path.parts[-3:-1]))
