"""Measure the float32 matrix product of this machine: GFLOP/s, the best of several tries.

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


if __name__ == "__main__":
    main()
