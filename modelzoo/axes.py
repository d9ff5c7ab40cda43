"""The key to dimension letters and logical axis names; every other file uses these and no others.

Arrays end in their letters (`x_BTD`), einsums use the same letters:

    B batch rows or slots    T query tokens          S key/value positions   D embed
    N query heads            K key/value heads       G = N / K               H head dim
    F mlp                    V vocab                 L layers                E experts
    C capacity               M = B * T flattened     P gate and up (2)       R alternatives reported
    Q steps of one decode call                       X stop ids of a row     Y biased ids of a row
    A heads flattened: G * T in a product of one key/value head, N * H after attention
    J = G + 2: the queries, key and value of one key/value head

Weights and activations name their axes by placement decision, not by size: a rule maps a name to
mesh axes, and everything that carries the name follows. Knows nothing of meshes or rules.
"""

# activations
BATCH = "batch"
ATTENTION_BATCH = "attention_batch"
QUERY_LENGTH = "query_length"
KV_LENGTH = "kv_length"
EMBED = "embed"

# weights, and the activations that they make
EMBED_IN = "embed_in"
QUERY_HEADS = "query_heads"
KV_HEADS = "kv_heads"
HEADS_PER_KV = "heads_per_kv"
HEAD_DIM = "head_dim"
MLP = "mlp"
VOCAB = "vocab"

LOGICAL_AXES = (
    BATCH,
    ATTENTION_BATCH,
    QUERY_LENGTH,
    KV_LENGTH,
    EMBED,
    EMBED_IN,
    QUERY_HEADS,
    KV_HEADS,
    HEADS_PER_KV,
    HEAD_DIM,
    MLP,
    VOCAB,
)
