"""The decoder: one definition for every family, read whole, in chunks, or token by token.

A family chooses sizes and options in `DecoderConfig`; nothing here branches on a family's name.
Knows logical axes and positions; knows no mesh, bucket, file or text. `attend` and `operations` are
injected: other attention implementations and layouts must not change the answer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import axes
from .attention import EMPTY_POSITION, Attend, Queries, Visibility, with_sinks
from .blockwise import attend_blockwise
from .chunk_cache import (
    ChunkContext,
    ChunkRows,
    keep_chunk,
    keep_positions,
    layer_of_slots,
    positions_below,
    with_chunk,
)
from .config import AS_PUBLISHED, PLAIN_SCORES, Arrangement, DecoderConfig, Window
from .kept_layers import (
    KeptLayer,
    OneLayer,
    PromptKeysValues,
    PromptLatents,
    PromptLayer,
    PromptLayers,
    one_layer,
)
from .kv_cache import (
    AttendLayer,
    CachedRows,
    Kept,
    KVCache,
    Positions,
    PromptRows,
    append,
    append_position,
    attend_cached,
)
from .layer_groups import layer_groups, place_name, places
from .layers import (
    Embedding,
    GatedMlp,
    HeadsNorm,
    Norm,
    Unnormed,
    constant,
    merge_heads,
    scaled,
    soft_cap,
    weight,
)
from .mla import LatentHeads
from .moe.config import LOSSLESS, Dispatch, MoeConfig
from .moe.layer import ExpertCall, SparseMlp
from .moe.use import ExpertReport
from .operations import ON_ONE_DEVICE, Operations, einsum
from .rope import PositionCode, encode, position_code
from .stripes import IN_ORDER
from .turns import run_groups


class Attention(nnx.Module):
    """Projections of grouped-query attention (Ainslie et al. 2023, 2305.13245), around `attend`."""

    def __init__(self, rngs: nnx.Rngs, config: DecoderConfig, arrangement: Arrangement):
        D, H, copies = config.embed, config.head_dim, arrangement.kv_copies
        K, G = config.num_kv_heads * copies, config.heads_per_kv // copies
        heads = (axes.QUERY_HEADS, "", "")
        self.qkv = weight(rngs, (D, K, G + 2, H), (axes.EMBED_IN, *heads), D)
        self.output = weight(rngs, (K, G, H, D), (*heads, axes.EMBED_IN), K * G * H)
        if config.qkv_bias:
            self.qkv_bias = constant(0.0, (K, G + 2, H), heads)
        if config.output_bias:
            self.output_bias = constant(0.0, (D,), ("",))
        if config.qk_norm:
            self.query_norm, self.key_norm = _query_key_norms(config, copies)
        if config.sinks:
            self.sinks = constant(0.0, (K, G), heads[:2])
        self.config = config

    def __call__(
        self, x_BTD: jax.Array, by: PositionCode, attend_layer: AttendLayer, operations: Operations
    ) -> jax.Array:
        q_BTKGH, new = self._project(x_BTD, by, operations)
        sink_KG = self.sinks[...] if self.config.sinks else None
        out_BTKGH = attend_layer(Queries(q_BTKGH, sink_KG), new)
        merge = ("BTKGH,KGHD->BTD", merge_heads)
        out_BTD = operations.project(*merge, out_BTKGH, self.output, axes.HEADS, axes.RESIDUAL)
        if self.config.output_bias:
            out_BTD = out_BTD + self.output_bias[...][None, None]
        return out_BTD

    def _project(
        self, x_BTD: jax.Array, by: PositionCode, operations: Operations
    ) -> tuple[jax.Array, PromptKeysValues]:
        product = einsum("BTD,DKJH->BTKJH")
        qkv_BTKJH = operations.project(*product, x_BTD, self.qkv, axes.RESIDUAL, axes.HEADS)
        if self.config.qkv_bias:
            qkv_BTKJH = qkv_BTKJH + self.qkv_bias[...][None, None]
        G = qkv_BTKJH.shape[3] - 2
        q_BTKGH, k_BTKH, v_BTKH = (
            qkv_BTKJH[..., :G, :],
            qkv_BTKJH[..., G, :],
            qkv_BTKJH[..., G + 1, :],
        )
        if self.config.qk_norm:
            q_BTKGH, k_BTKH = self.query_norm(q_BTKGH), self.key_norm(k_BTKH)
        B, T, K, _, H = q_BTKGH.shape
        q_BTNH, k_BTKH = encode(q_BTKGH.reshape(B, T, K * G, H), k_BTKH, by)
        new = PromptKeysValues(k_BTKH.transpose(0, 2, 3, 1), v_BTKH.swapaxes(1, 2))
        return q_BTNH.reshape(B, T, K, G, H), new


def _query_key_norms(config: DecoderConfig, kv_copies: int) -> tuple[Norm, Norm]:
    N, K, H = config.num_query_heads, config.num_kv_heads, config.head_dim
    match config.qk_norm_kind:
        case "head":
            return Norm(H, config), Norm(H, config)
        case "heads" | "projection":
            return HeadsNorm(N, config), HeadsNorm(K, config, kv_copies)


def _attention(
    rngs: nnx.Rngs, config: DecoderConfig, arrangement: Arrangement
) -> Attention | LatentHeads:
    if config.latent is not None:
        return LatentHeads(rngs, config, config.latent)
    return Attention(rngs, config, arrangement)


class Block(nnx.Module):
    """Residual block: attention, then MLP, each between the norms that the configuration has."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        config: DecoderConfig,
        arrangement: Arrangement,
        moe: MoeConfig | None = None,
    ):
        """`moe` makes the block sparse."""

        def norm(place: str) -> Norm | Unnormed:
            is_there = config.norm_placement in (place, "both")
            return Norm(config.embed, config) if is_there else Unnormed()

        self.attention_norm = norm("before")
        self.attention = _attention(rngs, config, arrangement)
        self.attention_post_norm = norm("after")
        self.mlp_norm = norm("before")
        self.mlp = GatedMlp(rngs, config) if moe is None else SparseMlp(rngs, config, moe)
        self.mlp_post_norm = norm("after")
        self.multiplier = config.multipliers.residual

    def __call__(
        self,
        x_BTD: jax.Array,
        by: PositionCode,
        attend_layer: AttendLayer,
        operations: Operations,
        experts: ExpertCall,
    ) -> jax.Array:
        out_BTD = self.attention(self.attention_norm(x_BTD), by, attend_layer, operations)
        x_BTD = x_BTD + scaled(self.attention_post_norm(out_BTD), self.multiplier)
        x_BTD = operations.constrain(x_BTD, axes.RESIDUAL)
        out_BTD = self.mlp(self.mlp_norm(x_BTD), operations, experts)
        x_BTD = x_BTD + scaled(self.mlp_post_norm(out_BTD), self.multiplier)
        return operations.constrain(x_BTD, axes.RESIDUAL)


class ParallelBlock(nnx.Module):
    """Residual block whose attention and MLP read one norm (Wang, Komatsuzaki 2021, GPT-J-6B)."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        config: DecoderConfig,
        arrangement: Arrangement,
        moe: MoeConfig | None = None,
    ):
        """`moe` makes the block sparse."""
        self.norm = Norm(config.embed, config)
        self.attention = _attention(rngs, config, arrangement)
        self.mlp = GatedMlp(rngs, config) if moe is None else SparseMlp(rngs, config, moe)
        self.multiplier = config.multipliers.residual

    def __call__(
        self,
        x_BTD: jax.Array,
        by: PositionCode,
        attend_layer: AttendLayer,
        operations: Operations,
        experts: ExpertCall,
    ) -> jax.Array:
        normed_BTD = self.norm(x_BTD)
        out_BTD = self.attention(normed_BTD, by, attend_layer, operations)
        out_BTD = out_BTD + self.mlp(normed_BTD, operations, experts)
        return operations.constrain(x_BTD + scaled(out_BTD, self.multiplier), axes.RESIDUAL)


def _place(
    rngs: nnx.Rngs, config: DecoderConfig, arrangement: Arrangement, layers: range
) -> Block | ParallelBlock:
    """The block of a layer; of several that run in turns, with the weights of all of them."""
    block = ParallelBlock if config.is_parallel else Block
    _, is_sparse = config.layer_kinds[layers.start]
    moe = config.moe if is_sparse else None
    if len(layers) == 1:
        return block(rngs, config, arrangement, moe)

    @nnx.split_rngs(splits=len(layers))
    @nnx.vmap
    def blocks(rngs: nnx.Rngs) -> Block | ParallelBlock:
        return block(rngs, config, arrangement, moe)

    return blocks(rngs)


def _kept(new: PromptKeysValues | None, latents: PromptLatents | None) -> PromptLayer:
    """What is kept of new tokens."""
    kept = new if latents is None else latents
    assert kept is not None
    return kept


class Decoder(nnx.Module):
    """Embedding, blocks, final norm and head."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        arrangement: Arrangement = AS_PUBLISHED,
        attend: Attend = attend_blockwise,
        operations: Operations = ON_ONE_DEVICE,
        dispatch: Dispatch = LOSSLESS,
    ):
        num_rows = arrangement.padded_vocab or config.vocab_size
        self.embedding = Embedding(rngs, num_rows, config.embed)
        self.groups = layer_groups(config, arrangement)
        self.layers = nnx.List(
            _place(rngs, config, arrangement, layers) for layers in places(config, arrangement)
        )
        self.final_norm = Norm(config.embed, config)
        if not config.tie_embeddings:
            self.head = Embedding(rngs, num_rows, config.embed)
        self.config = config
        self.attend = attend
        self.operations = operations
        self.dispatch = dispatch

    def prefill(
        self, tokens_BT: jax.Array, true_length_B: jax.Array
    ) -> tuple[jax.Array, tuple[PromptLayer | PromptLayers, ...], ExpertReport | None]:
        """Final hidden states `x_BTD` of right-padded prompts, and each layer's keys and values.

        Tokens come in order and leave as `operations` lays them. Padding follows the tokens, so
        causality alone hides it from them; its own outputs mean nothing, and it takes no expert.
        The last of the three results is of sparse layers.
        """
        tokens_BT = self.operations.prompt_stripes.lay(tokens_BT, axis=1)
        position_1T = self.operations.positions(tokens_BT.shape[1])
        query_position_BT = jnp.broadcast_to(position_1T, tokens_BT.shape)
        is_token_BT = query_position_BT < true_length_B[:, None]
        key_position_BT = jnp.where(is_token_BT, query_position_BT, EMPTY_POSITION)
        is_in_order = self.operations.prompt_stripes == IN_ORDER
        attend_tokens = self._scored(self.operations.over_tokens(self.attend))

        def attend_layer(window: Window, *_: Any) -> AttendLayer:
            def attend_self(
                queries: Queries, new: PromptKeysValues, rows: PromptRows, _: None
            ) -> tuple[jax.Array, PromptLayer]:
                q_BTKGH, sink_KG = queries
                positions = rows.query_position_BT, rows.key_position_BT
                visibility = Visibility(*positions, window, is_in_order)
                attended = attend_tokens(q_BTKGH, *new, visibility)
                return with_sinks(*attended, sink_KG), _kept(new, rows.latents)

            def attend(
                queries: Queries, new: PromptKeysValues | None, latents: PromptLatents | None
            ) -> tuple[jax.Array, PromptLayer]:
                rows = PromptRows(query_position_BT, key_position_BT, latents)
                return self.operations.attend(
                    attend_self, queries, new, rows, None, type(_kept(new, latents))
                )

            return AttendLayer(attend, reads_cache=False)

        return self._blocks(tokens_BT, position_1T, attend_layer, is_token_BT)

    def prefill_chunk(
        self, tokens_BT: jax.Array, rows: ChunkRows, cache: KVCache, stored: Operations
    ) -> tuple[jax.Array, KVCache, ExpertReport | None]:
        """Final hidden states `x_BTD` of right-padded pieces of prompts, written into the cache.

        Each row attends to what its slot holds of the tokens before it, and to itself. `stored` are
        the operations of the cache, in whose order tokens leave. Padding takes no expert.
        """
        tokens_BT = self.operations.prompt_stripes.lay(tokens_BT, axis=1)
        offset_1T = jnp.asarray(self.operations.positions(tokens_BT.shape[1]))
        position_BT = rows.start_B[:, None] + offset_1T
        is_token_BT = offset_1T < rows.count_B[:, None]
        kept_position_BT = jnp.where(is_token_BT, position_BT, EMPTY_POSITION)
        # a stripe's last entries are not the last of all
        num_unseen = 0 if stored.cache_stripes.count > 1 else tokens_BT.shape[1]
        positions = positions_below(cache.positions, rows, num_unseen, stored)
        num_heads = self.operations.num_cache_heads(self.config.num_kv_heads)
        attend_segment = self._scored(self.attend)

        def attend_layer(window: Window, layer: OneLayer, _: None) -> AttendLayer:
            def attend_chunk(
                queries: Queries, new: PromptKeysValues | None, rows: ChunkContext, old: OneLayer
            ) -> tuple[jax.Array, PromptLayer]:
                q_BTKGH, sink_KG = queries
                position_BT, positions, kept_position_BT, latents = rows
                kept = _kept(new, latents)
                seen, key_position_BS = with_chunk(old, kept), positions.of(window)
                key_position_BS = (*key_position_BS, kept_position_BT)
                out_BTKGH = attend_cached(
                    attend_segment, q_BTKGH, seen, position_BT, key_position_BS, window, sink_KG,
                    self.operations,
                )  # fmt: skip
                return out_BTKGH, kept

            def attend(
                queries: Queries, new: PromptKeysValues | None, latents: PromptLatents | None
            ) -> tuple[jax.Array, OneLayer]:
                of_rows = ChunkContext(position_BT, positions, kept_position_BT, latents)
                of_layer = rows.after(queries[0], self.operations)
                is_ring = cache.positions.is_ring(window)
                num_left = 0 if is_ring else num_unseen
                old = layer_of_slots(layer, of_layer.slot_B, num_left, num_heads, stored)
                out_BTKGH, kept = self.operations.attend(
                    attend_chunk, queries, new, of_rows, old, type(_kept(new, latents))
                )
                # what a ring writes is made of what it had, a block waits for those that read
                written = of_layer if is_ring else of_layer.after(out_BTKGH, self.operations)
                return out_BTKGH, keep_chunk(layer, kept, written, is_ring, stored)

            return AttendLayer(attend, reads_cache=True)

        x_BTD, layers, report = self._blocks(
            tokens_BT, position_BT, attend_layer, is_token_BT, cache.layers
        )
        kept_positions = keep_positions(cache.positions, kept_position_BT, rows, stored)
        return x_BTD, KVCache(layers, kept_positions), report

    def decode(
        self, token_B: jax.Array, position_B: jax.Array, cache: KVCache, is_token_B: jax.Array
    ) -> tuple[jax.Array, KVCache, ExpertReport | None]:
        """`logits_BV` after one more token per row, written into the cache at its position.

        Rows without a token take no expert; what is computed for them means nothing.
        """
        operations = self.operations

        def mark(positions: Positions, position_B: jax.Array) -> Positions:
            return append_position(positions, position_B, operations.stripe)

        positions = operations.by_row(mark, cache.positions, position_B)
        attend_segment = self._scored(self.attend)
        # a ring is as long as its window: it fills up, and then all of it is seen
        sees_beginning = operations.cache_stripes == IN_ORDER

        def attend_layer(window: Window, old: KeptLayer, turn: jax.Array | None) -> AttendLayer:
            def attend_cache(
                queries: Queries, new: PromptKeysValues | None, rows: CachedRows, old: KeptLayer
            ) -> tuple[jax.Array, KeptLayer]:
                q_BTKGH, sink_KG = queries
                position_B, positions, turn, latents = rows
                entry_B = operations.stripe.place(positions.entry(position_B, window))
                kept = append(old, _kept(new, latents), entry_B, turn)
                layer = one_layer(kept, turn)
                position_B1, key_position_BS = position_B[:, None], positions.of(window)
                out_BTKGH = attend_cached(
                    attend_segment, q_BTKGH, layer, position_B1, key_position_BS, window, sink_KG,
                    operations, sees_beginning,
                )  # fmt: skip
                return out_BTKGH, kept

            def attend(
                queries: Queries, new: PromptKeysValues | None, latents: PromptLatents | None
            ) -> tuple[jax.Array, KeptLayer]:
                rows = CachedRows(position_B, positions, turn, latents)
                return operations.attend(attend_cache, queries, new, rows, old, type(old))

            return AttendLayer(attend, reads_cache=True)

        x_B1D, layers, report = self._blocks(
            token_B[:, None], position_B[:, None], attend_layer, is_token_B[:, None], cache.layers
        )
        return self.logits(x_B1D[:, 0]), KVCache(layers, positions), report

    def logits(self, x_BD: jax.Array) -> jax.Array:
        """Float32 logits of final hidden states; of ids that pad the vocabulary, -inf."""
        head = self.embedding if self.config.tie_embeddings else self.head
        logits_BV = head.logits(x_BD, self.operations)
        logits_BV = scaled(logits_BV, self.config.multipliers.logits)
        logits_BV = soft_cap(logits_BV, self.config.logit_cap)
        if logits_BV.shape[-1] > self.config.vocab_size:
            id_BV = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, logits_BV.ndim - 1)
            logits_BV = jnp.where(id_BV < self.config.vocab_size, logits_BV, -jnp.inf)
        return self.operations.constrain(logits_BV, axes.LOGITS)

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """The residual stream as it begins."""
        x_BTD = self.embedding(tokens_BT, self.operations)
        # a plain product rounds the factor to the dtype of the table, as it should
        factor = self.config.multipliers.embedding
        return x_BTD if factor == 1.0 else x_BTD * factor

    def _scored(self, attend: Attend) -> Attend:
        """An implementation that makes scores as the model asks; as it is where nothing is asked.

        For what `over_tokens` gives: that passes scores on, in place of any bound before it.
        """
        scores = self.config.attention_scores
        return attend if scores == PLAIN_SCORES else partial(attend, scores=scores)

    def _blocks(
        self,
        tokens_BT: jax.Array,
        position_BT: jax.Array | np.ndarray,
        attend_layer: Callable[..., AttendLayer],
        is_token_BT: jax.Array,
        cache: tuple[KeptLayer, ...] | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...], ExpertReport | None]:
        """Final hidden states, what each place of layers keeps, and what sparse layers report.

        `attend_layer` is given a window, what of the cache there is, and the turn of the layer.
        """
        experts = ExpertCall(is_token_BT, self.dispatch)
        ropes = dict.fromkeys(map(self.config.rope_of, self.config.windows))
        by = {rope: position_code(position_BT, rope, self.config.rope_dim) for rope in ropes}

        def run_layer(
            layers: range,
            block: Block | ParallelBlock,
            x_BTD: jax.Array,
            old: KeptLayer | None,
            turn: jax.Array | None,
            experts: ExpertCall,
        ) -> tuple[jax.Array, Kept | None]:
            window = self.config.windows[layers.start]
            attend = attend_layer(window, old, turn)
            with jax.named_scope(f"layers.{place_name(layers)}"):
                rope = self.config.rope_of(window)
                x_BTD = block(x_BTD, by[rope], attend, self.operations, experts)
            return x_BTD, attend.kept

        x_BTD = self.embed(tokens_BT)
        x_BTD, kept = run_groups(self.groups, self.layers, run_layer, x_BTD, cache, experts)
        return self.final_norm(x_BTD), kept, experts.report()
