"""Measure the float32 matrix product of this machine: GFLOP/s, the best of several attempts.

Libraries differ by a factor of two, so the script measures several; the highest is the ceiling.

python scripts/peers/matmul_ceiling.py THREADS
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable

SIZE = 2048
TRIES = 12


def main() -> None:
    num_threads = int(sys.argv[1])
    measured = {"numpy": _gflops(_numpy_product())}
    if importlib.util.find_spec("torch"):
        measured["torch"] = _gflops(_torch_product(num_threads))
    if importlib.util.find_spec("jax"):
        measured["jax"] = _gflops(_jax_product())
    print(json.dumps(measured))


def _gflops(product: Callable[[], object]) -> float:
    product()
    seconds = []
    for _ in range(TRIES):
        started = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - started)
    return round(2 * SIZE**3 / min(seconds) / 1e9, 1)


def _numpy_product() -> Callable[[], object]:
    import numpy as np

    a, b = np.random.default_rng(0).standard_normal((2, SIZE, SIZE), dtype=np.float32)
    return lambda: a @ b


def _torch_product(num_threads: int) -> Callable[[], object]:
    import torch

    torch.set_num_threads(num_threads)
    a, b = torch.randn(2, SIZE, SIZE)
    return lambda: a @ b


def _jax_product() -> Callable[[], object]:
    import jax
    import jax.numpy as jnp

    cpu = jax.devices("cpu")[0]  # its threads follow the cores that this process may use
    a, b = jax.device_put(jnp.ones((2, SIZE, SIZE), jnp.float32), cpu)
    product = jax.jit(jnp.matmul)
    return lambda: product(a, b).block_until_ready()


if __name__ == "__main__":
    main()
