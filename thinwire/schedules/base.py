"""Contract of a schedule, and the schedule that synchronizes all blocks in every round.

A block that is not in the plan of a round is not sent: its update accumulates on the client until a later plan contains
it. A block that is in no plan is private.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.core.names import select
from thinwire.core.registry import register_part
from thinwire.core.tree import Spec, Tree, stack, unstack


@dataclass(frozen=True)
class Plan:
    """The blocks that are synchronized in one round.

    Args:
        names: the blocks; may be empty.
        resample: whether this round is the first of a window. A new cohort is sampled and client optimizers are
            initialized only then; within a window both are kept.
    """

    names: frozenset[str]
    resample: bool = True


LayerFacts = Mapping[str, Mapping[str, float]]  # by layer, then by the name of the value


class Schedule(ABC):
    """Decides which blocks are synchronized in which round, from public information alone.

    Not a learning-rate schedule: see `LRSchedule`.
    """

    private: tuple[str, ...] = ()
    """Selectors of the private blocks."""

    def init(self, coords: Spec) -> Tree:
        """Return the state of the schedule before the first round."""
        return {}

    def never(self, coords: Spec) -> frozenset[str]:
        """Return the private blocks: those that are in no plan; by default those that `private` selects."""
        return frozenset(select(coords.names, self.private, what="private") if self.private else ())

    @abstractmethod
    def plan(self, state: Tree, coords: Spec, version: int) -> Plan:
        """Return the plan of the round that starts from `version`."""

    def resamples(self, version: int) -> bool:
        """Return `resample` of that round's plan. It depends on the version alone, so it is never sent."""
        return True

    def report(self, delta: Tree, plan: Plan) -> Tree:
        """Return statistics that a client uploads, all of them 0 or more, computed before any codec."""
        return {}

    def reports(self, deltas: Tree, plan: Plan) -> Tree:
        """Return the reports of some clients, stacked; a schedule may compute them together on a GPU."""
        clients = range(len(next(iter(deltas.values())))) if deltas else ()
        return stack([self.report(unstack(deltas, i), plan) for i in clients]) if clients else {}

    def observe(self, state: Tree, plan: Plan, mean: Tree, report: Tree) -> Tree:
        """Return the state after a round, from the decoded mean update and the mean of the reports."""
        return state

    def measured(self, state: Tree, coords: Spec) -> LayerFacts:
        """Return what the round that led to this state measured about layers, for its record; usually nothing."""
        return {}


@register_part("schedule", "all-blocks")
class AllBlocks(Schedule):
    """Synchronize every block in every round, except private ones.

    Args:
        private: selectors of blocks that are never sent, for example `("*norm*",)`.

    >>> import torch
    >>> spec = Spec.of({"body.weight": torch.zeros(1), "head.weight": torch.zeros(1)})
    >>> sorted(AllBlocks(private=("head.*",)).plan({}, spec, 0).names)
    ['body.weight']

    Private blocks are trained. Blocks that must not be trained are a matter of the space: see `Frozen`.
    """

    private: tuple[str, ...] = ()

    def plan(self, state: Tree, coords: Spec, version: int) -> Plan:
        """Return all blocks except the private ones."""
        return Plan(coords.named - self.never(coords) if self.private else coords.named)
