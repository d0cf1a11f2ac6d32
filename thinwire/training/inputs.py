"""Inputs and outcome of local training: everything that the training of a cohort depends on, and what it returns.

Local training knows nothing of messages or of the protocol. A *stacked* tree has the clients of the cohort on the first
axis of every block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.tree import State, Tree
from thinwire.errors import ConfigError
from thinwire.optimizers.base import Correction, Optimizer
from thinwire.optimizers.penalties import Penalty
from thinwire.spaces.base import Space

Backend = Literal["graph", "chain", "threads", "vmap", "loop"]
ExampleMask: TypeAlias = "Tensor | None"


class UnsupportedModel(ConfigError):
    """A training backend cannot train this model; the message gives the reason."""


class TrainableModel(Protocol):
    """A model and its loss as pure functions of the weights."""

    explicit: ClassVar[bool]
    """Whether `gradient` needs no autograd and returns gradients as a `Vector` where the weights are one."""

    def loss(
        self, weights: Tree, buffers: Tree, inputs: Any, targets: Tensor, mask: ExampleMask
    ) -> tuple[Tensor, Tree]:
        """Mean loss over the examples where `mask` is 1 (None: all examples), and the next buffers."""
        ...

    def gradient(
        self, weights: Tree, buffers: Tree, inputs: Any, targets: Tensor, mask: ExampleMask
    ) -> tuple[Tree, tuple[Tensor, Tree]]:
        """Gradient of `loss` with respect to the weights that require one, and the result of `loss`. Not under vmap."""
        ...


@dataclass(frozen=True, eq=False)
class Workload:
    """The batches of some clients in one round.

    Args:
        index: (clients, steps, batch) int64, on the training device: indices that `gather` understands.
        rows: (clients, steps) number of examples of each batch that count; 0 after a client's last step.
        samples: number of examples of each client.
        clients: the number of each client.
        key: the root of all randomness.
        number: rounds done before this one.
        gather: returns inputs and targets for indices.
        examples: the indices of all examples of each client, for a trainer of one's own; empty where there is none.
    """

    index: Tensor
    rows: np.ndarray
    samples: tuple[int, ...]
    clients: tuple[int, ...]
    key: Key
    number: int
    gather: Callable[[Tensor], tuple[Any, Tensor]]
    examples: tuple[np.ndarray, ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        """Number of steps of each client."""
        return tuple((self.rows > 0).sum(1).tolist())

    @property
    def seed(self) -> int:
        """The seed of random layers, such as dropout, of the first client."""
        return self.key.fold("batches", self.number, self.clients[0]).fold("layers").value

    def client(self, i: int) -> Workload:
        """The batches of client i alone, without the padding after its last step."""
        return self.first(1, int((self.rows[i] > 0).sum()), i)

    def first(self, clients: int, steps: int, begin: int = 0) -> Workload:
        """The first steps of some clients, starting with client number `begin`."""
        part = slice(begin, begin + clients)
        return replace(
            self,
            index=self.index[part, :steps],
            rows=self.rows[part, :steps],
            samples=self.samples[part],
            clients=self.clients[part],
            examples=self.examples[part],
        )


class TrainingOutcome(NamedTuple):
    """The result of local training; trees are stacked."""

    coords: Tree
    buffers: Tree
    loss: Tensor  # (clients,) mean over all examples seen
    opt_state: State  # after the last step


@dataclass(frozen=True, eq=False)
class TrainingInputs:
    """Everything that the local training of some clients depends on.

    Args:
        model: the model and its loss.
        space: maps coordinates to weights.
        optimizer: the client optimizer, with the learning rate of the method.
        correction: changes local gradients (FedProx, SCAFFOLD, ...).
        penalty: is added to the loss.
        base: base weights of the space.
        basis: basis of the space in this round.
        shared: the public state of the correction.
        buffers: initial buffers, the same for all clients.
        start: stacked initial coordinates.
        correction_state: stacked client states of the correction.
        work: the batches.
        opt_state: stacked initial optimizer states.
        trainable: by block, which values may change; blocks that are absent may change everywhere.
        private: names of blocks that are never sent; they are not corrected.
        lr_factor: factor on the learning rate in this round; None for a constant learning rate.
        common_start: `start` of every client as one vector; None where it is not one, or where clients differ.
    """

    model: TrainableModel
    space: Space
    optimizer: Optimizer
    correction: Correction
    penalty: Penalty
    base: Tree
    basis: Tree
    shared: Tree
    buffers: Tree
    start: Tree
    correction_state: Tree
    work: Workload
    opt_state: State
    trainable: Tree = field(default_factory=dict)
    private: frozenset[str] = frozenset()
    lr_factor: float | None = None
    common_start: Tensor | None = None


class Trainer(Protocol):
    """A training backend. All backends compute the same steps on the same batches and differ by rounding only."""

    def train(self, inputs: TrainingInputs) -> TrainingOutcome:
        """Train all clients of `inputs`. Raises UnsupportedModel for a model that this backend cannot train."""
        ...
