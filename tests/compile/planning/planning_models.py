"""Shapes of models for predictions: a dense model and a sparse model."""

from alike import changed

from noria.compile.abstract_model import AbstractModel
from noria.compile.planning.work import Work
from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.moe_config import MoeConfig, Routing
from noria.sharding.layout import Layout

PLAIN = DecoderConfig.alike(
    vocab_size=512,
    embed=64,
    mlp=160,
    num_query_heads=8,
    num_kv_heads=2,
    head_dim=16,
    windows=(None,) * 3,
    max_position=512,
)
SPARSE = changed(PLAIN, moe=MoeConfig(Routing(num_experts=8, num_chosen=2), mlp=96))


def work_of(config: DecoderConfig, layout: Layout | None = None, *, dtype: str = "float32") -> Work:
    return Work(AbstractModel(config), dtype, layout)
