"""A GPU that does not wait: what works beside its training, and a cohort that is trained before its time.

A *stream* is a row of work that a GPU does in order, beside other rows; an *event* stands in a row and can be waited
for. On a CPU there are neither, and all that is here does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from thinwire.core.tree import Tree, tmap
from thinwire.protocol.state import Public, ServerState
from thinwire.training.local import TrainingOutcome, Workload


class Early(NamedTuple):
    """A cohort that was trained before the messages of the round before it were read."""

    number: int  # rounds that were done before it
    clients: tuple[int, ...]
    coords: Tree  # what it was trained from; it counts only if this is the public state
    work: Workload
    trained: TrainingOutcome
    ready: torch.cuda.Event | None  # when that state was there


class Ahead:
    """What a simulation has done ahead of its time.

    Args:
        device: where clients are trained.
        on: whether cohorts are trained ahead where that is possible.
    """

    def __init__(self, device: torch.device, on: bool) -> None:
        self.device, self.on = device, on
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.early: Early | None = None

    def take(self, number: int, clients: tuple[int, ...], coords: Tree) -> Early | None:
        """The cohort that was trained early, if it is this one, from these coordinates."""
        early, self.early = self.early, None
        fits = early is not None and (early.number, early.clients) == (number, clients) and early.coords is coords
        return early if fits else None

    def stop(self) -> None:
        """Train nothing ahead any more, and drop what was."""
        self.early, self.on = None, False

    def now(self) -> torch.cuda.Event | None:
        """When all is done that the GPU was asked for until now."""
        return None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

    @contextmanager
    def beside(self, since: torch.cuda.Event | None = None) -> Iterator[None]:
        """Let the GPU do what follows beside a cohort that it trains early, if it does.

        Args:
            since: when what it needs is there; by default when that cohort could begin.
        """
        since = since or (self.early.ready if self.early else None)
        if self.early is None or self.stream is None or since is None:
            yield
            return
        self.stream.wait_event(since)
        with torch.cuda.stream(self.stream):
            yield

    def settled(self, server: ServerState) -> ServerState:
        """The server's state; where it is not the one that was foreseen, what was trained from that one is dropped."""
        if self.early is None or server.public.coords is self.early.coords:
            return server
        self.stop()  # what was wrong once would be wrong again
        if self.stream is None:
            return server
        torch.cuda.synchronize(self.device)
        # what was made beside the others' work must not be given back to it while they use it
        trees = (tmap(torch.clone, tree) for tree in server.public[1:])
        return server._replace(public=Public(server.public.version, *trees))
