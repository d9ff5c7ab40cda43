"""Small caches for comparisons with plain numpy, and helpers that fill and read them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from alike import alike

from noria.modelzoo.attention.prompt_pieces import PromptPieces, write_piece, write_positions
from noria.modelzoo.cache import kv_cache
from noria.modelzoo.cache.kv_cache import KVCache
from noria.modelzoo.cache.layer_state import LayerState, NewEntries, PromptKeysValues
from noria.modelzoo.cache.segments import EMPTY_POSITION
from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.layer_config import Window
from noria.modelzoo.operations import ON_ONE_DEVICE

SLOTS = 4
CONFIG = DecoderConfig.alike(
    vocab_size=11,
    embed=8,
    mlp=8,
    num_query_heads=6,
    num_kv_heads=2,
    head_dim=4,
    windows=(None, None),
    max_position=16,
)
K, H = alike(CONFIG).num_kv_heads, alike(CONFIG).head_dim


def random_prompt(
    rows: int, length: int, seed: int = 0, num_layers: int = CONFIG.num_layers
) -> tuple[PromptKeysValues, ...]:
    rng = np.random.default_rng(seed)
    shapes = (rows, K, H, length), (rows, K, length, H)
    return tuple(
        PromptKeysValues(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes))
        for _ in range(num_layers)
    )


def pieces(slots: Sequence[int], counts: Sequence[int], start: int | None = None) -> PromptPieces:
    """Return whole prompts, or pieces that all begin at `start`."""
    start_B = None if start is None else jnp.full(len(slots), start)
    return PromptPieces(jnp.array(slots), start_B, jnp.array(counts))


def keep(
    cache: KVCache,
    new: Sequence[NewEntries],
    rows: PromptPieces,
    windows: Sequence[Window] = alike(CONFIG).windows,
) -> KVCache:
    """Write a piece of each prompt to every (unrolled) layer, and return the cache."""
    is_rolling = cache.positions.is_rolling
    layers = tuple(
        write_piece(old, one, jnp.int32(0), rows, is_rolling(window), ON_ONE_DEVICE)
        for old, one, window in zip(cache.layers, new, windows, strict=True)
    )
    # both values and latents have tokens on the last axis but one
    offset_1T = jnp.arange(new[0][-1].shape[-2])[None]
    position_BT = rows.first_B[:, None] + offset_1T
    position_BT = jnp.where(offset_1T < rows.count_B[:, None], position_BT, EMPTY_POSITION)
    return KVCache(layers, write_positions(cache.positions, position_BT, rows, ON_ONE_DEVICE))


_keep = jax.jit(keep, static_argnames="windows")


def used_cache(config: DecoderConfig, spans: Sequence[int]) -> KVCache:
    """Return a used cache: every slot has held a row that filled the longest span."""
    cache = kv_cache.allocate(config, SLOTS, spans, jnp.float32)
    prompt = random_prompt(SLOTS, spans[-1], seed=99, num_layers=config.num_layers)
    rows = pieces(range(SLOTS), [spans[-1]] * SLOTS)
    return _keep(cache, prompt, rows, windows=tuple(alike(config).windows))


def sides(layers) -> list[np.ndarray]:
    """Return keys and values of each layer as `[B, K, positions, H]`, segments joined."""
    plain = []
    for layer in layers:
        # arrays of the cache lead with an axis of layers, here of size one
        is_state = isinstance(layer, LayerState)
        keys, values = layer.arrays.values() if is_state else ((x[None],) for x in layer)
        plain.append(np.concatenate(keys, axis=4)[0].swapaxes(2, 3))
        plain.append(np.concatenate(values, axis=3)[0])
    return plain
