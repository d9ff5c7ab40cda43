r"""Train a small mixture of experts for a minute, and write it with prompts for `noria batch`.

The text comes from Markov chains: each sequence follows one of several chains, so that experts can
specialise. No loss balances the router, so its skew is that of the text. Training uses the
reference dispatch, whose products have gradients.

    python scripts/train_mixture.py build/mixture
    noria batch -i build/mixture/prompts.jsonl -o build/mixture/out.jsonl \
        --model build/mixture/model
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.moe_config import Dispatch, MoeConfig, Routing
from noria.runtime.checkpoint import save_orbax

V = 64
NUM_CHAINS, NUM_SUCCESSORS = 4, 3
BATCH, LENGTH = 16, 64
NUM_LAYERS = 4
CONFIG = DecoderConfig.alike(
    vocab_size=V,
    embed=64,
    mlp=96,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=16,
    windows=(None,) * NUM_LAYERS,
    max_position=512,
    moe=MoeConfig(Routing(8, 2), mlp=96),
)


class Chains:
    """Markov chains over the vocabulary, each token with a few successors."""

    def __init__(self, rng: np.random.Generator):
        self._rng = rng
        self._successors = rng.integers(0, V, (NUM_CHAINS, V, NUM_SUCCESSORS))

    def sample(self, count: int, length: int) -> np.ndarray:
        """Return sequences `[count, length]`; successors have probabilities 3 : 2 : 1."""
        chain = self._rng.integers(0, NUM_CHAINS, count)
        tokens = np.empty((count, length), np.int32)
        tokens[:, 0] = self._rng.integers(0, V, count)
        weights = np.arange(NUM_SUCCESSORS, 0, -1)
        for t in range(1, length):
            choice = self._rng.choice(NUM_SUCCESSORS, count, p=weights / weights.sum())
            tokens[:, t] = self._successors[chain, tokens[:, t - 1], choice]
        return tokens


def main() -> None:
    options = _parse()
    rng = np.random.default_rng(0)
    chains = Chains(rng)
    definition = AbstractModel(CONFIG)
    parameters = train(definition, initial(definition, rng), chains, options.steps)
    save_orbax(options.directory / "model", parameters, family="mixtral", config=CONFIG)
    lines = [
        {
            "custom_id": f"row-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": "mixture",
                "prompt": chains.sample(1, int(rng.integers(16, 128)))[0].tolist(),
                "max_tokens": 64,
            },
        }
        for i in range(options.rows)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (options.directory / "prompts.jsonl").write_text(text, encoding="utf-8")


def initial(definition: AbstractModel, rng: np.random.Generator) -> dict[str, jax.Array]:
    """Return ones for norms, and normal matrices divided by the root of their last size but one."""

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        return np.ones(shape) if len(shape) == 1 else rng.normal(size=shape) / shape[-2] ** 0.5

    shapes = definition.abstract_parameters(jnp.float32)
    return {name: jnp.asarray(draw(of.shape), jnp.float32) for name, of in shapes.items()}


def train(
    definition: AbstractModel, parameters: dict[str, jax.Array], chains: Chains, num_steps: int
) -> dict[str, jax.Array]:
    """Train on next tokens with Adam."""
    optimizer = optax.adam(3e-3)
    state = optimizer.init(parameters)

    def loss(parameters: dict[str, jax.Array], tokens_BT: jax.Array) -> jax.Array:
        decoder = definition.bind(parameters, dispatch=Dispatch("ragged"))
        x_BTD, _ = decoder.forward(tokens_BT, jnp.full(BATCH, LENGTH))
        logits_MV = decoder.logits(x_BTD[:, :-1].reshape(-1, CONFIG.embed))
        target_M = tokens_BT[:, 1:].reshape(-1)
        return optax.softmax_cross_entropy_with_integer_labels(logits_MV, target_M).mean()

    @jax.jit
    def step(parameters, state, tokens_BT):
        value, gradients = jax.value_and_grad(loss)(parameters, tokens_BT)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, value

    for i in range(num_steps):
        parameters, state, value = step(parameters, state, chains.sample(BATCH, LENGTH))
        if i % 100 == 0 or i == num_steps - 1:
            print(f"step {i}: {float(value):.3f} nats a token", flush=True)
    return parameters


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="folder for model/ and prompts.jsonl")
    parser.add_argument("--steps", type=int, default=500, help="training steps (500)")
    parser.add_argument("--rows", type=int, default=256, help="prompts (256)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
