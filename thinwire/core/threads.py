"""Thread pools whose threads compute on one core each.

numpy, zlib and torch release the GIL, so threads suffice. The pool has as many threads as torch may use
(`torch.get_num_threads()`, `OMP_NUM_THREADS`); with one, no thread is started.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from threading import Barrier, local
from typing import TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")
LEAST = 1 << 20  # bytes per item: smaller items spend most time in Python, where threads wait for the GIL
MOST = 16  # threads; more slow each other down
_this = local()  # marks threads of the pool: one that waits for others of the pool could deadlock


def each(fn: Callable[[A], B], items: Sequence[A], size: int) -> list[B]:
    """Apply a function to each item, in parallel if the items are large; results are in order.

    Raises the first error.

    Args:
        fn: a function without side effects on shared objects.
        items: its arguments.
        size: approximate number of bytes that it processes per item.

    >>> each(lambda x: 2 * x, [1, 2, 3], size=8)
    [2, 4, 6]
    """
    workers = min(getattr(_this, "cores", 0) or torch.get_num_threads(), MOST)
    if min(workers, len(items)) <= 1 or size < LEAST or getattr(_this, "works", False):
        return [fn(item) for item in items]
    return list(_pool(workers, os.getpid()).map(fn, items))


@contextmanager
def on_one_core() -> Iterator[None]:
    """Restrict torch to one core in this thread; `each` may still use all cores.

    For threads that mostly use a GPU: waking up other cores for a short computation takes longer than the computation,
    especially if it is rare. Measured with an H200: milliseconds to compare 45 KB.

    >>> with on_one_core():
    ...     torch.get_num_threads()
    1
    """
    if hasattr(_this, "cores"):
        yield
        return
    _this.cores = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(_this.cores)
        del _this.cores


@lru_cache(maxsize=1)
def _pool(workers: int, process: int) -> ThreadPoolExecutor:
    """The pool of this process; a forked process needs a new one, because threads are not inherited."""
    return start(workers)


def start(workers: int) -> ThreadPoolExecutor:
    """A pool of threads that compute on one core each; they end when the pool is garbage-collected."""
    before = torch.get_num_threads()
    ready = Barrier(workers)  # so that each thread runs the initializer once

    def one_core() -> None:
        torch.get_num_threads()  # the first call in a thread copies the setting of the process: make it before the next
        torch.set_num_threads(1)
        _this.works = True
        ready.wait()

    pool = ThreadPoolExecutor(workers, thread_name_prefix="thinwire")
    for job in [pool.submit(one_core) for _ in range(workers)]:
        job.result()
    torch.set_num_threads(before)  # for this thread, and as the default of new threads
    return pool
