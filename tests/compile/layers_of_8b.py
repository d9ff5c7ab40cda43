"""The shapes of a large model, for tests that only compile."""

from noria.modelzoo.config import DecoderConfig

LAYERS_OF_8B = DecoderConfig.alike(
    vocab_size=16384,
    embed=4096,
    mlp=14336,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=128,
    windows=(None, None),
    max_position=8192,
)
"""Two layers of Llama-3.1-8B, with a small vocabulary."""
