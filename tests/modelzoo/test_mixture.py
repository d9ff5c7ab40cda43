"""A mixture of experts equals plain numpy, drops nothing unless told to, and counts drops."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import alike
from tolerances import FLOAT32_ELEMENTWISE

from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.moe.dispatch import assign_capacity_rows, sort_choices
from noria.modelzoo.moe.experts import ExpertWeights
from noria.modelzoo.moe.mix import Mixture, MoeOutput
from noria.modelzoo.moe.routing import Choices, Router, route
from noria.modelzoo.moe_config import LOSSLESS, Dispatch, ExpertGroups, MoeConfig, Routing, Tiles

B, T, D, F = 3, 5, 16, 24
PLAIN = Routing(num_experts=6, num_chosen=2)
ROUTINGS = {
    "normalised": PLAIN,
    "not normalised": replace(PLAIN, is_normalized=False, scale=2.5),
    "softmax of the chosen, with a bias": replace(
        PLAIN, scoring="softmax_of_chosen", has_bias=True
    ),
    "sigmoid of one, on the input": Routing(
        6, 1, "sigmoid", is_normalized=False, weighs_input=True
    ),
    "groups by their best": Routing(6, 2, is_normalized=False, groups=ExpertGroups(3, 2, 1)),
    "groups by their two best, with a choice bias": Routing(
        8, 3, "sigmoid", groups=ExpertGroups(4, 2, 2), has_choice_bias=True, scale=2.5
    ),
    "all": Routing(4, 4),
    "one expert": Routing(1, 1),
}


def gated(gate, up):
    return jax.nn.silu(gate) * up


def random_layer(routing: Routing, seed: int = 0, has_bias: bool = False):
    rng = np.random.default_rng(seed)
    E = routing.num_experts

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    router = Router(
        normal(D, E),
        normal(E) if routing.has_bias else None,
        normal(E) if routing.has_choice_bias else None,
    )
    biases = (normal(E, 2, F), normal(E, D)) if has_bias else (None, None)
    return normal(B, T, D), router, ExpertWeights(normal(E, 2, D, F), normal(E, F, D), *biases)


def plain_choices(x_D: np.ndarray, router: Router, routing: Routing) -> dict[int, float]:
    """Compute the weights of one token's experts, in float64, step by step."""
    logits = x_D.astype(np.float64) @ router.weight_DE
    logits += 0 if router.bias_E is None else router.bias_E
    softmax = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    scores = 1 / (1 + np.exp(-logits)) if routing.scoring == "sigmoid" else softmax
    ranks = scores + (0 if router.choice_bias_E is None else router.choice_bias_E)
    if routing.groups:
        members = np.split(np.arange(len(ranks)), routing.groups.count)
        best = [np.sort(ranks[group])[-routing.groups.best :].sum() for group in members]
        kept = np.argsort(best)[-routing.groups.chosen :]
        for i, group in enumerate(members):
            if i not in kept:
                ranks[group] = -np.inf
    chosen = np.argsort(-ranks)[: routing.num_chosen]
    weights = scores[chosen]
    if routing.scoring == "softmax_of_chosen" or routing.is_normalized:
        weights = weights / weights.sum()
    return dict(zip(chosen.tolist(), (weights * routing.scale).tolist(), strict=True))


def plain_mixture(x_BTD, router, weights, routing: Routing) -> np.ndarray:
    out_BTD = np.zeros(x_BTD.shape)
    for b, t in np.ndindex(B, T):
        for e, weight in plain_choices(x_BTD[b, t], router, routing).items():
            x = x_BTD[b, t] * (weight if routing.weighs_input else 1)
            gate, up = (x @ weights.gate_up_EPDF[e, side] for side in (0, 1))
            if weights.gate_up_bias_EPF is not None:
                gate, up = (
                    gate + weights.gate_up_bias_EPF[e, 0],
                    up + weights.gate_up_bias_EPF[e, 1],
                )
            y = (gate / (1 + np.exp(-gate)) * up) @ weights.down_EFD[e]
            y = y if weights.down_bias_ED is None else y + weights.down_bias_ED[e]
            out_BTD[b, t] += y * (1 if routing.weighs_input else weight)
    return out_BTD


def mix(x_BTD, router, weights, routing, dispatch=LOSSLESS, is_token_BT=None) -> MoeOutput:
    mixture = Mixture(routing, dispatch, gated)
    is_token_BT = jnp.ones((B, T), bool) if is_token_BT is None else is_token_BT
    return jax.jit(mixture)(x_BTD, is_token_BT, router, weights)


EVERY_ROUTING = [(name, "lossless", False) for name in ROUTINGS]
EVERY_DISPATCH = [
    (name, kind, has_bias)
    for name in ("normalised", "sigmoid of one, on the input")
    for kind in ("lossless", "ragged", "capacity")
    for has_bias in (True, False)
]


@pytest.mark.parametrize(
    ("name", "kind", "has_bias"), dict.fromkeys(EVERY_ROUTING + EVERY_DISPATCH), ids=str
)
def test_every_routing_and_dispatch_gives_what_plain_numpy_gives(name, kind, has_bias):
    """A capacity that holds all choices is also lossless."""
    routing = ROUTINGS[name]
    x_BTD, router, weights = random_layer(routing, has_bias=has_bias)
    factor = float(routing.num_experts) if kind == "capacity" else None
    mixed = mix(x_BTD, router, weights, routing, Dispatch(kind, factor))
    expected = plain_mixture(x_BTD, router, weights, routing)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(mixed.out_BTD / scale, expected / scale, atol=FLOAT32_ELEMENTWISE)
    assert not mixed.num_dropped_BT.any()
    assert mixed.use.load_SE.sum() == B * T * routing.num_chosen


@pytest.mark.parametrize("scale", [1, 30, 1e4, None])
def test_weights_that_are_cut_into_pieces_give_the_same(scale):
    x_BTD, router, weights = random_layer(PLAIN, has_bias=True)
    whole = mix(x_BTD, router, weights, PLAIN).out_BTD
    dispatch = Dispatch(tiles=Tiles(piece_bytes=scale and int(4 * 2 * D * scale)))
    pieces = mix(x_BTD, router, weights, PLAIN, dispatch).out_BTD
    np.testing.assert_allclose(
        pieces, whole, rtol=0, atol=FLOAT32_ELEMENTWISE * np.abs(whole).max()
    )


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("kind", ["lossless", "ragged"])
def test_without_loss_a_row_has_the_same_bits_whatever_its_neighbours_are(kind):
    x_BTD, router, weights = random_layer(PLAIN)
    mixed = Mixture(PLAIN, Dispatch(kind), gated)
    # a function of its own, so that it is compiled here
    mixture = jax.jit(lambda *arguments: mixed(*arguments))
    is_token_BT = jnp.ones((B, T), bool)
    alone = np.asarray(mixture(x_BTD, is_token_BT, router, weights).out_BTD)
    for seed in range(1, 20):
        others, _, _ = random_layer(PLAIN, seed)
        others[1] = x_BTD[1]
        is_token_BT = is_token_BT.at[0].set(seed % 2 == 0)
        got = np.asarray(mixture(others, is_token_BT, router, weights).out_BTD)
        np.testing.assert_array_equal(got[1], alone[1])


def test_padding_takes_no_expert_and_no_capacity():
    """If padding counted, the experts would be full for the tokens after it."""
    routing = Routing(4, 1)
    x_BTD, router, weights = random_layer(routing)
    x_BTD[:] = x_BTD[-1, -1]
    is_token_BT = np.zeros((B, T), bool)
    is_token_BT[-1] = True
    mixed = mix(
        x_BTD, router, weights, routing, Dispatch("capacity", 1.0, Tiles(1, 1)), is_token_BT
    )
    assert mixed.use.load_SE.sum() == T
    # a capacity of ceil(15 / 4) holds four of the five
    assert mixed.num_dropped_BT.tolist() == [[0] * T, [0] * T, [0, 0, 0, 0, 1]]
    assert not np.asarray(mixed.out_BTD)[:2].any()


def test_what_a_capacity_drops_is_what_came_last_and_is_counted():
    routing = Routing(4, 2)
    x_BTD, router, weights = random_layer(routing)
    x_BTD[:] = x_BTD[0, 0]
    mixed = mix(x_BTD, router, weights, routing, Dispatch("capacity", 1.0, Tiles(1, 1)))
    # all tokens choose the same two experts, of which each has ceil(30 / 4) = 8 rows for 15 tokens
    dropped_M = np.asarray(mixed.num_dropped_BT).reshape(-1)
    assert dropped_M.tolist() == [0] * 8 + [2] * 7
    out_MD = np.asarray(mixed.out_BTD).reshape(-1, D)
    assert not out_MD[8:].any()
    np.testing.assert_array_equal(out_MD[1:8], np.broadcast_to(out_MD[0], (7, D)))
    (load_E,), (rows_E,), (dropped_E,) = mixed.use.load_SE, mixed.use.rows_SE, mixed.use.dropped_SE
    assert sorted(load_E.tolist()) == [0, 0, 15, 15] and sorted(rows_E.tolist()) == [0, 0, 8, 8]
    assert sorted(dropped_E.tolist()) == [0, 0, 7, 7]


def test_rows_of_an_expert_are_its_tokens_in_order_and_their_weights():
    rng = np.random.default_rng(0)
    M, E, k = 37, 5, 3
    expert_MZ = np.array([rng.choice(E, k, False, [0.6, 0.3, 0.1, 0, 0]) for _ in range(M)])
    expert_MZ[rng.random(M) < 0.2] = E
    weight_MZ = rng.random((M, k)).astype(np.float32)
    rows = sort_choices(Choices(jnp.asarray(expert_MZ), jnp.asarray(weight_MZ)), E)
    end = 0
    for e, (first, load) in enumerate(zip(rows.first_E, rows.load_E, strict=True)):
        assert first == end, "rows are without gaps"
        end = first + load
        tokens, ranks = np.nonzero(expert_MZ == e)
        np.testing.assert_array_equal(rows.token_U[first:end], tokens)
        np.testing.assert_array_equal(rows.weight_U[first:end], weight_MZ[tokens, ranks])
    assert end == (expert_MZ < E).sum() and len(rows.token_U) == M * k


def test_places_of_a_capacity_go_to_the_first_choices_of_each_expert():
    expert_MZ = jnp.array([[0, 1], [0, 2], [2, 0], [3, 3], [0, 1]])
    places = assign_capacity_rows(expert_MZ, 3, 2)
    assert places.row_MZ.tolist() == [[0, 2], [1, 4], [5, 6], [6, 6], [6, 3]]
    assert places.token_U.tolist() == [0, 1, 0, 4, 1, 2]


def test_equal_scores_choose_the_first_experts():
    x_MD, router = jnp.ones((2, D)), Router(jnp.zeros((D, 6)))
    assert route(x_MD, jnp.ones(2, bool), router, PLAIN).expert_MZ.tolist() == [[0, 1]] * 2


def test_scores_that_have_become_equal_still_choose_by_their_logits():
    routing = Routing(6, 2, "sigmoid")
    logits_ME = jnp.array([[0.0, 40.0, 50.0, 60.0, 45.0, -1.0]])
    choices = route(jnp.ones((1, 1)), jnp.ones(1, bool), Router(logits_ME), routing)
    assert choices.expert_MZ.tolist() == [[3, 2]]


def test_the_first_layers_of_a_decoder_keep_their_kinds():
    moe = MoeConfig(PLAIN, mlp=F)
    sizes = {"vocab_size": 9, "embed": D, "mlp": F, "head_dim": 4, "max_position": 8}
    heads = {"num_query_heads": 2, "num_kv_heads": 1}
    config = DecoderConfig.alike(
        **sizes, **heads, windows=(None, 3, None, 3), moe=moe, sparse=(False, True) * 2
    )
    two = config.first_layers(2)
    assert alike(two).windows == (None, 3) and two.sparse_layers == (1,)
    assert config.first_layers(1).moe is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Routing(4, 5), "num_chosen: expected 1 to 4"),
        (lambda: Routing(6, 2, groups=ExpertGroups(4, 1, 1)), "divisor of 6"),
        (lambda: Routing(6, 4, groups=ExpertGroups(3, 1, 1)), "num_chosen: expected 1 to 2"),
        (lambda: Dispatch("capacity"), "capacity_factor: expected a number above 0, got None"),
        (lambda: Dispatch("lossless", 1.5), "capacity_factor: expected none"),
        (lambda: Dispatch("dense"), "dispatch: expected one of"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
