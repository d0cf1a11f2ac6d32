"""How a machine computes: several cores, transfers to and from a GPU, the precision of torch.

numpy, zlib and torch release the GIL, so threads suffice. The pool has as many threads as torch may use
(`torch.get_num_threads()`, `OMP_NUM_THREADS`); with one, no thread is started. Between many threads the GIL is the
bottleneck: there a long computation by torch is left to torch's own threads (`half_the_cores`), which do not need it.
Measured in rounds on 16 cores with ten vectors of 1.1 million values: 1.5 to 1.8 ms in place of 2.8 to 3.1.

Pinned memory is for transfers to a GPU. The operating system clears new memory page by page, which for many megabytes
takes longer than writing to it; torch caches and reuses pinned memory.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache, lru_cache
from threading import Barrier, get_ident, local
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

A = TypeVar("A")
B = TypeVar("B")
PARALLEL_BYTES = 1 << 20  # bytes per item: smaller items spend most time in Python, where threads wait for the GIL
MAX_THREADS = 16  # threads; more slow each other down
FEW = 4  # threads that rarely wait for the GIL
_this = local()  # marks threads of the pool: one that waits for others of the pool could deadlock
_restricted: dict[int, int] = {}  # the cores of torch before `on_one_core`, by the thread that is in it


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
    if size < PARALLEL_BYTES or len(items) <= 1 or (workers := min(cores(), len(items))) <= 1:
        return [fn(item) for item in items]
    left, made, failed = iter(range(len(items))), dict[int, B](), dict[int, BaseException]()

    def work() -> None:
        for i in left:  # all threads take from one iterator: one job a thread, however many items there are
            try:
                made[i] = fn(items[i])
            except BaseException as error:
                failed[i] = error
                for _ in left:  # the others stop, too
                    pass

    pool = _pool(cores(), os.getpid())
    try:
        for job in [pool.submit(work) for _ in range(workers)]:
            job.result()
    finally:
        for _ in left:  # after an interrupt, too
            pass
    if failed:
        raise failed[min(failed)]
    return [made[i] for i in range(len(items))]


def cores() -> int:
    """The number of threads that `each` uses in this thread; 1 in a thread of the pool.

    >>> with on_one_core():
    ...     cores() >= 1
    True
    """
    if getattr(_this, "works", False):
        return 1
    before = _restricted.get(get_ident(), 0)
    return min(before or max([torch.get_num_threads(), *_restricted.values()]), MAX_THREADS)


@contextmanager
def on_one_core() -> Iterator[None]:
    """Restrict torch to one core in this thread; `each` may still use all cores, `half_the_cores` half of them.

    For threads that mostly use a GPU: waking up other cores for a short computation takes longer than the computation,
    especially if it is rare. Measured with an H200: milliseconds to compare 45 KB.

    >>> with on_one_core():
    ...     torch.get_num_threads()
    1
    """
    if get_ident() in _restricted:
        yield
        return
    _restricted[get_ident()] = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(_restricted.pop(get_ident()))


@contextmanager
def half_the_cores() -> Iterator[None]:
    """Let torch use half of the cores of `each` in this thread, also within `on_one_core`; one in a thread of a pool.

    Half: torch's threads wait for each other without sleeping, so a core that another thread needs delays them all.
    Measured with 16 cores and another busy thread: the norms of ten vectors took 0.6 ms alone, and 20 ms beside it.

    >>> with on_one_core(), half_the_cores():
    ...     torch.get_num_threads() == max(1, cores() // 2)
    True
    """
    before, now = torch.get_num_threads(), max(1, cores() // 2)
    torch.set_num_threads(now)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


SLICE = 1 << 17  # values that are averaged at a time: they fit into the cache of a core
MAX_PINNED = 1 << 30  # bytes: other processes cannot use pinned memory


def weighted_sum(vectors: Sequence[Tensor], fractions: Sequence[float], out: Tensor | None = None) -> Tensor:
    """sum_i fraction_i vector_i on the CPU, summed in the order given: the same bits on any number of cores.

    >>> weighted_sum([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], [0.5, 0.5])
    tensor([2., 3.])
    """
    is_long = len(vectors[0]) > SLICE
    if out is None:
        out = empty_long(len(vectors[0]), vectors[0].dtype) if is_long else torch.empty_like(vectors[0])
    if is_long and cores() <= FEW:
        slices = [torch.split(vector, SLICE) for vector in (out, *vectors)]
        pieces, size = list(zip(*slices, strict=True)), len(vectors) * SLICE * out.element_size()
        each(lambda piece: weighted_sum(piece[1:], fractions, piece[0]), pieces, size)
        return out
    with half_the_cores() if is_long else nullcontext():
        torch.mul(vectors[0], fractions[0], out=out)
        for vector, fraction in zip(vectors[1:], fractions[1:], strict=True):
            out.add_(vector, alpha=fraction)
    return out


def empty_long(size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """An uninitialized vector on the CPU, in pinned memory if it is long and this process uses a GPU.

    >>> empty_long(3).shape
    torch.Size([3])
    """
    pinned = PARALLEL_BYTES <= size * dtype.itemsize <= MAX_PINNED and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.empty(size, dtype=dtype, pin_memory=pinned)


def to_host(values: Tensor, *, aside: bool, margin: int = 0) -> tuple[Tensor, torch.cuda.Event]:
    """Begin to copy a tensor from a GPU to pinned memory; returns the copy, and an event after which it is complete.

    Args:
        values: the tensor.
        margin: free values before and after each row of a matrix, which are part of the result. All rows begin at a
            multiple of it.
        aside: whether work that is submitted to the GPU from now on need not wait for the copy. Nothing may write to
            the tensor any more.
    """
    stream = now = torch.cuda.current_stream(values.device)
    if aside:
        stream = _copies(values.device)
        stream.wait_stream(now)
        values.record_stream(stream)
    with torch.cuda.stream(stream):
        if not margin:
            copy = torch.empty_like(values, device="cpu", pin_memory=True)
            return copy.copy_(values, non_blocking=True), stream.record_event()
        size = values.shape[1]
        copy = torch.empty(len(values), size + -size % margin + 2 * margin, dtype=values.dtype, pin_memory=True)
        for row, to in zip(values, copy, strict=True):
            to[margin : margin + size].copy_(row, non_blocking=True)
        return copy, stream.record_event()


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies from a GPU."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def sent(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device, asynchronously to a GPU.

    >>> sent(np.arange(3), torch.device("cpu"))
    tensor([0, 1, 2])
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


Precision = Literal["float32", "tf32", "bf16"]

# oneDNN is usually the better choice, but not on 64-bit ARM, where its backward convolution uses a reference kernel.
# Measured on two Neoverse-N1 cores with CNN-2: without it a loop over clients is 1.3x faster, vmap 5x.
ONEDNN_PAYS = platform.machine() not in ("aarch64", "arm64")


@contextmanager
def compute_with(device: torch.device, precision: Precision, onednn: bool = ONEDNN_PAYS) -> Iterator[None]:
    """Compute with these settings; the former ones are restored afterwards.

    Args:
        device: the device.
        precision: of matrix products on a GPU.
        onednn: whether CPU kernels may be oneDNN's, where that is enabled.

    >>> with compute_with(torch.device("cpu"), "float32", onednn=False):
    ...     torch.backends.mkldnn.enabled
    False
    """
    settings: list[tuple[Any, str, Any]] = [
        (torch.backends.mkldnn, "enabled", bool(torch.backends.mkldnn.enabled) and onednn)
    ]
    if device.type == "cuda":
        kind, cudnn = "ieee" if precision == "float32" else "tf32", torch.backends.cudnn
        products: Any = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)  # type: ignore[attr-defined]
        settings += [(part, "fp32_precision", kind) for part in products]
        settings += [(cudnn, "deterministic", True), (cudnn, "benchmark", False)]
    before = [(part, name, getattr(part, name)) for part, name, _ in settings]
    try:
        for setting in settings:
            setattr(*setting)
        yield
    finally:
        for setting in before:
            setattr(*setting)
