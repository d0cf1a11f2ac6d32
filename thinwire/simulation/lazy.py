"""What the host can do while a GPU trains: messages to clients that already have what they need, the next batches.

A GPU works through what it was asked while Python would wait for the end of it. Work that is put off until then goes
beside: it waits for what it needs, and for nothing that the GPU was asked for since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

A = TypeVar("A")


class Lazy(Generic[A]):
    """A result that is made when it is first asked for.

    Args:
        work: what makes it.
        stream: where the GPU does it, beside all else; None on a CPU.
        since: when what it needs is ready there.

    >>> later = Lazy(lambda: print("now") or 2)
    >>> later.result() + later.result()
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
        """The result."""
        if not self._made:
            if self._stream is None or self._since is None:
                self._value = self._work()
            else:
                self._stream.wait_event(self._since)
                with torch.cuda.stream(self._stream):
                    self._value = self._work()
            self._made = True
        return self._value
