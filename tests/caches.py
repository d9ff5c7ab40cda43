"""Small caches to compare with plain numpy: what fills them, and how they read side by side."""

import jax
import jax.numpy as jnp
import numpy as np

from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.kept_layers import PromptKeysValues
from noria.modelzoo.kv_cache import KVCache

SLOTS = 4
CONFIG = DecoderConfig(
    vocab_size=11,
    embed=8,
    mlp=8,
    num_query_heads=6,
    num_kv_heads=2,
    head_dim=4,
    windows=(None, None),
    max_position=16,
)
K, H = CONFIG.num_kv_heads, CONFIG.head_dim


def random_prompt(
    rows: int, length: int, seed: int = 0, num_layers: int = CONFIG.num_layers
) -> tuple[PromptKeysValues, ...]:
    rng = np.random.default_rng(seed)
    shapes = (rows, K, H, length), (rows, K, length, H)
    return tuple(
        PromptKeysValues(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes))
        for _ in range(num_layers)
    )


def sides(layers) -> list[np.ndarray]:
    """Keys and values of each layer as `[B, K, positions, H]`, segments joined."""
    plain = []
    for keys, values in layers:
        keys, values = (x if isinstance(x, tuple) else (x,) for x in (keys, values))
        plain.append(np.concatenate([np.asarray(k) for k in keys], axis=3).swapaxes(2, 3))
        plain.append(np.concatenate([np.asarray(v) for v in values], axis=2))
    return plain


def filled_with_nan(cache: KVCache) -> KVCache:
    """As a predecessor may leave it: every entry valid and NaN."""
    positions = jax.tree.map(jnp.ones_like, cache.positions)
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)._replace(positions=positions)
