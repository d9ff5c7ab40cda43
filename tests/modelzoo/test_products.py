"""The recorded products of a layer: one for each weight, and which products share an array."""

import pytest
from alike import changed
from flax import nnx

from noria.modelzoo import axes
from noria.modelzoo.block import make_block
from noria.modelzoo.config import AS_PUBLISHED, DecoderConfig
from noria.modelzoo.latent_config import LatentAttention
from noria.modelzoo.moe_config import MoeConfig, Routing
from noria.modelzoo.products import LayerRecord, record_layer, record_logits

PLAIN = DecoderConfig.alike(
    vocab_size=96,
    embed=32,
    mlp=48,
    num_query_heads=8,
    num_kv_heads=2,
    head_dim=4,
    windows=(None, 16),
    max_position=64,
    qkv_bias=True,
)
LATENT = LatentAttention(rank=12, plain_dim=6, rope_dim=4, value_dim=10, query_rank=14)
MOE = MoeConfig(Routing(num_experts=6, num_chosen=2), 20, shared_mlp=24, has_shared_gate=True)
CONFIGS = {
    "dense": PLAIN,
    "parallel": changed(PLAIN, is_parallel=True),
    "sparse": changed(PLAIN, moe=MOE, sparse=(False, True)),
    "latent": changed(
        PLAIN,
        num_kv_heads=8,
        head_dim=LATENT.head_dim,
        latent=LATENT,
        qkv_bias=False,
        moe=MOE,
        sparse=(False, True),
    ),
}


def record(name: str, *, reads_cache: bool = False) -> LayerRecord:
    return record_layer(CONFIGS[name], 1, 1, reads_cache=reads_cache)


@pytest.mark.parametrize("reads_cache", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_weight_of_a_layer_is_in_one_product(name, reads_cache):
    block = nnx.eval_shape(
        lambda: make_block(nnx.Rngs(0), CONFIGS[name], AS_PUBLISHED, range(1, 2))
    )
    sizes = [
        value.get_value().size
        for path, value in nnx.to_flat_state(nnx.state(block))
        if not {"scale", "qkv_bias"} & set(path)
    ]
    found = record(name, reads_cache=reads_cache)
    products = [*found.products, *found.expert_products]
    assert sorted(product.num_weights for product in products) == sorted(sizes)


def test_products_of_one_array_and_sums_into_one_stream_are_told_apart():
    read = {product.equation: product.reads for product in record("dense").products}
    qkv, output, gate_up, down = (product.adds_to for product in record("dense").products)
    assert len(set(read.values())) == 4
    assert (qkv, output) == (0, 0) and (gate_up, down) == (1, 1)
    parallel = {product.equation: product for product in record("parallel").products}
    qkv, gate_up = parallel["BTD,DKJH->BTKJH"], parallel["BTD,PDF->PBTF"]
    assert qkv.reads == gate_up.reads and qkv.adds_to == gate_up.adds_to


def test_experts_read_what_the_expert_of_all_tokens_reads():
    found = record("sparse")
    assert found.mixture is not None
    shared = next(p for p in found.products if p.equation == "BTD,PDF->PBTF")
    assert (found.mixture.reads, found.mixture.adds_to) == (shared.reads, shared.adds_to)
    assert [axes.EXPERTS in product.weight for product in found.expert_products] == [True, True]


def test_latents_are_heads_of_their_own_where_the_cache_is_read():
    prompt, cached = (record("latent", reads_cache=reads) for reads in (False, True))
    assert (prompt.head_dims, prompt.makes_keys) == ((10, 10), True)
    assert (cached.head_dims, cached.makes_keys) == ((16, 16), False)


def test_copies_of_heads_are_more_weights():
    one, two = (record_layer(PLAIN, 0, shards, reads_cache=False) for shards in (1, 4))
    assert (one.num_kv_heads, two.num_kv_heads) == (2, 4)
    assert two.products[0].sizes["J"] == 2 + 2 and one.products[0].sizes["J"] == 4 + 2


def test_logits_are_a_product_with_the_vocabulary():
    product = record_logits(PLAIN)
    assert product.num_weights == 96 * 32 and product.out == axes.LOGITS
