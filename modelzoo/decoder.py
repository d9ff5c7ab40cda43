"""The decoder: one definition for all families, run on whole prompts, chunks or single tokens.

A family is a choice of sizes and options in `DecoderConfig`; no code here depends on a family's
name. The attention implementation `attend` and the `operations` of a layout are injected, and must
not change the answer. Knows logical axes and positions; knows no mesh, bucket, file or text.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import axes
from .attention.attend import Attend, SlotReader, soft_cap
from .attention.blockwise import attend_blockwise
from .attention.layer_attention import (
    CallAttention,
    ChunkAttention,
    ChunkContext,
    PromptAttention,
    PromptRows,
    TokenAttention,
    TokenRows,
    WriteCache,
)
from .attention.page_attention import PageAttention, PageRows
from .attention.page_pieces import write_prompts
from .attention.paged import AttendPages, attend_in_groups
from .attention.prompt_pieces import (
    PromptPieces,
    positions_below,
    write_piece,
    write_positions,
)
from .attention.shared_pages import SlotPages
from .block import make_block
from .cache.kv_cache import KVCache, Positions, append_position
from .cache.layer_state import LayerState, NewEntries
from .cache.segments import EMPTY_POSITION, IN_ORDER, change_stripes
from .config import AS_PUBLISHED, Arrangement, DecoderConfig
from .layer_config import Attention
from .layer_groups import Group, block_layers, layer_groups, layers_name
from .layer_scan import Cache, scan_group
from .layers import Embedding, InputSum, NoNorm, Norm, scale_by
from .moe.call import ExpertCall, ExpertReport
from .moe_config import LOSSLESS, Dispatch
from .operations import ON_ONE_DEVICE, Operations
from .pooling import Pooler
from .rope import position_code


def _write_nothing(
    cache: None, cache_update: NewEntries, scan_index: jax.Array, options: Attention
) -> None:
    """Write nothing, for prompts without a cache."""
    del cache, cache_update, scan_index, options


class Decoder(nnx.Module):
    """A decoder-only transformer or an encoder: embedding, blocks, final norm, and head if any."""

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
            make_block(rngs, config, arrangement, layers)
            for layers in block_layers(config, arrangement)
        )
        if config.inputs is not None:
            self.inputs = InputSum(rngs, config, config.inputs)
        self.final_norm = Norm(config.embed, config) if config.has_final_norm else NoNorm()
        if config.has_head and not config.tie_embeddings:
            self.head = Embedding(rngs, num_rows, config.embed)
        self.pooler = Pooler(rngs, config.embed, config.pooling)
        self.config = config
        self.attend = attend
        self.attend_pages: AttendPages = attend_in_groups
        self.operations = operations
        self.dispatch = dispatch

    def forward(
        self, tokens_BT: jax.Array, true_length_B: jax.Array, first_B: jax.Array | None = None
    ) -> tuple[jax.Array, ExpertReport | None]:
        """Run right-padded prompts without a cache.

        Args:
          tokens_BT: Token ids in order. Padding follows the tokens; no token sees it, and it takes
            no expert.
          true_length_B: The number of tokens of each prompt.
          first_B: The number of tokens with type 0, in models with token types; by default all.

        Returns:
          Final hidden states `x_BTD`, in the stripes of `operations`; those of padding are
          undefined. The report of sparse layers, or None without any.
        """
        call = tokens_BT, true_length_B, None, _write_nothing
        x_BTD, _, report = self._whole(*call, first_B=first_B)
        return x_BTD, report

    def pool(self, x_BTD: jax.Array, true_length_B: jax.Array) -> jax.Array:
        """The float32 vector `y_BD` of each prompt, from its final hidden states."""
        position_1T = self.operations.positions(x_BTD.shape[1])
        return self.pooler(x_BTD, position_1T, true_length_B)

    def run_layers(self, x_BTD: jax.Array, true_length_B: jax.Array) -> jax.Array:
        """The residual stream after all layers, for right-padded prompts without a cache.

        Args:
          x_BTD: The residual stream before the first layer, as `embed` returns it.
          true_length_B: The number of tokens of each prompt.
        """
        call = self._prompt_call(x_BTD.shape[:2], true_length_B, _write_nothing)
        return self._run_blocks(x_BTD, *call, None)[0]

    def prefill(
        self,
        tokens_BT: jax.Array,
        rows: PromptPieces,
        cache: KVCache,
        cache_operations: Operations,
        adapter_B: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache, ExpertReport | None]:
        """Run right-padded pieces of prompts and write them to the cache.

        Each row attends to the earlier tokens of its prompt in its slot, and to itself. A whole
        prompt attends only to itself. Padding takes no expert.

        Args:
          tokens_BT: Token ids in order.
          rows: The slot, first position and token count of each row.
          cache: The cache, which the caller donates.
          cache_operations: The operations by which the cache is laid out.
          adapter_B: The number of each row's adapter, if weights are adapted.

        Returns:
          Final hidden states `x_BTD`, in the stripes of `operations`; the updated cache; the report
          of sparse layers, or None without any.
        """
        if rows.start_B is not None and rows.page_BN is not None:
            in_pages = PageRows(rows.start_B, rows.count_B, rows.page_BN, rows.slot_B, jnp.int32(0))
            return self._extend(
                tokens_BT, in_pages, cache, cache_operations, adapter_B, is_gathered=True
            )
        if rows.start_B is not None:
            return self._prefill_chunk(tokens_BT, rows, cache, cache_operations, adapter_B)
        return self._prefill_whole(tokens_BT, rows, cache, cache_operations, adapter_B)

    def _prefill_whole(
        self,
        tokens_BT: jax.Array,
        rows: PromptPieces,
        cache: KVCache,
        cache_operations: Operations,
        adapter_B: jax.Array | None,
    ) -> tuple[jax.Array, KVCache, ExpertReport | None]:
        """Run whole prompts, which attend to themselves alone, and write them to the cache."""
        stripes, cache_stripes = self.operations.prompt_stripes, cache_operations.cache_stripes

        def write(
            layers: LayerState, new: NewEntries, scan_index: jax.Array, options: Attention
        ) -> LayerState:
            arrays = zip(new, new.POSITION_AXES, strict=True)
            new = type(new)(
                *(change_stripes(x, axis, stripes, cache_stripes, 0) for x, axis in arrays)
            )
            if rows.page_BN is not None:
                return write_prompts(layers, new, scan_index, rows, cache_operations)
            is_rolling = cache.positions.is_rolling(options.window)
            return write_piece(layers, new, scan_index, rows, is_rolling, cache_operations)

        call = tokens_BT, rows.count_B, cache.layers, write
        x_BTD, layers, report = self._whole(*call, adapter_B=adapter_B)
        if rows.page_BN is not None:
            return x_BTD, KVCache(layers, cache.positions), report
        position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        position_BT = jnp.where(position_BT < rows.count_B[:, None], position_BT, EMPTY_POSITION)
        position_BT = change_stripes(position_BT, 1, IN_ORDER, cache_stripes, EMPTY_POSITION)
        positions = write_positions(cache.positions, position_BT, rows, cache_operations)
        return x_BTD, KVCache(layers, positions), report

    def _whole(
        self,
        tokens_BT: jax.Array,
        true_length_B: jax.Array,
        cache: Cache | None,
        write: WriteCache,
        *,
        first_B: jax.Array | None = None,
        adapter_B: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...], ExpertReport | None]:
        tokens_BT = self.operations.prompt_stripes.permute(tokens_BT, axis=1)
        call = self._prompt_call(tokens_BT.shape, true_length_B, write)
        x_BTD = self.embed(tokens_BT)
        if self.config.inputs is not None:
            x_BTD = self.inputs(x_BTD, call[0], true_length_B if first_B is None else first_B)
        x_BTD, layers, report = self._run_blocks(x_BTD, *call, cache, adapter_B=adapter_B)
        return self.final_norm(x_BTD), layers, report

    def _prompt_call(
        self, shape: tuple[int, ...], true_length_B: jax.Array, write: WriteCache
    ) -> tuple[jax.Array | np.ndarray, PromptAttention, jax.Array]:
        """Positions, attention and the mask of tokens of whole prompts of shape `[B, T]`."""
        position_1T = self.operations.positions(shape[1])
        query_position_BT = jnp.broadcast_to(position_1T, shape)
        is_token_BT = query_position_BT < true_length_B[:, None]
        key_position_BT = jnp.where(is_token_BT, query_position_BT, EMPTY_POSITION)
        attend_tokens = self.operations.over_tokens(self.attend)
        rows = PromptRows(query_position_BT, key_position_BT)
        attention = PromptAttention(attend_tokens, self.operations, rows, write)
        return position_1T, attention, is_token_BT

    def _prefill_chunk(
        self,
        tokens_BT: jax.Array,
        rows: PromptPieces,
        cache: KVCache,
        cache_operations: Operations,
        adapter_B: jax.Array | None,
    ) -> tuple[jax.Array, KVCache, ExpertReport | None]:
        tokens_BT = self.operations.prompt_stripes.permute(tokens_BT, axis=1)
        offset_1T = jnp.asarray(self.operations.positions(tokens_BT.shape[1]))
        position_BT = rows.first_B[:, None] + offset_1T
        is_token_BT = offset_1T < rows.count_B[:, None]
        new_position_BT = jnp.where(is_token_BT, position_BT, EMPTY_POSITION)
        # the last entries of a stripe are not the last entries of the cache
        num_unseen = 0 if cache_operations.cache_stripes.count > 1 else tokens_BT.shape[1]
        cached = positions_below(cache.positions, rows, num_unseen, cache_operations)
        attention = ChunkAttention(
            self.attend,
            self.operations,
            cache_operations,
            rows,
            ChunkContext(position_BT, cached, new_position_BT),
            num_unseen=num_unseen,
            reads_slots=isinstance(self.attend, SlotReader),
        )
        call = position_BT, attention, is_token_BT, cache.layers, adapter_B
        x_BTD, layers, report = self._run_blocks(self.embed(tokens_BT), *call)
        positions = write_positions(cache.positions, new_position_BT, rows, cache_operations)
        return self.final_norm(x_BTD), KVCache(layers, positions), report

    def _extend(
        self,
        tokens_BT: jax.Array,
        rows: PageRows,
        cache: KVCache,
        cache_operations: Operations,
        adapter_B: jax.Array | None,
        *,
        is_gathered: bool,
    ) -> tuple[jax.Array, KVCache, ExpertReport | None]:
        """Run more tokens of each row, and write them to a cache in pages."""
        offset_1T = jnp.arange(tokens_BT.shape[1])[None]
        position_BT = rows.first_B[:, None] + offset_1T
        is_token_BT = offset_1T < rows.count_B[:, None]
        attention = PageAttention(self.attend_pages, cache_operations, rows, is_gathered)
        call = position_BT, attention, is_token_BT, cache.layers, adapter_B
        x_BTD, layers, report = self._run_blocks(self.embed(tokens_BT), *call)
        x_BTD = self.operations.prompt_stripes.permute(self.final_norm(x_BTD), axis=1)
        return x_BTD, KVCache(layers, cache.positions), report

    def decode(
        self,
        token_B: jax.Array,
        position_B: jax.Array,
        cache: KVCache,
        is_token_B: jax.Array,
        adapter_B: jax.Array | None = None,
        pages: SlotPages | None = None,
    ) -> tuple[jax.Array, KVCache, ExpertReport | None]:
        """Run one more token per row, and write it to the cache at its position.

        Rows without a token see nothing, write nothing and take no expert.

        Args:
          token_B: Token ids.
          position_B: The position of each token.
          cache: The cache, which the caller donates.
          is_token_B: Whether a row has a token.
          adapter_B: The number of each row's adapter, if weights are adapted.
          pages: The pages of each row, if the cache is in pages.

        Returns:
          Float32 `logits_BV`, undefined for rows without a token; the updated cache; the report of
          sparse layers, or None without any.
        """
        operations = self.operations
        if pages is not None:
            page_BN, shared = pages
            slot_B, count_B = jnp.arange(len(token_B)), is_token_B.astype(jnp.int32)
            rows = PageRows(position_B, count_B, page_BN, slot_B, jnp.int32(0), shared)
            call = token_B[:, None], rows, cache, operations, adapter_B
            x_B1D, cache, report = self._extend(*call, is_gathered=False)
            return self.logits(x_B1D[:, 0]), cache, report
        position_B = jnp.where(is_token_B, position_B, EMPTY_POSITION)
        position_B = operations.constrain(position_B, axes.LOGITS[:1])

        def mark(positions: Positions, position_B: jax.Array) -> Positions:
            return append_position(positions, position_B, operations.stripe)

        positions = operations.by_row(mark, cache.positions, position_B)
        rows = TokenRows(position_B, positions, jnp.int32(0))
        attention = TokenAttention(self.attend, operations, rows)
        call = position_B[:, None], attention, is_token_B[:, None], cache.layers
        x_B1D, layers, report = self._run_blocks(self.embed(token_B[:, None]), *call, adapter_B)
        logits_BV = self.logits(self.final_norm(x_B1D)[:, 0])
        return logits_BV, KVCache(layers, positions), report

    def logits(self, x_BD: jax.Array) -> jax.Array:
        """Float32 logits of final hidden states; -inf for the ids that pad the vocabulary."""
        head = self.embedding if self.config.tie_embeddings else self.head
        logits_BV = head.logits(x_BD, self.operations)
        logits_BV = scale_by(logits_BV, self.config.multipliers.logits)
        logits_BV = soft_cap(logits_BV, self.config.logit_cap)
        if logits_BV.shape[-1] > self.config.vocab_size:
            id_BV = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, logits_BV.ndim - 1)
            logits_BV = jnp.where(id_BV < self.config.vocab_size, logits_BV, -jnp.inf)
        return self.operations.constrain(logits_BV, axes.LOGITS)

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """The residual stream before the first block."""
        x_BTD = self.embedding(tokens_BT, self.operations)
        # NOTE: a plain product rounds the factor to the dtype of the table, as the models expect
        factor = self.config.multipliers.embedding
        return x_BTD if factor == 1.0 else x_BTD * factor

    def _run_blocks(
        self,
        x_BTD: jax.Array,
        position_BT: jax.Array | np.ndarray,
        attention: CallAttention,
        is_token_BT: jax.Array,
        cache: Cache | None,
        adapter_B: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache, ExpertReport | None]:
        """The residual stream after all layers, the cache of each block, and the report of sparse
        layers."""
        config, operations = self.config, self.operations.for_adapters(adapter_B)
        rotations = dict.fromkeys((x.rope, x.rope_dim) for x in config.attentions)
        codes = {rotation: position_code(position_BT, *rotation) for rotation in rotations}

        def run_group(
            group: Group,
            blocks: Sequence[Any],
            x_BTD: jax.Array,
            cache: Cache,
            scan_index: jax.Array,
            experts: ExpertCall,
        ) -> tuple[jax.Array, Cache]:
            new_cache: Cache = ()
            for layers, block, old in zip(group, blocks, cache, strict=True):
                options, new = config.layers[layers.start].attention, old
                with jax.named_scope(f"layers.{layers_name(layers)}"):
                    if options is None:
                        x_BTD = block.finish(x_BTD, None, None, operations, experts)
                    else:
                        attend = attention.layer(options, (old,), scan_index, x_BTD)
                        code, reads_cache = (
                            codes[options.rope, options.rope_dim],
                            attention.reads_cache,
                        )
                        inputs = block.project(x_BTD, code, operations, reads_cache=reads_cache)
                        out_BTKGH, update = attend(inputs.queries, inputs.new, inputs.latents)
                        x_BTD = block.finish(x_BTD, inputs, out_BTKGH, operations, experts)
                        new = attention.update_cache(options, old, update, scan_index, x_BTD)
                    new_cache += (new,)
            return x_BTD, new_cache

        experts = ExpertCall(is_token_BT, self.dispatch)
        new_cache: Cache = ()
        for group in self.groups:
            blocks = slice(len(new_cache), len(new_cache) + len(group))
            old = (None,) * len(group) if cache is None else cache[blocks]
            arguments = group, self.layers[blocks], x_BTD, old
            if len(group[0]) == 1:
                x_BTD, new = run_group(*arguments, jnp.int32(0), experts)
            else:
                x_BTD, new = scan_group(run_group, *arguments, experts)
            new_cache += new
        return x_BTD, new_cache, experts.report()
