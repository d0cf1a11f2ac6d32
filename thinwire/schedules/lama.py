"""Layers that clients hardly disagree about are synchronised less often (FedLAMA).

    d_l = sum_i p_i |u_l - x_l^i|^2 / (tau_l dim_l)              how far apart the clients are, a number and a step

A window is `phi` rounds. At its end all layers are synchronised, their d_l are put in ascending order, and from the
start of that order layers are taken as long as their share of the disagreement stays below the share of the numbers
that are not taken; these are synchronised once in the next window, the others in each of its rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.core.spec import Spec, layer_of, select, weight_of
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.schedules.base import Plan, Schedule

Rules = Literal["paper", "public"]
PUBLIC_WAITS = 7  # rounds before the authors' program first adjusts anything
ROUNDING = 1e-6  # |x_i|^2 - |mean|^2 below this share of |x_i|^2 is rounding of 32-bit numbers, not disagreement


class Layer(NamedTuple):
    """Blocks that are synchronised together."""

    names: tuple[str, ...]
    size: int
    candidate: bool  # whether its interval may ever change


@register("schedule", "fedlama", paper="Layer-wise Adaptive Model Aggregation, 2021")
@dataclass(frozen=True)
class FedLAMA(Schedule):
    """Synchronise layers on which clients hardly differ once in `phi` rounds, the others in every round.

        cost of FedAvg at the same tau0:  1 - (share of numbers that wait) (1 - 1 / phi)

    A round is tau0 local steps (`local.steps`). Within a window of `phi` rounds the cohort stays, and clients keep
    their drifting layers and their optimisers' memory; at its end all layers are synchronised and the intervals are
    chosen anew. With phi = 1 this is `Every`, to the bit.

    Args:
        phi: rounds in a window.
        rules: `paper`: a layer is a module (kernel and bias), all layers may wait, from the first window on.
            `public`: the authors' program: a layer is one weight, only kernels (two axes or more) may wait, and
            nothing is adjusted before 7 rounds are done.
        accelerate: the other way round: tau0 is `phi` rounds, and the few layers with the largest disagreement are
            synchronised in every round, for a little more traffic than FedAvg at tau0.
        include_crossing: whether the layer at which the two shares cross is taken.
        private: selectors of blocks that are never sent.

    >>> spec = Spec.of({"conv.weight": torch.zeros(4, 3), "fc.weight": torch.zeros(9, 100), "fc.bias": torch.zeros(9)})
    >>> schedule = FedLAMA(phi=2)
    >>> apart = {"conv": torch.tensor(12.0), "fc": torch.tensor(9.0)}     # 1 and 0.01 a number
    >>> state = schedule.init(spec)
    >>> for version in (0, 1):
    ...     state = schedule.observe(state, schedule.plan(state, spec, version), spec.zeros(), apart)
    >>> [sorted(schedule.plan(state, spec, version).names) for version in (2, 3)]
    [['conv.weight'], ['conv.weight', 'fc.bias', 'fc.weight']]

    Not for spaces that redraw their frame: what waits at home would mean nothing in the next one.
    """

    phi: int = 2
    rules: Rules = "paper"
    accelerate: bool = False
    include_crossing: bool = True
    private: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.phi < 1:
            raise ConfigError(f"phi must be 1 (FedAvg) or more rounds, not {self.phi}")
        if self.rules not in get_args(Rules):
            raise ConfigError(f"rules must be one of {', '.join(get_args(Rules))}, not {self.rules!r}")

    def init(self, coords: Spec) -> Tree:
        """No round is done; all layers have the interval tau0."""
        layers = self._layers(self._sent(coords)).values()
        if self.phi > 1 and not any(layer.candidate for layer in layers):
            raise ConfigError(
                "rules = 'public' lets only kernels wait (two axes or more), and no block is one: write rules = 'paper'"
            )
        often = torch.tensor([self._often(False) for _ in layers], dtype=torch.bool)
        return {"rounds": torch.zeros((), dtype=torch.int64), "often": often}

    def never(self, coords: Spec) -> frozenset[str]:
        """The blocks that `private` selects."""
        return frozenset(select(coords.names, self.private, what="private") if self.private else ())

    def plan(self, state: Tree, coords: Spec, version: int) -> Plan:
        """All layers in the last round of a window, before it those with the short interval."""
        layers = self._layers(self._sent(coords)).values()
        last = self.resamples(version + 1)
        spoken = (layer for layer, often in zip(layers, state["often"].tolist(), strict=True) if often or last)
        return Plan(frozenset(name for layer in spoken for name in layer.names), self.resamples(version))

    def resamples(self, version: int) -> bool:
        """In the first round of a window: whoever joins then starts from what all agreed on."""
        return version % self.phi == 0

    def report(self, delta: Tree, plan: Plan) -> Tree:
        """How far a client went in each layer that speaks, |x_l - u_l before|^2: four bytes a layer."""
        if self.phi == 1:
            return {}
        groups = self._groups(delta)
        return {group: _square(delta[name] for name in names).float() for group, names in groups.items()}

    def observe(self, state: Tree, plan: Plan, mean: Tree, report: Tree) -> Tree:
        """Count the round; at the end of a window, choose the intervals of the next.

        sum_i p_i |u - x_i|^2 = sum_i p_i |x_i|^2 - |u|^2, with all x and u relative to the last synchronisation.
        """
        rounds = int(state["rounds"]) + 1
        often = state["often"].tolist()
        waits = PUBLIC_WAITS if self.rules == "public" else 0
        if self.phi > 1 and self.resamples(rounds) and rounds >= waits:
            layers = self._layers(Spec.of(mean))
            agreed = torch.stack([_square(mean[name] for name in layer.names) for layer in layers.values()]).tolist()
            apart = []
            for group, both, now in zip(layers, agreed, often, strict=True):
                went = float(report[group])
                square = went - both if went - both > ROUNDING * went else 0.0
                apart.append(square / (1 if now else self.phi))
            taken = self._taken(tuple(layers.values()), apart)
            often = [self._often(i in taken) for i in range(len(layers))]
        return {"rounds": torch.tensor(rounds), "often": torch.tensor(often, dtype=torch.bool)}

    def _taken(self, layers: Sequence[Layer], apart: Sequence[float]) -> set[int]:
        """The layers before the crossing: `apart` is d_l dim_l, up to a factor that all layers share."""
        total = sum(apart)
        if not total > 0:
            return set()
        numbers = sum(layer.size for layer in layers if layer.candidate)
        order = sorted(
            (i for i, layer in enumerate(layers) if layer.candidate),
            key=lambda i: apart[i] / layers[i].size,
            reverse=self.accelerate,
        )
        delta = share = 0.0
        for place, i in enumerate(order):
            delta, share = delta + apart[i] / total, share + layers[i].size / numbers
            if delta >= 1 - share:
                return set(order[: place + self.include_crossing])
        return set(order)

    def _often(self, taken: bool) -> bool:
        """Whether a layer speaks in every round: those that are taken wait, or, accelerated, are the only ones."""
        return taken == self.accelerate

    def _sent(self, coords: Spec) -> Spec:
        """The blocks that are ever sent."""
        return coords.restrict(coords.named - self.never(coords))

    def _layers(self, sent: Spec) -> dict[str, Layer]:
        """The layers of all blocks that are ever sent, in the order of the model."""
        blocks = {block.name: block for block in sent}
        out = {}
        for group, names in self._groups(blocks).items():
            kernel = any(len(blocks[name].shape) > 1 for name in names)
            size = sum(blocks[name].numel for name in names)
            out[group] = Layer(names, size, self.rules == "paper" or kernel)
        return out

    def _groups(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Names by module, or by weight under the public rules; coordinates of one weight are never parted."""
        group_of = layer_of if self.rules == "paper" else weight_of
        out: dict[str, tuple[str, ...]] = {}
        for name in names:
            out[group_of(name)] = (*out.get(group_of(name), ()), name)
        return out


def _square(blocks: Iterable[Tensor]) -> Tensor:
    """The sum of all squares, in double precision."""
    return torch.stack([torch.linalg.vector_norm(block, dtype=torch.float64).square() for block in blocks]).sum()
