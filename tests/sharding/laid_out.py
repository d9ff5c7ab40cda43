"""Small random models under layouts on simulated devices, and their answers.

There is one model with special features for each family, from the family's own config.json. The
helpers compile the same graphs as a build. The reference is the same model on one device: a whole
forward pass for each token, or the same graphs if a test compares more than greedy tokens.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from quantised import dequantised, in_codes
from tiny import random_parameters
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.abstract_model import DOWN, UP, AbstractModel
from noria.compile.build import GraphSpec, compile_graph, plan_graphs
from noria.compile.compiled_graphs import CompiledGraphs
from noria.compile.graphs.graph_kinds import FORK, GraphKey
from noria.compile.graphs.prefill_steps import PrefillOutput
from noria.compile.graphs.steps import NO_TOKEN, DecodeOutput, DecodeState
from noria.compile.grids.adapter_grid import AdapterGrid
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefill_bucket import PrefillBucket
from noria.compile.grids.prefix_grid import PrefixGrid
from noria.compile.targets import find_target
from noria.compile.weight_rules import ALL_FLOAT, WeightRules
from noria.modelzoo import axes
from noria.modelzoo.attention.attend import attend_dense
from noria.modelzoo.attention.shared_pages import SlotPages
from noria.modelzoo.config import Arrangement, DecoderConfig
from noria.modelzoo.families.registry import from_hf_config
from noria.modelzoo.layer_config import Layer
from noria.modelzoo.layer_groups import single_layer_names
from noria.modelzoo.sampling import SamplingState, TokenScores
from noria.modelzoo.weights.weight_formats import SCALES
from noria.runtime.devices.host_arrays import HostArrays
from noria.runtime.engine.actions import (
    PromptPiece,
    ScheduledRequest,
    ScheduledSequence,
    SharedGroup,
)
from noria.runtime.engine.padding import (
    pack_pieces,
    pack_requests,
    pack_sampling,
    pack_shared,
)
from noria.runtime.files.layout_files import named_layout_tables, read_layout_table
from noria.runtime.request import SamplingParams
from noria.sharding.layout import Layout

VOCAB = 151
"""A prime number, so that every layout that splits the vocabulary pads it."""

PAGE = 8

_SHARED = {
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_attention_heads": 24,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_MSCALES = {"mscale": 0.7, "mscale_all_dim": 1.2}
_ROUTED = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}
_LATENT = _ROUTED | {
    "num_key_value_heads": 24,
    "head_dim": 6,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
    "n_group": 4,
    "topk_group": 2,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_LAYER_NORM = {"rms_norm_eps": None, "layer_norm_eps": 1e-5}
_FACTORS = {
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}
FAMILIES: dict[str, Mapping[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_scaling": _LLAMA3},
    "mistral": {"sliding_window": 5, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 7},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
        "rope_scaling": _YARN,
    },
    "qwen2_moe": _EXPERTS
    | {
        "shared_expert_intermediate_size": 56,
        "mlp_only_layers": [0],
        "use_sliding_window": True,
        "sliding_window": 5,
    },
    "qwen3_moe": _EXPERTS | {"norm_topk_prob": True, "tie_word_embeddings": True},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 5, "attention_bias": True},
    "granitemoe": _FACTORS | {"num_local_experts": 16, "num_experts_per_tok": 3},
    "qwen3": {"attention_bias": True, "tie_word_embeddings": True, "rope_theta": 1e6},
    "olmo2": {"attention_bias": True, "rope_theta": 5e5},
    "phi3": {"sliding_window": 5, "partial_rotary_factor": 0.75, "head_dim": 16},
    "granite": _FACTORS | {"mlp_bias": True},
    "gemma2": {
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": 5,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 8.0,
    },
    "gemma3_text": {
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": 5,
        "sliding_window_pattern": 2,
    },
    "cohere": _LAYER_NORM | {"use_qk_norm": True},
    "deepseek_v2": _LATENT
    | {
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "rope_scaling": _YARN | _MSCALES,
    },
    "deepseek_v3": _LATENT
    | {"q_lora_rank": 10, "norm_topk_prob": True, "tie_word_embeddings": True},
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "rope_scaling": {**_YARN, "truncate": False},
    },
    "llama4_text": {
        "intermediate_size_mlp": 96,
        "num_local_experts": 8,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 7,
        "floor_scale": 4,
        "attention_bias": True,
    },
}
MAPPED: dict[str, Mapping[str, Any]] = {
    "gemma": {"hidden_act": "gelu"},
    "vaultgemma": {"hidden_act": "gelu_pytorch_tanh", "sliding_window": 5},
    "cohere2": _LAYER_NORM | {"sliding_window": 5, "sliding_window_pattern": 2},
    "olmo3": {"sliding_window": 5, "rope_scaling": _YARN},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 5},
    "ministral": {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    "ministral3": {"rope_scaling": _YARN | {"llama_4_scaling_beta": 0.3}},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_intermediate_size": 40, "moe_num_experts": 8, "moe_k": 3},
    "exaone4": {"sliding_window": 5, "sliding_window_pattern": 2},
    "starcoder2": {
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": None,
        "norm_epsilon": 1e-5,
        "sliding_window": 5,
    },
    "kimi_k2": _LATENT | {"q_lora_rank": 10, "norm_topk_prob": True},
    "dots1": _ROUTED | {"norm_topk_prob": True, "n_group": 4, "topk_group": 2},
    "glm4_moe": _ROUTED | {"norm_topk_prob": True, "n_group": 1, "topk_group": 1},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 4},
    "solar_open": _ROUTED | {"norm_topk_prob": True, "n_group": 1, "topk_group": 1},
    "deepseek": _ROUTED,
    "granitemoeshared": _FACTORS
    | {"num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 40},
    "granitemoehybrid": _FACTORS
    | {
        "num_local_experts": 0,
        "shared_intermediate_size": 72,
        "layer_types": ["attention", "attention"],
    },
    "seed_oss": {"attention_out_bias": True},
    "helium": {"mlp_bias": True},
    "cwm": {"sliding_window": 5, "rope_scaling": _LLAMA3},
    "stablelm": _LAYER_NORM,
    "orion": {},
    "internlm2": {"bias": True},
    "mimo": {},
    "minicpm": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 24},
}
"""Families whose blocks have options of other families; each is tested with one layout."""

LAYOUTS = tuple(named_layout_tables())
FAMILY_OF = {
    "data-parallel": "llama",
    "data-tensor-batch-attention": "mistral",
    "data-tensor": "mixtral",
    "embed-parallel": "qwen2",
    "expert-parallel": "qwen2_moe",
    "expert-stationary": "qwen3_moe",
    "expert-tensor": "olmoe",
    "gpu-host": "granitemoe",
    "sequence-parallel": "qwen3",
    "v5e-host": "olmo2",
    "v5p-slice": "phi3",
    "weight-gathered-all": "granite",
    "weight-gathered": "gemma2",
    "weight-stationary-1d-batch-attention": "gemma3_text",
    "weight-stationary-1d-kv-copies": "cohere",
    "weight-stationary-1d": "deepseek_v2",
    "weight-stationary-2d": "deepseek_v3",
    "ring": "gpt_oss",
    "ring-data-expert": "llama4_text",
    "ring-tensor": "deepseek_v3",
}
"""The family that every run tests with each layout; the pair is compiled once for all tests. Ring
layouts have families with sinks and windows, chunks and experts, and latents."""

GREEDY = SamplingParams(temperature=0)
STOP_ID = 2
PROMPT_LENGTHS = (24, 9, 1, 17, 5, 23)


@dataclass(frozen=True)
class Row:
    """A prompt with its sampling options."""

    prompt: tuple[int, ...]
    params: SamplingParams = GREEDY
    seed: int = 7
    sample: int = 0
    limit: int | None = None
    """Length at which the row ends; None for the grid's longest length."""
    adapter: int = 0


@dataclass(frozen=True)
class Answers:
    """The results of rows in slots; every array leads with the slots."""

    prompt_logprobs_BV: np.ndarray
    logprobs_BV: np.ndarray
    """After the last token."""
    output: DecodeOutput
    """Outputs of all calls, joined along the axis of steps."""
    state: DecodeState


@dataclass(frozen=True)
class Expected:
    """The results of greedy rows on one device; every array leads with the rows."""

    tokens_RQ: np.ndarray
    prompt_logprobs_RV: np.ndarray
    logprobs_RV: np.ndarray
    """After the last token."""

    def assert_equals(self, got: Answers, slots: Iterable[int]) -> None:
        """Compare with the rows in these slots: ids, and log-probabilities within the tolerance."""
        slots = list(slots)
        np.testing.assert_array_equal(got.output.tokens_BQ[slots], self.tokens_RQ)
        for ours, wanted in (
            (got.prompt_logprobs_BV, self.prompt_logprobs_RV),
            (got.logprobs_BV, self.logprobs_RV),
        ):
            np.testing.assert_allclose(ours[slots], wanted, rtol=0, atol=FLOAT32_MODEL_LOGPROB)


def config_of(family: str, num_kv_heads: int = 8, num_layers: int = 2) -> DecoderConfig:
    table = {"model_type": family, "num_key_value_heads": num_kv_heads}
    table["num_hidden_layers"] = num_layers
    config = {**_SHARED, **table, **(FAMILIES | MAPPED)[family]}
    left_out = [key for key in _SHARED if config[key] is None]
    return from_hf_config({k: v for k, v in config.items() if k not in left_out}).config


def layout_of(spelling: str) -> Layout:
    """Return the layout of a name or file as on the command line."""
    return Layout.from_table(read_layout_table(spelling))


def grid_of(layout: Layout | None, in_chunks: bool = False) -> BucketGrid:
    """Return a grid with rows for all prompts, with pages enough for all slots.

    Prompts, and chunks of two sizes, are shorter and longer than the windows and than a page. In
    layers with windows, each slot has pages of its own.
    """
    rows = _num_rows(layout)
    options = {"page": PAGE, "slot_groups": num_slot_groups(layout), "steps_per_call": 4}
    if in_chunks:
        buckets = (48, rows, 8), (48, rows, 16)
        return BucketGrid(48, buckets, rows, row_tokens=16, score=True, **options)
    return BucketGrid(40, ((24, rows),), rows, row_tokens=1, score=True, **options)


def num_slot_groups(layout: Layout | None) -> int:
    """The number of pieces into which slots are split over devices."""
    return (
        1
        if layout is None
        else layout.mesh.num_shards(layout.phase("decode")[axes.ATTENTION_BATCH])
    )


def _num_rows(layout: Layout | None) -> int:
    num_devices = 1 if layout is None else layout.mesh.num_devices
    return 8 if num_devices == 1 else -(-len(PROMPT_LENGTHS) // num_devices) * num_devices


def greedy_rows() -> dict[int, Row]:
    """Return a row of each length by slot; on eight devices two slots stay free."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(3, VOCAB, n).tolist()) for n in PROMPT_LENGTHS]
    return dict(enumerate(map(Row, prompts)))


@lru_cache(maxsize=8)
def expected(
    config: DecoderConfig,
    rows: tuple[Row, ...] | None = None,
    num_tokens: int = 12,
    weight_rules: WeightRules = ALL_FLOAT,
) -> Expected:
    """Compute greedy rows on one device, with a whole forward pass for each token.

    Weights in codes are dequantised first.
    """
    rows = tuple(greedy_rows().values()) if rows is None else rows
    definition = AbstractModel(config)
    parameters = random_parameters(definition)
    quantisations = AbstractModel(config, weight_rules=weight_rules).quantisations
    for name, quantisation in quantisations.items():
        parameters[name] = jnp.asarray(dequantised(np.asarray(parameters[name]), quantisation))
    return expected_of(definition, parameters, rows, num_tokens)


def expected_of(
    definition: AbstractModel,
    parameters: Mapping[str, jax.Array],
    rows: Sequence[Row],
    num_tokens: int = 12,
) -> Expected:
    """Compute greedy rows with these parameters on one device."""
    prompts = [row.prompt for row in rows]

    @jax.jit
    def last_logits(parameters, tokens_RT, length_R):
        decoder = definition.bind(parameters, attend=attend_dense)
        x_RTD, _ = decoder.forward(tokens_RT, length_R)
        return decoder.logits(x_RTD[np.arange(len(prompts)), length_R - 1])

    length_R = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens_RT = np.zeros((len(prompts), length_R.max() + num_tokens), np.int32)
    for row, prompt in zip(tokens_RT, prompts, strict=True):
        row[: len(prompt)] = prompt
    tokens_RQ = np.full((len(prompts), num_tokens), NO_TOKEN)
    limit_R = np.array([row.limit or tokens_RT.shape[1] for row in rows])
    is_active_R, logprobs = length_R < limit_R, []
    for step in range(num_tokens + 1):
        logits_RV = last_logits(parameters, tokens_RT, length_R)
        logprobs.append(np.asarray(jax.nn.log_softmax(np.asarray(logits_RV))))
        if step < num_tokens:
            token_R = logprobs[-1].argmax(axis=-1)
            tokens_RQ[is_active_R, step] = token_R[is_active_R]
            tokens_RT[is_active_R, length_R[is_active_R]] = token_R[is_active_R]
            length_R = length_R + is_active_R
            is_active_R = is_active_R & (token_R != STOP_ID) & (length_R < limit_R)
    return Expected(tokens_RQ, logprobs[0], logprobs[-1])


def arranged(
    parameters: dict[str, np.ndarray], config: DecoderConfig, arrangement: Arrangement
) -> dict[str, np.ndarray]:
    """Return published weights in a layout's arrangement, layer by layer, in plain numpy."""
    result = {}
    for name, x in parameters.items():
        copies = G = 1
        if ".attention." in name and (attention := _layer(config, name).attention) is not None:
            copies, G = arrangement.kv_copies(attention.num_kv_heads), attention.heads_per_kv
        # matrices of adapters have the heads of their weight
        last = name.removesuffix("qkv" + UP) + "qkv" * name.endswith("qkv" + UP)
        last = last.removesuffix(DOWN) if last.endswith("output" + DOWN) else last
        last = last.rpartition(".")[2]
        if last in ("qkv", "qkv_bias"):
            axis = x.ndim - 3
            queries, kv = np.split(x, [G], axis=axis + 1)
            shape = (*x.shape[:axis], x.shape[axis] * copies, G // copies, x.shape[-1])
            kv = np.repeat(kv, copies, axis=axis)
            x = np.concatenate([queries.reshape(shape), kv], axis=axis + 1)
        elif last in ("output", "sinks") and copies > 1:
            x = x.reshape(x.shape[0] * copies, G // copies, *x.shape[2:])
        elif last == "table" and arrangement.padded_vocab:
            x = np.pad(x, ((0, arrangement.padded_vocab - x.shape[0]), (0, 0)))
        result[name] = x
    return result


def _layer(config: DecoderConfig, parameter: str) -> Layer:
    return config.layers[int(parameter.split(".")[1])]


def adapter_matrices(config: DecoderConfig, grid: AdapterGrid) -> dict[str, np.ndarray]:
    """Return random matrices of adapters for unrolled layers as they are published."""
    rng = np.random.default_rng(1)
    return {
        name: rng.normal(scale=0.2, size=leaf.shape).astype(np.float32)
        for name, leaf in AbstractModel(config, adapters=grid)
        .abstract_parameters("float32")
        .items()
        if name.endswith((DOWN, UP))
    }


class _CompiledWhenCalled(dict[GraphKey, jax.stages.Compiled]):
    """Executables, compiled on first use: few tests call all graphs."""

    def __init__(self, planned: Iterable[GraphSpec]):
        super().__init__()
        self._planned = {graph.key: graph for graph in planned}

    def __missing__(self, key: GraphKey) -> jax.stages.Compiled:
        self[key], _ = compile_graph(self._planned[key])
        return self[key]


@dataclass
class LaidOut:
    """One model under one layout (None: on one device)."""

    config: DecoderConfig
    layout: Layout | None = None
    scan_layers: bool = False
    in_chunks: bool = False
    prefixes: PrefixGrid | None = None
    """The prefixes that groups of rows read."""
    weight_rules: WeightRules = ALL_FLOAT
    """The formats of weights; weights in codes are rounded after they are arranged."""
    cache_codes: str | None = None
    """The dtype of cache entries in codes."""
    adapters: AdapterGrid | None = None

    @property
    def num_devices(self) -> int:
        return 1 if self.layout is None else self.layout.mesh.num_devices

    @property
    def grid(self) -> BucketGrid:
        grid = grid_of(self.layout, self.in_chunks)
        return replace(grid, adapters=self.adapters, prefixes=self.prefixes)

    def pages_of(self, slots: Sequence[int], length: int) -> np.ndarray:
        """Return the pages of slots; they lie scattered over the pool."""
        grid = self.grid
        assert grid.pages is not None
        # the pages of slots on one device are on this device
        of_devices = np.arange(grid.pages, dtype=np.int32).reshape(grid.slot_groups or 1, -1)
        np.random.default_rng(5).permuted(of_devices, axis=1, out=of_devices)
        table_BN = of_devices.reshape(grid.decode_slots, -1)
        return table_BN[list(slots), : grid.num_pages(length)]

    @cached_property
    def placement(self):
        target = find_target(f"cpu:{self.num_devices}")
        return target.placement(self.layout)

    @cached_property
    def definition(self) -> AbstractModel:
        options = self.scan_layers, self.cache_codes
        arrangement = self.placement.arrangement(self.config, *options)
        return AbstractModel(self.config, arrangement, self.weight_rules, self.adapters)

    @cached_property
    def parameters(self) -> dict[str, jax.Array]:
        published = random_parameters(AbstractModel(self.config))
        weights = {name: np.asarray(x) for name, x in published.items()}
        if self.adapters is not None:
            weights |= adapter_matrices(self.config, self.adapters)
        weights = arranged(weights, self.config, self.definition.arrangement)
        shardings = self.placement.parameters(self.definition.logical_axes())
        quantisations = self.definition.quantisations
        scales = {name + SCALES for name in quantisations}
        names = {name: single_layer_names(name) for name in shardings if name not in scales}
        weights = {
            name: weights[name] if layers == [name] else np.stack([weights[x] for x in layers])
            for name, layers in names.items()
        }
        weights |= in_codes({name: weights[name] for name in quantisations}, quantisations)
        dtypes = self.definition.abstract_parameters(jnp.float32)
        weights = {name: x.astype(dtypes[name].dtype) for name, x in weights.items()}
        return {name: jax.device_put(x, shardings[name]) for name, x in weights.items()}

    @cached_property
    def graphs(self) -> CompiledGraphs:
        planned = plan_graphs(self.definition, self.grid, self.placement, jnp.dtype(jnp.float32))
        return CompiledGraphs(self.grid, _CompiledWhenCalled(planned))

    def put(self, arrays: Any) -> Any:
        return HostArrays(self.placement.replicated).put(arrays)

    def empty_state(self) -> DecodeState:
        return self.graphs.empty_state()

    def prefill(
        self, rows: Mapping[int, Row], state: DecodeState | None = None, start: int = 0
    ) -> tuple[DecodeState, list[PrefillOutput]]:
        """Prefill each prompt into its slot; return the state and the output of every call.

        The rows of a call are in the order of `rows`. Prompts continue from token `start`.
        """
        state, outputs = self.empty_state() if state is None else state, []
        for bucket, pieces in self._calls(rows, start):
            arguments = self._packed(rows, bucket, pieces)[:3]
            key = GraphKey("prefill", bucket)
            state, output = self.graphs.call(key, self.parameters, state, *arguments)
            outputs.append(jax.device_get(output))
        return state, outputs

    def score(self, rows: Mapping[int, Row], num_logprobs: int) -> dict[int, TokenScores]:
        """Return the scores of every token except the first of each prompt, by slot."""
        state = self.empty_state()
        found: dict[int, list[TokenScores]] = {slot: [] for slot in rows}
        for bucket, pieces in self._calls(rows):
            wanted_B = self.put(np.full(bucket.batch, num_logprobs, np.int32))
            arguments, key = self._packed(rows, bucket, pieces), GraphKey("score", bucket)
            state, output = self.graphs.call(key, self.parameters, state, *arguments, wanted_B)
            for i, piece in enumerate(pieces):
                of_piece = jax.tree.map(lambda x, i=i, n=piece.count: x[i, :n], output.scores)
                found[piece.slot].append(jax.device_get(of_piece))
        return {
            slot: jax.tree.map(lambda *x: np.concatenate(x)[:-1], *scores)
            for slot, scores in found.items()
        }

    def fork(self, state: DecodeState, source: int, slot: int, row: Row) -> DecodeState:
        """Copy one slot to another, with `row`'s sampling options; return the state."""
        page_BN = self.pages_of([slot], self.grid.max_length)
        from_N = np.full_like(page_BN[0], self.grid.pages)
        if source != self.grid.decode_slots:
            (from_N,) = self.pages_of([source], self.grid.max_length)
        pages = from_N, page_BN[0]
        arguments = self.put((np.int32(source), np.int32(slot), self._sampling(row), *pages))
        return self.graphs.call(FORK, self.parameters, state, *arguments)[0]

    def clear(self, state: DecodeState, slot: int) -> DecodeState:
        return self.fork(state, self.grid.decode_slots, slot, Row(()))

    def _calls(
        self, rows: Mapping[int, Row], start: int = 0
    ) -> Iterator[tuple[PrefillBucket, list[PromptPiece]]]:
        """Yield prefill calls with a piece of every prompt that continues in the same bucket."""
        grid, done = self.grid, dict.fromkeys(rows, start)
        while left := {n: len(row.prompt) for n, row in rows.items() if done[n] < len(row.prompt)}:
            first = next(iter(left))
            bucket = grid.bucket_of(left[first], done[first])
            pieces, num_before = [], -1
            # a call has several pieces of a prompt
            while num_before < len(pieces):
                num_before = len(pieces)
                for slot, length in left.items():
                    begin, limit = done[slot], rows[slot].limit or grid.max_length
                    if len(pieces) == bucket.batch or begin >= length:
                        continue
                    if grid.bucket_of(length, begin) != bucket:
                        continue
                    num_taken = sum(piece.count for piece in pieces if piece.slot == slot)
                    if grid.row_tokens and num_taken + bucket.tokens > grid.row_tokens > 1:
                        continue
                    request = ScheduledRequest(0, length, limit, 1, is_scored=False)
                    count = min(bucket.tokens, length - begin)
                    pieces.append(PromptPiece(slot, ScheduledSequence(request, 0), begin, count))
                    done[slot] += count
            yield bucket, pieces

    def _packed(
        self, rows: Mapping[int, Row], bucket: PrefillBucket, pieces: list[PromptPiece]
    ) -> Any:
        """Return `rows, requests, tokens_BT, next_BT` on the devices."""
        of_pieces = [rows[piece.slot] for piece in pieces]
        prompts, sampling = [row.prompt for row in of_pieces], map(self._sampling, of_pieces)
        slots = self.grid.decode_slots
        page_BN = None
        if slots:
            page_BN = self.pages_of([piece.slot for piece in pieces], bucket.length)
            # rows without tokens have no pages
            padding = [(0, bucket.batch - len(pieces)), (0, 0)]
            page_BN = np.pad(page_BN, padding, constant_values=self.grid.pages)
        packed, tokens_BT, next_BT = pack_pieces(pieces, prompts, bucket, slots, page_BN)
        jobs = [piece.sequence.request for piece in pieces]
        requests = pack_requests(jobs, list(sampling), bucket.batch)
        return self.put((packed, requests, tokens_BT, next_BT))

    def _sampling(self, row: Row) -> SamplingState:
        request = ScheduledRequest(0, len(row.prompt), 0, 1, is_scored=False)
        return pack_sampling(
            row.params,
            ScheduledSequence(request, row.sample),
            seed=row.seed,
            stop_ids=() if row.params.ignore_eos else (STOP_ID,),
            vocab_size=self.definition.padded_vocab,
            adapter=None if self.adapters is None else row.adapter,
        )

    def answer(
        self,
        rows: Mapping[int, Row],
        state: DecodeState | None = None,
        num_calls: int = 3,
        groups: Sequence[SharedGroup] = (),
    ) -> Answers:
        """Prefill the rows in these slots, decode them, and return the results."""
        state, _ = self.prefill(rows, state)
        return self.decode(state, rows, num_calls, groups)

    def decode(
        self,
        state: DecodeState,
        slots: Iterable[int],
        num_calls: int = 3,
        groups: Sequence[SharedGroup] = (),
    ) -> Answers:
        prompt_logprobs_BV = self._logprobs(state.logits_BV)
        is_live_B = np.zeros(self.grid.decode_slots, bool)
        is_live_B[list(slots)] = True
        page_BN = self.pages_of(range(self.grid.decode_slots), self.grid.max_length)
        shared = pack_shared(groups, page_BN, self.grid)
        arguments = self.put((is_live_B, SlotPages(page_BN, shared)))
        outputs = []
        for _ in range(num_calls):
            key = GraphKey("decode")
            state, output = self.graphs.call(key, self.parameters, state, *arguments)
            outputs.append(jax.device_get(output))
        joined = jax.tree.map(lambda *calls: np.concatenate(calls, axis=1), *map(_steps, outputs))
        is_finite_B, is_clean_B = (
            np.stack([getattr(output, name) for output in outputs]).all(axis=0)
            for name in ("is_finite_B", "is_clean_B")
        )
        output = joined._replace(
            is_finite_B=is_finite_B, is_clean_B=is_clean_B, is_active_B=outputs[-1].is_active_B
        )
        return Answers(prompt_logprobs_BV, self._logprobs(state.logits_BV), output, state)

    def _logprobs(self, logits_BV: jax.Array) -> np.ndarray:
        return np.asarray(jax.nn.log_softmax(np.asarray(logits_BV)[:, : self.config.vocab_size]))


def _steps(output: DecodeOutput) -> DecodeOutput:
    return output._replace(is_active_B=None, is_finite_B=None, is_clean_B=None, experts=None)


@lru_cache(maxsize=8)
def laid_out(family: str, layout: str | None = None, num_kv_heads: int = 8) -> LaidOut:
    """Return a model under a layout, compiled once for consecutive tests.

    Executables of all pairs would need more memory maps than Linux allows a process.
    """
    config = config_of(family, num_kv_heads)
    return LaidOut(config, None if layout is None else layout_of(layout))
