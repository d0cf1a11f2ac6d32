"""Work on several cores: threads that compute on one core each.

numpy, zlib and torch let go of Python's lock while they work, so threads are enough. As many as torch may use
(`torch.get_num_threads()`, `OMP_NUM_THREADS`); with one, nothing is started.
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
LEAST = 1 << 20  # bytes of one item: below, Python's own share of the work is the larger, and threads wait for its lock
MOST = 16  # threads; more stand in each other's way
_this = local()  # thread; one of the pool that waited for others of it could wait for ever


def each(fn: Callable[[A], B], items: Sequence[A], size: int) -> list[B]:
    """fn of each item, in their order, side by side if they are large. The first error is raised.

    Args:
        fn: a function that changes nothing but what it makes.
        items: what it is asked about.
        size: about how many bytes it handles for one of them.

    >>> each(lambda x: 2 * x, [1, 2, 3], size=8)
    [2, 4, 6]
    """
    workers = min(getattr(_this, "cores", 0) or torch.get_num_threads(), MOST)
    if min(workers, len(items)) <= 1 or size < LEAST or getattr(_this, "works", False):
        return [fn(item) for item in items]
    return list(_pool(workers, os.getpid()).map(fn, items))


@contextmanager
def on_one_core() -> Iterator[None]:
    """Let torch compute on one core in this thread; `each` may still use all.

    For whoever has much else to do on a GPU: to wake up other cores for a short piece of work takes longer than the
    work, the longer the less often it happens. Measured beside an H200: milliseconds to compare 45 KB.

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
    """The threads of this process: a fork has none of its parent's."""
    return start(workers)


def start(workers: int) -> ThreadPoolExecutor:
    """Threads that compute on one core each; they end when nobody holds the pool any more."""
    before = torch.get_num_threads()
    ready = Barrier(workers)  # so that each thread is asked once

    def one_core() -> None:
        torch.get_num_threads()  # a thread takes over the process's number when it first asks, and must not do so later
        torch.set_num_threads(1)
        _this.works = True
        ready.wait()

    pool = ThreadPoolExecutor(workers, thread_name_prefix="thinwire")
    for job in [pool.submit(one_core) for _ in range(workers)]:
        job.result()
    torch.set_num_threads(before)  # for this thread, and as the default of others
    return pool
