"""A value that is computed when it is first needed, on a GPU in parallel with its other work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

A = TypeVar("A")


class Lazy(Generic[A]):
    """A value that is computed when it is first needed.

    Args:
        work: computes it.
        stream: the CUDA stream for its work, so that it does not wait for work submitted since; None on a CPU.
        since: the event after which its inputs are ready.

    >>> lazy = Lazy(lambda: print("now") or 2)
    >>> lazy.result() + lazy.result()
    now
    4
    """

    def __init__(
        self, work: Callable[[], A], stream: torch.cuda.Stream | None = None, since: torch.cuda.Event | None = None
    ) -> None:
        self._work, self._stream, self._made = work, stream, False
        self._since = since
        self._value: A

    def result(self) -> A:
        """The value."""
        if not self._made:
            if self._stream is None or self._since is None:
                self._value = self._work()
            else:
                self._stream.wait_event(self._since)
                with torch.cuda.stream(self._stream):
                    self._value = self._work()
            self._made = True
        return self._value
