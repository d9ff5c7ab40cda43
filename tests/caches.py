"""Small caches in pages for comparisons with plain numpy, and helpers that fill and read them."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from alike import alike

from noria.compile.grids.grid_values import window_pages
from noria.modelzoo.attention.prompt_pieces import PromptPieces, write_pieces, write_prompts
from noria.modelzoo.attention.shared_pages import SlotPages
from noria.modelzoo.cache.layer_state import Cache, LayerState, NewEntries, PromptKeysValues
from noria.modelzoo.cache.pages import NO_PAGE, PageCounts, allocate_pages
from noria.modelzoo.cache.stripes import IN_ORDER
from noria.modelzoo.config import AS_PUBLISHED, Arrangement, DecoderConfig
from noria.modelzoo.decoder import Decoder
from noria.modelzoo.operations import ON_ONE_DEVICE

ROWS, PAGE = 4, 4
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


def scattered(rows: int, num_pages: int, seed: int = 0) -> np.ndarray:
    """Return the pages of rows, in any order, out of a pool with as many free pages between."""
    order_P = np.random.default_rng(seed).permutation(2 * rows * num_pages).astype(np.int32)
    return order_P[: rows * num_pages].reshape(rows, num_pages)


def empty_cache(
    config: DecoderConfig,
    page_BN: np.ndarray,
    page: int = PAGE,
    row_tokens: int | None = None,
    arrangement: Arrangement = AS_PUBLISHED,
    dtype: str = "float32",
):
    """Return an empty cache for the pages of `scattered`.

    With `row_tokens`, slots have pages of their own in layers with windows, for calls with so many
    tokens of a row.
    """
    rows, num_pages = page_BN.shape

    def of_window(window: int) -> int | None:
        return row_tokens and window_pages(window, row_tokens, page, num_pages * page)

    counts = PageCounts(2 * page_BN.size, page, rows, of_window)
    return allocate_pages(config, counts, jnp.dtype(dtype), arrangement=arrangement)


def used_cache(config: DecoderConfig, page_BN: np.ndarray, **options):
    """Return the same cache, with every entry of all pages as earlier rows have left it."""
    rng = np.random.default_rng(99)

    def fill(x: jax.Array) -> jax.Array:
        return jnp.asarray(rng.normal(size=x.shape), x.dtype)

    return jax.tree.map(fill, empty_cache(config, page_BN, **options))


def _is_layer(x: object) -> bool:
    return isinstance(x, LayerState)


def layers_of(cache) -> list[LayerState]:
    """Return the memory of each block that has attention."""
    return jax.tree.leaves(cache, is_leaf=_is_layer)


def with_layers(cache, layers: Iterable[LayerState]):
    return jax.tree.unflatten(jax.tree.structure(cache, is_leaf=_is_layer), layers)


def arrays_of(layer: LayerState) -> dict[str, np.ndarray]:
    """Return each array `[layers, pages, ...]` of a block, by its name."""
    return {name: np.asarray(*jax.tree.leaves(x)) for name, x in layer.arrays.items()}


def pages_in(layer: LayerState, page_BN, slot_B):
    """Return the pages of rows in a layer: those of the pool, or those of their slots in turn."""
    if not (own := layer.spec.slot_pages):
        return page_BN
    return slot_B[:, None] * own + np.arange(page_BN.shape[1])[None] % own


def entries_of(
    layer: LayerState, page_BN: np.ndarray, slot_B: np.ndarray, index: int = 0
) -> dict[str, np.ndarray]:
    """Return the entries of rows, in order, by the name of their array: `[rows, heads, entries]`.

    Features follow where there are any; arrays without heads have no such axis. Past all pages for
    no page, any entries come.
    """
    found = {}
    for name, pages in arrays_of(layer).items():
        axis = layer.spec.arrays[name].position_axis
        of_rows = pages[index][np.minimum(pages_in(layer, page_BN, slot_B), pages.shape[1] - 1)]
        of_rows = np.moveaxis(of_rows, 1, axis - 1)
        shape = of_rows.shape
        found[name] = of_rows.reshape(*shape[: axis - 1], -1, *shape[axis + 1 :])
    return found


def decode(
    decoder: Decoder,
    token_B: jax.Array,
    position_B: jax.Array,
    cache: Cache,
    is_token_B: jax.Array,
    pages: SlotPages,
    adapter_B: jax.Array | None = None,
):
    """Run one more token per row; return its logits, the cache and the report of sparse layers."""
    call = decoder.next_tokens(position_B, is_token_B, pages)
    x_B1D = decoder.embed(token_B[:, None])
    x_B1D, cache, report = decoder.run_layers(x_B1D, call, cache, adapter_B)
    return decoder.logits(decoder.final_norm(x_B1D)[:, 0]), cache, report


def random_prompt(
    rows: int, length: int, seed: int = 0, num_layers: int = CONFIG.num_layers
) -> tuple[PromptKeysValues, ...]:
    rng = np.random.default_rng(seed)
    shapes = (rows, K, H, length), (rows, K, length, H)
    return tuple(
        PromptKeysValues(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes))
        for _ in range(num_layers)
    )


def pieces(
    page_BN: np.ndarray, slots: Sequence[int], counts: Sequence[int], start: int | None = None
) -> PromptPieces:
    """Return whole prompts, or pieces that all begin at `start`; past the last slot for no slot."""
    start_B = None if start is None else jnp.full(len(slots), start)
    no_page_1N = np.full_like(page_BN[:1], NO_PAGE)
    page_BN = np.concatenate([page_BN, no_page_1N])[np.array(slots)]
    return PromptPieces(jnp.array(slots), start_B, jnp.array(counts), jnp.asarray(page_BN))


def keep(cache, new: Sequence[NewEntries], rows: PromptPieces):
    """Write a piece of each prompt to every (unrolled) layer, and return the cache."""
    layers, first = [], jnp.int32(0)
    for layer, one in zip(layers_of(cache), new, strict=True):
        if rows.start_B is None:
            layers.append(write_prompts(rows, IN_ORDER, ON_ONE_DEVICE, layer, one, first))
        else:
            page_BN = jnp.asarray(pages_in(layer, rows.page_BN, rows.slot_B))
            layers.append(write_pieces(layer, one, page_BN, rows.start_B, first))
    return with_layers(cache, layers)
