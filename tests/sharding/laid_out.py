"""A tiny random model under a layout, on simulated devices, beside the same model on one device."""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from noria.compile.bucket_grid import BucketGrid
from noria.compile.build import build, empty_state
from noria.compile.compiled_graphs import CompiledGraphs
from noria.compile.definition import Definition
from noria.compile.signatures import greedy_sampling
from noria.compile.targets import find_target
from noria.modelzoo.config import Arrangement, DecoderConfig
from noria.runtime.host_arrays import HostArrays
from noria.runtime.layout_files import named_layout_tables
from noria.sharding.layout import Layout
from noria.sharding.mesh_layout import MeshLayout


def named_layout(name: str, mesh: dict[str, int] | None = None) -> Layout:
    layout = Layout.from_table(named_layout_tables()[name])
    return layout if mesh is None else layout.on(MeshLayout.of(mesh))


def arranged(
    parameters: dict[str, np.ndarray], config: DecoderConfig, arrangement: Arrangement
) -> dict[str, np.ndarray]:
    """Published weights as a layout wants them, in plain numpy."""
    copies, G = arrangement.kv_copies, config.heads_per_kv
    result = {}
    for name, x in parameters.items():
        last = name.rpartition(".")[2]
        if last in ("qkv", "qkv_bias"):
            axis = x.ndim - 3
            queries, kv = np.split(x, [G], axis=axis + 1)
            shape = (*x.shape[:axis], x.shape[axis] * copies, G // copies, x.shape[-1])
            kv = np.repeat(kv, copies, axis=axis)
            x = np.concatenate([queries.reshape(shape), kv], axis=axis + 1)
        elif last == "output":
            K, _, H, D = x.shape
            x = x.reshape(K * copies, G // copies, H, D)
        elif last == "table" and arrangement.padded_vocab:
            x = np.pad(x, ((0, arrangement.padded_vocab - x.shape[0]), (0, 0)))
        result[name] = x
    return result


@dataclass
class LaidOut:
    """One model under one layout (None: on one device), compiled."""

    config: DecoderConfig
    grid: BucketGrid
    parameters: dict[str, np.ndarray]
    layout: Layout | None = None

    @cached_property
    def placement(self):
        target = find_target(
            f"cpu:{self.layout.mesh.num_devices}" if self.layout is not None else "cpu"
        )
        return target.placement(self.layout)

    @cached_property
    def definition(self) -> Definition:
        return Definition(self.config, self.placement.arrangement(self.config))

    @cached_property
    def graphs(self) -> CompiledGraphs:
        return build(self.definition, self.grid, self.placement, jnp.float32)

    @cached_property
    def placed(self) -> dict[str, jax.Array]:
        weights = arranged(self.parameters, self.config, self.definition.arrangement)
        shardings = self.placement.parameters(self.definition.logical_axes())
        return {name: jax.device_put(x, shardings[name]) for name, x in weights.items()}

    def run(self, prompts: list[list[int]], num_calls: int = 2):
        """Prefill logits of every prompt, and the ids and logits after some decode calls."""
        bucket, V = self.grid.prefill[0], self.config.vocab_size
        put = HostArrays(self.placement.replicated).put
        state = empty_state(self.definition, self.grid, self.placement, jnp.dtype(jnp.float32))
        sampling = put(greedy_sampling(1, self.definition.padded_vocab))
        sampling = sampling._replace(num_logprobs_B=put(np.array([3], np.int32)))
        logits = []
        for start in range(0, len(prompts), bucket.batch):
            rows = prompts[start : start + bucket.batch]
            tokens_BT = np.zeros((bucket.batch, bucket.length), np.int32)
            for row, prompt in enumerate(rows):
                tokens_BT[row, : len(prompt)] = prompt
            length_B = np.ones(bucket.batch, np.int32)
            length_B[: len(rows)] = [len(prompt) for prompt in rows]
            made = self.graphs.prefill(self.placed, bucket, *put((tokens_BT, length_B)))
            logits.append(np.asarray(made.logits_BV)[: len(rows), :V])
            for row in range(len(rows)):
                where = put((np.int32(row), np.int32(start + row)))
                limit_1 = put(np.array([self.grid.max_length], np.int32))
                state = self.graphs.insert(state, bucket, made, *where, limit_1, sampling)
        is_live_B = put(np.arange(self.grid.decode_slots) < len(prompts))
        tokens, outputs = [], []
        for _ in range(num_calls):
            span = self.grid.decode_spans[-1]
            state, output = self.graphs.decode(self.placed, state, is_live_B, span)
            output = jax.device_get(output)
            tokens.append(output.tokens_BQ)
            outputs.append(output)
        after = np.asarray(state.logits_BV)[: len(prompts), :V]
        return np.concatenate(logits), np.concatenate(tokens, axis=1), after, outputs
