"""A value that is computed when it is first needed, on a GPU in parallel with its other work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

import torch

A = TypeVar("A")


class Lazy(Generic[A]):
    """A value that is computed when it is first needed, or before, by another thread.

    Args:
        work: computes it.
        stream: the CUDA stream for its work, so that it does not wait for work submitted since; None on a CPU.
        since: the event after which its inputs are ready.

    >>> lazy = Lazy(lambda: print("now") or 2)
    >>> lazy() + lazy()
    now
    4
    """

    def __init__(
        self, work: Callable[[], A], stream: torch.cuda.Stream | None = None, since: torch.cuda.Event | None = None
    ) -> None:
        self._work, self._stream, self._since = work, stream, since
        self._made: Future[A] | None = None

    def __call__(self) -> A:
        """The value; waits for the thread that computes it. Raises the error of the computation."""
        if self._made is None:
            made: Future[A] = Future()
            made.set_result(self._compute())
            self._made = made
        return self._made.result()

    def begin(self, pool: Executor) -> None:
        """Compute the value in a thread of this pool, unless it was begun before."""
        self._made = self._made or pool.submit(self._compute)

    def _compute(self) -> A:
        if self._stream is None or self._since is None:
            return self._work()
        self._stream.wait_event(self._since)
        with torch.cuda.stream(self._stream):
            return self._work()
