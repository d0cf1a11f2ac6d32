"""Which blocks speak, and when: the contract of a schedule, and the one in which all of them always do.

A block outside the plan of a round is not sent: its change stays with the client, in `held`, until its turn comes. A
block that is in no plan ever is private, by the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from thinwire.core.registry import register
from thinwire.core.spec import Spec, select
from thinwire.core.tree import Tree


@dataclass(frozen=True)
class Plan:
    """What is synchronised in one round.

    Args:
        names: the blocks that speak; may be empty.
        resample: whether a window begins with this round: the cohort may change, and clients begin with fresh
            optimisers. Within a window both stay.
    """

    names: frozenset[str]
    resample: bool = True


class Schedule(Protocol):
    """Decides, from public knowledge alone, which blocks are synchronised."""

    def init(self, coords: Spec) -> Tree:
        """The schedule's own state before the first round."""
        ...

    def never(self, coords: Spec) -> frozenset[str]:
        """The blocks that are in no plan ever: private ones."""
        ...

    def plan(self, state: Tree, coords: Spec, version: int) -> Plan:
        """The plan of the round that starts at `version`."""
        ...

    def resamples(self, version: int) -> bool:
        """The `resample` of the plan of that round. It depends on the version alone, so it is never sent."""
        ...

    def report(self, delta: Tree, plan: Plan) -> Tree:
        """A few values that a client sends along, none negative, measured before any codec; often none."""
        ...

    def observe(self, state: Tree, plan: Plan, mean: Tree, report: Tree) -> Tree:
        """The state after a round: `mean` is the decoded mean change, `report` the mean of the reports."""
        ...


@register("schedule", "all-blocks")
@dataclass(frozen=True)
class AllBlocks:
    """Synchronise every block in every round, but for those that are to stay at home.

    Args:
        private: selectors of blocks that are never sent, for example `("*norm*",)`.

    >>> import torch
    >>> spec = Spec.of({"body.weight": torch.zeros(1), "head.weight": torch.zeros(1)})
    >>> sorted(AllBlocks(private=("head.*",)).plan({}, spec, 0).names)
    ['body.weight']
    """

    private: tuple[str, ...] = ()

    def init(self, coords: Spec) -> Tree:
        """No state."""
        return {}

    def never(self, coords: Spec) -> frozenset[str]:
        """The blocks that `private` selects."""
        return frozenset(select(coords.names, self.private, what="private") if self.private else ())

    def plan(self, state: Tree, coords: Spec, version: int) -> Plan:
        """All blocks but the private ones."""
        return Plan(coords.named - self.never(coords))

    def resamples(self, version: int) -> bool:
        """Always."""
        return True

    def report(self, delta: Tree, plan: Plan) -> Tree:
        """Nothing."""
        return {}

    def observe(self, state: Tree, plan: Plan, mean: Tree, report: Tree) -> Tree:
        """Nothing to learn."""
        return state
