"""Work done in another thread, a few items ahead of the consumer of its results.

Knows nothing of what the work is. Guarantees: results come in the order of the items; an error of
the work is raised in the place of its result; few items are held at any time; a consumer that
stops, or is stopped by a signal, does not wait for unfinished work.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

DEPTH = 3
"""The largest number of items whose results are not taken yet."""


def ahead(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield the result for every item; `items` is read in the consumer's thread."""
    worker = ThreadPoolExecutor(1)
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(worker.submit(work, item))
            if len(waiting) > DEPTH:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        worker.shutdown(wait=False, cancel_futures=True)
