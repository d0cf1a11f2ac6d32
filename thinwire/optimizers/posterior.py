"""The mode of a Beta posterior over probabilities, from the sampled masks of clients, for the server (FedPM)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from thinwire.core.registry import register
from thinwire.core.state import State
from thinwire.core.text import check_numbers
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.optimizers.base import Optimizer


@register("optimizer", "beta-posterior", paper="Isik et al., ICLR 2023")
@dataclass(frozen=True)
class BetaPosterior(Optimizer):
    """Set each coordinate to the mode of its Beta posterior, given the masks of the latest rounds.

        alpha = prior + masks (m_1 + ... + m_t),    beta = prior + masks t - masks (m_1 + ... + m_t)
        p <- (alpha - 1) / (alpha + beta - 2)

    m_i is the mean mask of round i since the posterior was last reset to the prior. For the server, where the gradient
    is the negated mean update, so that the mean mask is the coordinate minus its gradient. With a prior of 1, which is
    uniform, the mode is the mean of m_1 to m_t, and with `reset_every = 1` this is federated averaging.

    Args:
        lr: the fraction of the way to the mode.
        prior: alpha and beta before the first round.
        masks: how many masks a round counts as, against the prior; the size of the cohort.
        reset_every: rounds after which the posterior is reset; in the paper, clients over the size of the cohort.

    >>> opt, p = BetaPosterior(reset_every=2), {"p": torch.tensor([0.5])}
    >>> change, state = opt.update({"p": torch.tensor([-0.5])}, opt.init(p), p)         # the mean mask is 1
    >>> change["p"].tolist(), opt.update({"p": torch.tensor([0.5])}, state, p)[0]["p"].tolist()    # then 0: mode 1/2
    ([0.5], [0.0])
    """

    lr: float = 1.0
    prior: float = 1.0
    masks: int = 10
    reset_every: int = 1

    def __post_init__(self) -> None:
        check_numbers(self)
        if not self.lr > 0:
            raise ConfigError(f"lr must be above 0, not {self.lr}; write for example lr = 1.0")
        if not 1 <= self.prior < math.inf:
            raise ConfigError(f"prior must be 1 or more, so that the posterior has a mode, not {self.prior}")
        for name in ("masks", "reset_every"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be 1 or more, not {value}")

    def init(self, coords: Tree) -> State:
        """Return no rounds and no masks."""
        return {
            "rounds": {name: block.new_zeros(()) for name, block in coords.items()},
            "sum": {name: block.new_zeros(block.shape) for name, block in coords.items()},
        }

    def update(self, grads: Tree, state: State, coords: Tree) -> tuple[Tree, State]:
        """Add the mean mask of this round, and move to the mode."""
        rounds, total = state["rounds"], state["sum"]
        fresh = {name: rounds[name] >= self.reset_every for name in grads}
        rounds = {name: torch.where(fresh[name], 0, rounds[name]) + 1 for name in grads}
        total = {name: torch.where(fresh[name], 0, total[name]) + (coords[name] - g) for name, g in grads.items()}
        more = (self.prior - 1) / self.masks  # in units of a round
        change = {name: ((total[name] + more) / (rounds[name] + 2 * more) - coords[name]) * self.lr for name in grads}
        return change, {"rounds": rounds, "sum": total}
