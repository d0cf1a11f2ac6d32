"""States: what everyone knows, what the server keeps, what a client keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from thinwire.core.state import State
from thinwire.core.tree import Tree
from thinwire.protocol.ledger import Ledger


class PublicState(NamedTuple):
    """What everyone at a version knows. It is a function of the version: the same on every machine."""

    version: int
    base: Tree  # the weights that the space builds on
    coords: Tree  # the trained coordinates
    shared: Tree  # the public state of the correction
    buffers: Tree  # the model's floating-point buffers (running statistics)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return next(iter(self.base.values())).device


class ServerState(NamedTuple):
    """What the server keeps, the public state included."""

    public: PublicState
    opt: State
    correction: Tree
    schedule: Tree
    codec: Tree  # of the download codec
    ledger: Ledger


@dataclass(frozen=True, eq=False)
class ClientState:
    """What a client keeps between rounds.

    Args:
        version: the last version that it received.
        unsent: the part of its update that was not sent, by block: private blocks, and blocks that are synchronized
            later.
        correction: its state of the correction.
        codec: its state of the upload codec.
        opt: its optimizer state, where it is kept for the next round (`Method.opt_lifetime`).
    """

    version: int = 0
    unsent: Tree = field(default_factory=dict)
    correction: Tree = field(default_factory=dict)
    codec: Tree = field(default_factory=dict)
    opt: State = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept besides the version."""
        return not (self.unsent or self.correction or self.codec or self.opt)
