"""Pipeline for a GPU: train the next cohort speculatively while this round's uploads are encoded and decoded.

Where uploads are exact and the server takes a plain weighted mean, the next version can be computed on the GPU from the
outcome of training, before any message is encoded. The next cohort is then trained from the predicted coordinates while
the host packs, checks and decodes the messages of this round. The server still uses the messages alone: the prediction
is used only if its step has the bits of the ledger's newest entry, and training from a wrong prediction is discarded.

Of a small model a copy of the public state stays on the host. Downloads are encoded and rounds are closed on it by the
same additions, so that neither waits for the GPU.

This repeats the arithmetic of `close_round` for one case (`predict`). Measured on an H200 (`benchmarks/speed`, two
runs each): CNN-2 with 100 clients 1.24x, the CIFAR CNN with 10 clients 1.20x (bf16) and 1.27x (tf32), CNN-2 with 10
clients no difference. On a CPU it is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.tree import FlatTree, Tree, add, bring, cut, flatten, tmap, weighted_mean
from thinwire.protocol.client import Group
from thinwire.protocol.contract import Contract
from thinwire.protocol.state import PublicState, ServerState
from thinwire.protocol.upload import received_weight
from thinwire.training.evaluation import Evaluation
from thinwire.training.inputs import TrainingInputs, TrainingOutcome
from thinwire.wire.bits import ends_with


class Trained(NamedTuple):
    """A cohort that was trained in advance."""

    number: int  # rounds done before it
    group: Group
    inputs: TrainingInputs
    outcome: TrainingOutcome
    ready: torch.cuda.Event | None  # recorded when its initial coordinates were computed


class Prediction(NamedTuple):
    """The predicted step of a round and the coordinates after it, on the GPU."""

    step: Tensor
    coords: Tree


class Pipeline:
    """Work that a GPU and the host do in parallel.

    A *stream* is a queue of GPU work that is processed in order; an *event* marks a position in it. On a CPU there are
    neither, and all methods do nothing.

    Args:
        device: the training device.
        on: whether cohorts are trained in advance where that is possible.
        small: whether a copy of the public state is kept on the host.
    """

    def __init__(self, device: torch.device, on: bool, *, small: bool = False) -> None:
        self.device, self.on, self._small = device, on, small
        # of high priority: the host waits for its short work, while long training runs beside it
        cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device, priority=-1) if cuda else None  # type: ignore[no-untyped-call]
        self.trained: Trained | None = None
        self.evaluated: Callable[[], Evaluation] | None = None  # of the version that it was trained from
        self._step: Tensor | None = None  # the predicted step, on the host
        self._copy: tuple[Tree, PublicState] | None = None  # the newest coordinates, and their public state on the host

    def take(self, number: int, clients: tuple[int, ...], coords: Tree) -> Trained | None:
        """The cohort that was trained in advance, if it is this one, from these coordinates."""
        trained, self.trained, self.evaluated = self.trained, None, None
        if trained is None or (trained.number, trained.group.clients) != (number, clients):
            return None
        return trained if trained.group.public.coords is coords else None

    def stop(self) -> None:
        """Train nothing in advance any more, and discard what was."""
        self.trained, self.evaluated, self._step, self._copy, self.on = None, None, None, None, False

    def on_host(self, server: ServerState) -> ServerState:
        """The same state with its public state on the host, if a copy is there; else the state itself."""
        if self._copy is None or self._copy[0] is not server.public.coords:
            return server
        return server._replace(public=self._copy[1])

    def now(self) -> torch.cuda.Event | None:
        """An event for everything that was submitted to the GPU until now."""
        return None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

    def expect(self, prediction: Prediction) -> torch.cuda.Event | None:
        """Begin to copy a predicted step to the host; returns an event for the prediction and the copy."""
        step = prediction.step
        if step.device.type == "cuda":
            step = torch.empty(step.shape, dtype=step.dtype, pin_memory=True).copy_(step, non_blocking=True)
        self._step = step
        return self.now()

    @contextmanager
    def in_parallel(self, since: torch.cuda.Event | None = None) -> Iterator[None]:
        """Run GPU work in parallel with a cohort that is trained in advance, if there is one.

        Args:
            since: the event after which its inputs are ready; by default when that cohort could begin.
        """
        since = since or (self.trained.ready if self.trained else None)
        if self.trained is None or self.stream is None or since is None:
            yield
            return
        self.stream.wait_event(since)
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Let GPU work that is submitted from now on wait for that of `in_parallel`, so that it can use its results."""
        if self.trained is not None and self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def evaluation(self, server: ServerState) -> Callable[[], Evaluation] | None:
        """The evaluation of this version, if it was begun in advance; a call waits for it."""
        known = self.trained is not None and self.trained.group.public.coords is server.public.coords
        return self.evaluated if known else None

    def confirm(self, server: ServerState) -> ServerState:
        """The server's state, with the predicted coordinates if they are right; else training is discarded."""
        if self.trained is None or self._step is None:
            return server
        public, step = server.public, self._step
        if self.trained.ready is not None:
            self.trained.ready.synchronize()
        entry = server.ledger.entries[-1] if server.ledger.entries else b""
        if ends_with(entry, step.numpy().data.cast("B")):  # the payload is the last part of an entry
            predicted = public._replace(base=self.trained.group.public.base, coords=self.trained.group.public.coords)
            self._copy = (predicted.coords, _host_copy(public, predicted.coords)) if self._small else None
            return server._replace(public=predicted)
        self.stop()  # a prediction that was wrong once would be wrong again
        if self.stream is None:
            return server
        torch.cuda.synchronize(self.device)
        if public.device.type == "cpu":
            return server._replace(public=PublicState(public.version, *bring(public[1:], self.device)))
        # copies: memory of the side stream must not be reused by it while the main stream reads it
        trees = (tmap(torch.clone, tree) for tree in public[1:])
        return server._replace(public=PublicState(public.version, *trees))


def _host_copy(public: PublicState, coords: Tree) -> PublicState:
    """A public state on the host; its coordinates are one vector where these are."""
    copy = PublicState(public.version, *bring(public[1:], "cpu"))
    if isinstance(coords, FlatTree) and not isinstance(copy.coords, FlatTree):
        copy = copy._replace(coords=cut(flatten(copy.coords), coords.names, coords.like))
    return copy


def is_predictable(contract: Contract, server: ServerState, names: frozenset[str]) -> bool:
    """Whether the next version is the weighted mean of exact uploads, and no part keeps a state."""
    method, version = contract.method, server.public.version
    exact = all(codec.exact for codec in (*method.ups, method.down, method.merge_codec))
    return (
        exact
        and method.sketch.is_identity
        and not method.space.reparametrized
        and method.aggregator.is_weighted_mean
        and not (method.privacy.active or method.mask.active or contract.private)
        and method.schedule.resamples(version + 1)
        and method.opt_lifetime != "run"
        and method.opt_owner == "client"
        and method.download == "incremental"
        and method.upload == "delta"
        and not (method.secure_aggregation or method.budget.tiers or method.next_stage)
        and not (server.opt or server.correction or contract.buffers.blocks or contract.has_client_correction)
        and not contract.shared.blocks
        and names == contract.coords.named
        and contract.window(version) == contract.window(version + 1)
    )


def predict(contract: Contract, group: Group, samples: tuple[int, ...], codes: Tensor) -> Prediction:
    """The result of `close_round` for these clients, by the same operations in the same order, on their device.

    Args:
        contract: the contract at this version.
        group: the clients.
        samples: number of examples of each.
        codes: their updates, one row each.
    """
    public, names, shapes = group.public, contract.coords.names, contract.coords.like
    order = sorted(range(len(group.clients)), key=lambda i: group.clients[i])
    known = {count: received_weight(contract, count) for count in set(samples)}
    weights = [known[samples[i]] for i in order]
    rows = codes.unbind()
    mean = cut(weighted_mean([{"": rows[i]} for i in order], weights)[""], names, shapes)
    # blocks in one vector: a few kernels, not some for each block
    now = cut(flatten(public.coords), names, shapes)
    change, _ = contract.server_opt(public.version).server_step(mean, {}, now)
    return Prediction(flatten(change), add(now, change))
