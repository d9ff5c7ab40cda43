"""Dimension letters and logical axis names, as every other file uses them.

Array names end in these letters (`x_BTD`), and einsums use the same letters:

    B batch rows or slots    T query tokens          S key/value positions   D embed
    N query heads            K key/value heads       G = N / K               H head dim
    F mlp                    V vocab                 L layers                E experts
    C capacity               M = B * T flattened     R alternatives reported
    Q steps of one decode call                       X stop ids of a row     Y biased ids of a row
    Z experts chosen by a token                      U rows of experts       W rows of a tile
    A heads flattened: G * T in a product of one key/value head, N * H after attention
    J = G + 2: the queries, key and value of one key/value head
    P, N, in a cache in pages: the pages of a pool, and the pages of a row
    R, in matrices of adapters: the ranks of all adapters, side by side
    P parts of cached features, each with a scale of its own; gate and up (2) in weights
    I entries of a latent, from which the queries, or the keys and values, of a token are computed;
      latent and rotated key together are the single head of H entries in a cache of latents

Each dimension of a weight or an activation has a logical axis name. A name stands for one placement
decision, not for a size: a rule maps the name to mesh axes, and all arrays with that name follow. A
dimension without a name (`""`) is never split. Knows nothing of meshes or rules.
"""

BATCH = "batch"
"""Rows of projections and of the MLP."""
ATTENTION_BATCH = "attention_batch"
"""Rows of attention and pages of the cache. Without a rule, it is split as `batch`."""
RESIDUAL_BATCH = "residual_batch"
"""Rows of the residual stream, between projections. Without a rule, it is split as `batch`."""
LENGTH = "length"
"""Tokens of a prompt, only in prefill: in decode, each row has one token."""
RESIDUAL_LENGTH = "residual_length"
"""Tokens of the residual stream. Without a rule, it is split as `length`."""
CACHE_LENGTH = "cache_length"
"""Entries of the cache. They are striped: entry e lies on device e mod n."""
EMBED = "embed"
"""The embed dimension of the residual stream."""
LOGIT_BATCH = "logit_batch"
"""Batch rows of logits and of per-slot state. They are split over the mesh axes of `batch` that
`vocab` does not use."""

HEAD_BATCH = "head_batch"
"""Batch rows of queries and attention outputs. They are split as `attention_batch`, but without the
mesh axes that also split heads in the projections. Over these, attention exchanges heads for
rows."""

EMBED_IN = "embed_in"
"""The embed dimension of the weights of projections."""
QUERY_HEADS = "query_heads"
"""Query heads, in the weights of projections and in their results."""
KV_HEADS = "kv_heads"
"""Key/value heads, in attention and in the cache. They are on the devices of their query heads. The
rule `""` allows copies of a head, which are needed if there are fewer heads than devices."""
MLP = "mlp"
"""The hidden size of a dense MLP, in weights and activations."""
VOCAB = "vocab"
"""The vocabulary, in the embedding, the output weights and the logits."""
EXPERTS = "experts"
"""Experts of a sparse layer. If the mesh axis also splits tokens, devices exchange tokens."""
EXPERT_MLP = "expert_mlp"
"""Hidden features of an expert. They are split over the mesh axes of `mlp` that `experts` does not
use."""

RESIDUAL = (RESIDUAL_BATCH, RESIDUAL_LENGTH, EMBED)
HEADS = (HEAD_BATCH, LENGTH, QUERY_HEADS, "", "")
LATENTS = (HEAD_BATCH, LENGTH, "")
LATENT_HEADS = (*LATENTS[:2], QUERY_HEADS, "")
"""Heads that are computed from latents or attend to them; each has its own keys and values."""
HIDDEN = (BATCH, LENGTH, MLP)
LOGITS = (LOGIT_BATCH, VOCAB)
NEW_KEYS = (HEAD_BATCH, QUERY_HEADS, "", LENGTH)
"""Keys as the projections return them; `NEW_VALUES` likewise."""
NEW_VALUES = (HEAD_BATCH, QUERY_HEADS, LENGTH, "")
PROMPT_KEYS = (ATTENTION_BATCH, KV_HEADS, "", LENGTH)
"""Keys of new tokens, split as in attention, before they are written to the cache."""
PROMPT_VALUES = (ATTENTION_BATCH, KV_HEADS, LENGTH, "")
PROMPT_LATENTS = (ATTENTION_BATCH, LENGTH, "")
CACHE_HEADS = ("", ATTENTION_BATCH, KV_HEADS, CACHE_LENGTH, "")
"""Keys or values in the cache. Arrays of the cache have layers as first axis, which is never
split, then pages."""
CACHE_LATENTS = ("", ATTENTION_BATCH, CACHE_LENGTH, "")
CACHE_CODES = ("", ATTENTION_BATCH, KV_HEADS, "", CACHE_LENGTH, "")
"""Keys or values in codes. Their features are in blocks, and each block has all entries of a
page."""
CACHE_LATENT_CODES = ("", ATTENTION_BATCH, "", CACHE_LENGTH, "")
CACHE_ENTRIES = (CACHE_HEADS, CACHE_LATENTS, CACHE_CODES, CACHE_LATENT_CODES)
"""The axes of all arrays of vectors in the cache."""
CACHE_SCALES = ("", ATTENTION_BATCH, KV_HEADS, CACHE_LENGTH)
"""Scales of keys or of values in codes."""
CACHE_LATENT_SCALES = ("", ATTENTION_BATCH, "", CACHE_LENGTH)
"""Scales of latents in codes; the latent and the rotated key of an entry have one each."""


def row_axis(logical_axes: tuple[str, ...]) -> int:
    """The index of the row axis: the first axis that has a name."""
    return next(axis for axis, name in enumerate(logical_axes) if name)


LANES = 128
"""Vector width: an array whose minor dimension is a multiple of it needs no padding on any
platform."""

LOGICAL_AXES = (
    BATCH,
    ATTENTION_BATCH,
    RESIDUAL_BATCH,
    LENGTH,
    RESIDUAL_LENGTH,
    CACHE_LENGTH,
    EMBED,
    LOGIT_BATCH,
    HEAD_BATCH,
    EMBED_IN,
    QUERY_HEADS,
    KV_HEADS,
    MLP,
    VOCAB,
    EXPERTS,
    EXPERT_MLP,
)
WEIGHT_AXES = (EMBED_IN, QUERY_HEADS, MLP, VOCAB)
