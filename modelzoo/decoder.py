"""The decoder: one definition for all families, run on whole prompts, chunks or single tokens.

A family is a choice of sizes and options in `DecoderConfig`; no code here depends on a family's
name. The attention implementation `attend` and the `operations` of a layout are injected, and must
not change the answer. Knows logical axes and positions; knows no mesh, bucket, file or text.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from . import axes
from .attention.attend import Attend, soft_cap
from .attention.blockwise import attend_blockwise
from .attention.layer_attention import CallAttention, PromptAttention, PromptRows
from .attention.page_attention import PageAttention, PageRows
from .attention.paged import AttendPages, attend_in_groups
from .attention.prompt_pieces import PromptPieces, write_prompts
from .attention.shared_pages import SlotPages
from .block import make_block
from .cache.layer_state import Cache, LayerState
from .cache.stripes import EMPTY_POSITION
from .config import AS_PUBLISHED, Arrangement, DecoderConfig
from .layer_groups import Group, block_layers, layer_groups, layers_name
from .layer_scan import scan_group
from .layers import Embedding, InputSum, NoNorm, Norm, scale_by
from .moe.call import ExpertCall, ExpertReport
from .moe_config import LOSSLESS, Dispatch
from .operations import ON_ONE_DEVICE, Operations
from .pooling import Pooler
from .rope import position_code

WritePrompts = Callable[..., LayerState]
"""A function that writes the entries of whole prompts; see `PromptAttention.write`."""


class Decoder(nnx.Module):
    """A decoder-only transformer or an encoder: embedding, blocks, final norm, and head if any."""

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, arrangement: Arrangement = AS_PUBLISHED
    ):
        num_rows = arrangement.padded_vocab or config.vocab_size
        is_head = config.has_head and config.tie_embeddings
        self.embedding = Embedding(rngs, num_rows, config.embed, is_head=is_head)
        self.groups = layer_groups(config, arrangement)
        self.layers = nnx.List(
            make_block(rngs, config, arrangement, layers)
            for layers in block_layers(config, arrangement)
        )
        if config.inputs is not None:
            self.inputs = InputSum(rngs, config, config.inputs)
        self.final_norm = Norm(config.embed, config) if config.has_final_norm else NoNorm()
        if config.has_head and not config.tie_embeddings:
            self.head = Embedding(rngs, num_rows, config.embed, is_head=True)
        self.pooler = Pooler(rngs, config.embed, config.pooling)
        self.config = config
        self.attend: Attend = attend_blockwise
        self.attend_pages: AttendPages = attend_in_groups
        self.operations: Operations = ON_ONE_DEVICE
        self.dispatch: Dispatch = LOSSLESS

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
        tokens_BT = self.operations.prompt_stripes.permute(tokens_BT, axis=1)
        call, x_BTD = self.whole_prompts(tokens_BT.shape, true_length_B), self.embed(tokens_BT)
        if self.config.inputs is not None:
            first_B = true_length_B if first_B is None else first_B
            x_BTD = self.inputs(x_BTD, call.position_BT, first_B)
        x_BTD, _, report = self.run_layers(x_BTD, call)
        return self.final_norm(x_BTD), report

    def pool(self, x_BTD: jax.Array, true_length_B: jax.Array) -> jax.Array:
        """The float32 vector `y_BD` of each prompt, from its final hidden states."""
        position_1T = self.operations.positions(x_BTD.shape[1])
        return self.pooler(x_BTD, position_1T, true_length_B)

    def prefill(
        self,
        tokens_BT: jax.Array,
        rows: PromptPieces,
        cache: Cache,
        cache_operations: Operations,
        adapter_B: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache, ExpertReport | None]:
        """Run right-padded pieces of prompts and write them to the cache.

        Each row attends to the earlier tokens of its prompt in its pages, and to itself. A whole
        prompt attends only to itself. Padding takes no expert.

        Args:
          tokens_BT: Token ids in order.
          rows: The slot, first position, token count and pages of each row.
          cache: The cache, which the caller donates.
          cache_operations: The operations by which the cache is laid out.
          adapter_B: The number of each row's adapter, if weights are adapted.

        Returns:
          Final hidden states `x_BTD`, in the stripes of `operations`; the updated cache; the report
          of sparse layers, or None without any.
        """
        stripes = self.operations.prompt_stripes
        if rows.start_B is None:
            tokens_BT = stripes.permute(tokens_BT, axis=1)
            write = None
            if rows.page_BN is not None:
                write = partial(write_prompts, rows, stripes, cache_operations)
            call = self.whole_prompts(tokens_BT.shape, rows.count_B, write)
        else:
            assert rows.page_BN is not None
            in_pages = PageRows(rows.start_B, rows.count_B, rows.page_BN, rows.slot_B, jnp.int32(0))
            T = tokens_BT.shape[1]
            call = PageAttention(self.attend_pages, cache_operations, in_pages, T, is_gathered=True)
        x_BTD, cache, report = self.run_layers(self.embed(tokens_BT), call, cache, adapter_B)
        x_BTD = self.final_norm(x_BTD)
        if rows.start_B is not None:
            x_BTD = stripes.permute(x_BTD, axis=1)
        return x_BTD, cache, report

    def next_tokens(
        self, position_B: jax.Array, is_token_B: jax.Array, pages: SlotPages
    ) -> PageAttention:
        """The call of one more token per row, which is written to its page.

        Rows without a token see nothing, write nothing and take no expert.

        Args:
          position_B: The position of each token.
          is_token_B: Whether a row has a token.
          pages: The pages of each row.
        """
        slot_B, count_B = jnp.arange(len(position_B)), is_token_B.astype(jnp.int32)
        rows = PageRows(position_B, count_B, pages.page_BN, slot_B, jnp.int32(0), pages.shared)
        return PageAttention(self.attend_pages, self.operations, rows, 1, is_gathered=False)

    def whole_prompts(
        self, shape: tuple[int, ...], true_length_B: jax.Array, write: WritePrompts | None = None
    ) -> PromptAttention:
        """The call of right-padded whole prompts of shape `[B, T]`, which writes their entries."""
        operations, position_1T = self.operations, self.operations.positions(shape[1])
        position_BT = jnp.broadcast_to(position_1T, shape)
        is_token_BT = position_BT < true_length_B[:, None]
        # not for each layer, as devices that split tokens would send positions to each other
        rows = PromptRows(position_BT, jnp.where(is_token_BT, position_BT, EMPTY_POSITION))
        attend = operations.over_tokens(self.attend)
        return PromptAttention(attend, operations, position_1T, is_token_BT, rows, write)

    def logits(self, x_BD: jax.Array, is_used_B: jax.Array | None = None) -> jax.Array:
        """Float32 logits of final hidden states; -inf for the ids that pad the vocabulary.

        Args:
          x_BD: The hidden states; they may have more leading axes.
          is_used_B: The rows whose logits are read; those of others are any finite numbers.
        """
        head = self.embedding if self.config.tie_embeddings else self.head
        operations = self.operations
        if is_used_B is not None:
            operations = operations.for_tokens(is_used_B)
        logits_BV = head.logits(x_BD, operations)
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

    def run_layers(
        self,
        x_BTD: jax.Array,
        call: CallAttention,
        cache: Cache | None = None,
        adapter_B: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache, ExpertReport | None]:
        """Run all layers: for whole prompts, for pieces of prompts and for single tokens.

        Args:
          x_BTD: The residual stream before the first layer, as `embed` returns it.
          call: The positions of the tokens, and their attention.
          cache: The cache, if the call writes one.
          adapter_B: The number of each row's adapter, if weights are adapted.

        Returns:
          The residual stream after all layers; the updated cache; the report of sparse layers.
        """
        config, position_BT = self.config, call.position_BT
        operations = self.operations.for_adapters(adapter_B).for_tokens(call.is_token_BT)
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
            for layers, block, memory in zip(group, blocks, cache, strict=True):
                options, inputs, out_BTKGH = config.layers[layers.start].attention, None, None
                with jax.named_scope(f"layers.{layers_name(layers)}"):
                    if options is not None:
                        code, reads = codes[options.rope, options.rope_dim], call.reads_cache
                        inputs = block.project(x_BTD, code, operations, reads_cache=reads)
                        attend = call.layer(options, memory, scan_index)
                        out_BTKGH, memory = attend(inputs.queries, inputs.new, inputs.latents)
                    x_BTD = block.finish(x_BTD, inputs, out_BTKGH, operations, experts)
                new_cache += (memory,)
            return x_BTD, new_cache

        experts = ExpertCall(call.is_token_BT, self.dispatch)
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
