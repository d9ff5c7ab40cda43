"""The decoder: one definition for every family, read whole, in chunks, or token by token.

A family chooses sizes and options in `DecoderConfig`; nothing here branches on a family's name.
Knows logical axes and positions; knows no mesh, bucket, file or text. `attend` and `operations` are
injected: other attention implementations and layouts must not change the answer.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import axes
from .attention import EMPTY_POSITION, Attend, soft_cap
from .block import make_block
from .blockwise import attend_blockwise
from .config import AS_PUBLISHED, Arrangement, DecoderConfig, Window
from .kv_cache import KVCache, Positions, append_position
from .layer_attention import (
    CallAttention,
    ChunkAttention,
    ChunkContext,
    PromptAttention,
    PromptRows,
    TokenAttention,
    WriteCache,
)
from .layer_cache import LayerCache, PromptLayer
from .layer_groups import Group, block_layers, layer_groups, layers_name
from .layer_scan import Cache, scan_group
from .layers import Embedding, Norm, scaled
from .moe.config import LOSSLESS, Dispatch
from .moe.layer import ExpertCall
from .moe.use import ExpertReport
from .operations import ON_ONE_DEVICE, Operations
from .prompt_pieces import PromptPieces, positions_below, write_piece, write_positions
from .rope import position_code
from .stripes import IN_ORDER, change_stripes


def _keep_nothing(cache: None, made: PromptLayer, scan_index: jax.Array, window: Window) -> None:
    """WriteCache nothing of prompts without a cache."""
    del cache, made, scan_index, window


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
            make_block(rngs, config, arrangement, layers)
            for layers in block_layers(config, arrangement)
        )
        self.final_norm = Norm(config.embed, config)
        if not config.tie_embeddings:
            self.head = Embedding(rngs, num_rows, config.embed)
        self.config = config
        self.attend = attend
        self.operations = operations
        self.dispatch = dispatch

    def forward(
        self, tokens_BT: jax.Array, true_length_B: jax.Array
    ) -> tuple[jax.Array, ExpertReport | None]:
        """Final hidden states `x_BTD` of right-padded prompts, of which nothing is kept.

        Tokens come in order and leave as `operations` lays them. Padding follows the tokens, so
        causality alone hides it from them; its own outputs mean nothing, and it takes no expert.
        The second result is of sparse layers.
        """
        x_BTD, _, report = self._whole(tokens_BT, true_length_B, None, _keep_nothing)
        return x_BTD, report

    def prefill(
        self, tokens_BT: jax.Array, rows: PromptPieces, cache: KVCache, cache_operations: Operations
    ) -> tuple[jax.Array, KVCache, ExpertReport | None]:
        """Final hidden states `x_BTD` of right-padded pieces of prompts, written into the cache.

        Each row attends to what its slot holds of the tokens before it, and to itself: a whole
        prompt, which has none before it, to itself alone. `cache_operations` are those of
        the cache.
        Tokens leave as `operations` lays them. Padding takes no expert.
        """
        if rows.start_B is not None:
            return self._prefill_chunk(tokens_BT, rows, cache, cache_operations)
        lies, wanted = self.operations.prompt_stripes, cache_operations.cache_stripes

        def keep(
            layers: LayerCache, made: PromptLayer, scan_index: jax.Array, window: Window
        ) -> LayerCache:
            new = zip(made, layers.POSITION_AXES, strict=True)
            made = type(made)(*(change_stripes(x, axis - 1, lies, wanted, 0) for x, axis in new))
            is_rolling = cache.positions.is_rolling(window)
            return write_piece(layers, made, scan_index, rows, is_rolling, cache_operations)

        x_BTD, layers, report = self._whole(tokens_BT, rows.count_B, cache.layers, keep)
        position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        position_BT = jnp.where(position_BT < rows.count_B[:, None], position_BT, EMPTY_POSITION)
        position_BT = change_stripes(position_BT, 1, IN_ORDER, wanted, EMPTY_POSITION)
        return (
            x_BTD,
            KVCache(layers, write_positions(cache.positions, position_BT, rows, cache_operations)),
            report,
        )

    def _whole(
        self,
        tokens_BT: jax.Array,
        true_length_B: jax.Array,
        cache: tuple[LayerCache, ...] | None,
        keep: WriteCache,
    ) -> tuple[jax.Array, tuple[Any, ...], ExpertReport | None]:
        tokens_BT = self.operations.prompt_stripes.permute(tokens_BT, axis=1)
        position_1T = self.operations.positions(tokens_BT.shape[1])
        query_position_BT = jnp.broadcast_to(position_1T, tokens_BT.shape)
        is_token_BT = query_position_BT < true_length_B[:, None]
        key_position_BT = jnp.where(is_token_BT, query_position_BT, EMPTY_POSITION)
        attend_tokens = self._scored(self.operations.over_tokens(self.attend))
        rows = PromptRows(query_position_BT, key_position_BT)
        attention = PromptAttention(attend_tokens, self.operations, rows, keep)
        return self._run_layers(tokens_BT, position_1T, attention, is_token_BT, cache)

    def _prefill_chunk(
        self, tokens_BT: jax.Array, rows: PromptPieces, cache: KVCache, cache_operations: Operations
    ) -> tuple[jax.Array, KVCache, ExpertReport | None]:
        tokens_BT = self.operations.prompt_stripes.permute(tokens_BT, axis=1)
        offset_1T = jnp.asarray(self.operations.positions(tokens_BT.shape[1]))
        position_BT = rows.first_B[:, None] + offset_1T
        is_token_BT = offset_1T < rows.count_B[:, None]
        kept_position_BT = jnp.where(is_token_BT, position_BT, EMPTY_POSITION)
        # a stripe's last entries are not the last of all
        num_unseen = 0 if cache_operations.cache_stripes.count > 1 else tokens_BT.shape[1]
        seen = positions_below(cache.positions, rows, num_unseen, cache_operations)
        num_heads = self.operations.num_cache_heads(self.config.num_kv_heads)
        attention = ChunkAttention(
            self._scored(self.attend),
            self.operations,
            cache_operations,
            rows,
            ChunkContext(position_BT, seen, kept_position_BT),
            num_heads=num_heads,
            head_dim=self.config.cache_dim,
            num_unseen=num_unseen,
        )
        x_BTD, layers, report = self._run_layers(
            tokens_BT, position_BT, attention, is_token_BT, cache.layers
        )
        kept_positions = write_positions(cache.positions, kept_position_BT, rows, cache_operations)
        return x_BTD, KVCache(layers, kept_positions), report

    def decode(
        self, token_B: jax.Array, position_B: jax.Array, cache: KVCache, is_token_B: jax.Array
    ) -> tuple[jax.Array, KVCache, ExpertReport | None]:
        """`logits_BV` after one more token per row, written into the cache at its position.

        Rows without a token see nothing, write nothing and take no expert; what is computed for
        them means nothing.
        """
        operations = self.operations
        position_B = jnp.where(is_token_B, position_B, EMPTY_POSITION)
        position_B = operations.constrain(position_B, axes.LOGITS[:1])

        def mark(positions: Positions, position_B: jax.Array) -> Positions:
            return append_position(positions, position_B, operations.stripe)

        positions = operations.by_row(mark, cache.positions, position_B)
        attention = TokenAttention(self._scored(self.attend), operations, position_B, positions)
        x_B1D, layers, report = self._run_layers(
            token_B[:, None], position_B[:, None], attention, is_token_B[:, None], cache.layers
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
        """An implementation that makes scores as the model asks.

        For what `over_tokens` gives: that passes scores on, in place of any bound before it.
        """
        return partial(attend, scores=self.config.attention_scores)

    def _run_layers(
        self,
        tokens_BT: jax.Array,
        position_BT: jax.Array | np.ndarray,
        attention: CallAttention,
        is_token_BT: jax.Array,
        cache: Cache | None,
    ) -> tuple[jax.Array, Cache, ExpertReport | None]:
        """Final hidden states, the cache of each place of layers, and what sparse layers report."""
        ropes = dict.fromkeys(map(self.config.rope_of, self.config.windows))
        codes = {rope: position_code(position_BT, rope, self.config.rope_dim) for rope in ropes}

        def run_group(
            group: Group,
            blocks: Sequence[Any],
            x_BTD: jax.Array,
            cache: Cache,
            scan_index: jax.Array,
            experts: ExpertCall,
        ) -> tuple[jax.Array, Cache]:
            kept: Cache = ()
            for layers, block, old in zip(group, blocks, cache, strict=True):
                window = self.config.windows[layers.start]
                code = codes[self.config.rope_of(window)]
                with jax.named_scope(f"layers.{layers_name(layers)}"):
                    layer_attention = attention.layer(window, old, scan_index, x_BTD)
                    x_BTD, made = block(x_BTD, code, layer_attention, self.operations, experts)
                    kept += (attention.keep(window, old, made, scan_index, x_BTD),)
            return x_BTD, kept

        experts = ExpertCall(is_token_BT, self.dispatch)
        x_BTD = self.embed(tokens_BT)
        kept: Cache = ()
        for group in self.groups:
            here = slice(len(kept), len(kept) + len(group))
            old = (None,) * len(group) if cache is None else cache[here]
            arguments = group, self.layers[here], x_BTD, old
            if len(group[0]) == 1:
                x_BTD, made = run_group(*arguments, jnp.int32(0), experts)
            else:
                x_BTD, made = scan_group(run_group, *arguments, experts)
            kept += made
        return self.final_norm(x_BTD), kept, experts.report()
