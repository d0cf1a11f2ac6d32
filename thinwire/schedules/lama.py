"""Layers on which clients agree are synchronized less often (FedLAMA).

    d_l = sum_i p_i |u_l - x_l^i|^2 / (tau_l dim_l)              discrepancy of layer l, by parameter and by local step

A window has `phi` rounds. All layers are synchronized at its end and sorted by d_l in ascending order. From the start
of that order, layers are taken while their share of the total discrepancy is below the share of parameters that are not
taken. These layers are synchronized once in the next window, the others in each of its rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.core.names import layer_of, weight_of
from thinwire.core.registry import register_part
from thinwire.core.text import PositiveInt
from thinwire.core.tree import Spec, Tree
from thinwire.errors import ConfigError
from thinwire.schedules.base import LayerFacts, Plan, Schedule

Rules = Literal["paper", "public"]
PUBLIC_WARMUP = 7  # rounds before the authors' program first adjusts intervals
UNKNOWN = -1.0  # the discrepancy of a layer after a round that does not end a window
ROUNDING = 1e-6  # |x_i|^2 - |mean|^2 below this share of |x_i|^2 is float32 rounding, not discrepancy


class Layer(NamedTuple):
    """Blocks that are synchronized together."""

    names: tuple[str, ...]
    size: int
    candidate: bool  # whether its interval may change


class Place(NamedTuple):
    """A layer in the order in which layers are taken, and the two shares if all layers up to it are."""

    layer: int
    delta: float  # of the discrepancy that is taken
    left: float  # of the parameters that are not: 1 - lambda


@register_part("schedule", "fedlama", paper="Layer-wise Adaptive Model Aggregation, 2021")
class FedLAMA(Schedule):
    """Synchronize layers with a small discrepancy between clients once in `phi` rounds, the others in every round.

        cost relative to FedAvg at the same tau0:  1 - (share of parameters with the long interval) (1 - 1 / phi)

    A round is tau0 local steps (`local.steps`). Within a window of `phi` rounds the cohort does not change, and clients
    keep layers that are not synchronized and their optimizer state. At its end all layers are synchronized, and the
    intervals of the next window are chosen. With phi = 1 this is `AllBlocks`, bit for bit.

    Args:
        phi: rounds in a window.
        rules: `paper`: a layer is a module (kernel and bias), any layer can get the long interval, from the second
            window on. `public`: as in the authors' program, a layer is one weight, only kernels (two axes or more) can
            get the long interval, and intervals are first adjusted after 7 rounds.
        accelerate: the reverse: tau0 is `phi` rounds, and the layers with the largest discrepancy are synchronized in
            every round, at a slightly higher cost than FedAvg at tau0.
        include_crossing: whether the layer at which the two shares cross is taken.
        private: selectors of blocks that are never sent.

    >>> spec = Spec.of({"conv.weight": torch.zeros(4, 3), "fc.weight": torch.zeros(9, 100), "fc.bias": torch.zeros(9)})
    >>> schedule = FedLAMA(phi=2)
    >>> report = {"conv": torch.tensor(12.0), "fc": torch.tensor(9.0)}     # 1 and 0.01 for each parameter
    >>> state = schedule.init(spec)
    >>> for version in (0, 1):
    ...     state = schedule.observe(state, schedule.plan(state, spec, version), spec.zeros(), report)
    >>> [sorted(schedule.plan(state, spec, version).names) for version in (2, 3)]
    [['conv.weight'], ['conv.weight', 'fc.bias', 'fc.weight']]

    Not for spaces that redraw their basis: a delayed update of one basis is meaningless in the next.
    """

    phi: PositiveInt = 2
    rules: Rules = "paper"
    accelerate: bool = False
    include_crossing: bool = True
    private: tuple[str, ...] = ()

    def init(self, coords: Spec) -> Tree:
        """Return a state of 0 rounds in which all layers have the interval tau0."""
        layers = self._layers(self._sent(coords)).values()
        if self.phi > 1 and not any(layer.candidate for layer in layers):
            raise ConfigError(
                "rules = 'public' delays only kernels (two axes or more), and no block is one; write rules = 'paper'"
            )
        often = torch.tensor([self._often(False) for _ in layers], dtype=torch.bool)
        unknown = torch.full((len(layers),), UNKNOWN, dtype=torch.float64)
        return {"rounds": torch.zeros((), dtype=torch.int64), "often": often, "discrepancy": unknown}

    def plan(self, state: Tree, coords: Spec, version: int) -> Plan:
        """Return all layers in the last round of a window, else those with the short interval."""
        layers = self._layers(self._sent(coords)).values()
        last = self.resamples(version + 1)
        planned = (layer for layer, often in zip(layers, state["often"].tolist(), strict=True) if often or last)
        return Plan(frozenset(name for layer in planned for name in layer.names), self.resamples(version))

    def resamples(self, version: int) -> bool:
        """Return whether the round is the first of a window: only then are all layers of all clients synchronized."""
        return version % self.phi == 0

    def report(self, delta: Tree, plan: Plan) -> Tree:
        """Return |x_l - u_l before|^2 of each planned layer, four bytes a layer."""
        if self.phi == 1:
            return {}
        groups = self._groups(delta)
        return {group: _square(delta[name] for name in names).float() for group, names in groups.items()}

    def reports(self, deltas: Tree, plan: Plan) -> Tree:
        """Return the reports of some clients. On a GPU one operation has all clients; a CPU's bits are those of one."""
        on_gpu = any(block.is_cuda for block in deltas.values())
        if self.phi == 1 or not on_gpu:
            return super().reports(deltas, plan)
        return self._reports_together(deltas)

    def _reports_together(self, deltas: Tree) -> Tree:
        """Return the reports of some clients, by operations on stacked blocks."""
        norms = {
            name: torch.linalg.vector_norm(block.reshape(len(block), -1), dim=1, dtype=torch.float64)
            for name, block in deltas.items()
        }
        groups = self._groups(deltas)
        return {
            group: torch.stack([norms[n].square() for n in names]).sum(0).float() for group, names in groups.items()
        }

    def observe(self, state: Tree, plan: Plan, mean: Tree, report: Tree) -> Tree:
        """Count the round; at the end of a window, choose the intervals of the next.

        sum_i p_i |u - x_i|^2 = sum_i p_i |x_i|^2 - |u|^2,    x and u relative to the last synchronization
        """
        rounds = int(state["rounds"]) + 1
        often = state["often"].tolist()
        discrepancy = [UNKNOWN] * len(often)
        warmup = PUBLIC_WARMUP if self.rules == "public" else 0
        if self.phi > 1 and self.resamples(rounds) and rounds >= warmup:
            layers = self._layers(Spec.of(mean))
            squares = torch.stack([_square(mean[name] for name in layer.names) for layer in layers.values()]).tolist()
            for i, (group, of_mean, now) in enumerate(zip(layers, squares, often, strict=True)):
                mean_of = float(report[group])
                square = mean_of - of_mean if mean_of - of_mean > ROUNDING * mean_of else 0.0
                discrepancy[i] = square / (1 if now else self.phi)
            taken = self._taken(tuple(layers.values()), discrepancy)
            often = [self._often(i in taken) for i in range(len(layers))]
        long = torch.tensor(often, dtype=torch.bool)
        measured = torch.tensor(discrepancy, dtype=torch.float64)
        return {"rounds": torch.tensor(rounds), "often": long, "discrepancy": measured}

    def measured(self, state: Tree, coords: Spec) -> LayerFacts:
        """Return d, delta and 1 - lambda of each layer at the end of a window, in the order in which layers are taken.

        `discrepancy` is d_l for one round of local steps, `interval` the rounds between synchronizations in the next
        window. With `rules = "public"` layers that are never delayed follow, without delta and 1 - lambda.
        """
        if "discrepancy" not in state or bool((state["discrepancy"] < 0).any()):  # without it: an earlier checkpoint
            return {}
        layers, discrepancy = self._layers(self._sent(coords)), state["discrepancy"].tolist()
        names, often = tuple(layers), state["often"].tolist()

        def facts(i: int) -> dict[str, float]:
            d = float(f"{discrepancy[i] / layers[names[i]].size:.6g}")
            return {"discrepancy": d, "interval": 1 if often[i] else self.phi}

        places = self._places(tuple(layers.values()), discrepancy)
        shares = {
            place.layer: {"delta": round(place.delta, 6), "left": round(max(place.left, 0.0), 6)} for place in places
        }
        ranked = [*shares, *(i for i in range(len(names)) if i not in shares)]
        return {names[i]: {**facts(i), **shares.get(i, {})} for i in ranked}

    def _taken(self, layers: Sequence[Layer], discrepancy: Sequence[float]) -> set[int]:
        """Return the layers before the crossing of the two shares."""
        places = self._places(layers, discrepancy)
        for count, place in enumerate(places):
            if place.delta >= place.left:
                return {one.layer for one in places[: count + self.include_crossing]}
        return {place.layer for place in places}

    def _places(self, layers: Sequence[Layer], discrepancy: Sequence[float]) -> list[Place]:
        """Return the candidates in the order in which they are taken; `discrepancy` is d_l dim_l, up to a factor."""
        total = sum(discrepancy)
        if not total > 0:
            return []
        parameters = sum(layer.size for layer in layers if layer.candidate)
        order = sorted(
            (i for i, layer in enumerate(layers) if layer.candidate),
            key=lambda i: discrepancy[i] / layers[i].size,
            reverse=self.accelerate,
        )
        delta, share, places = 0.0, 0.0, list[Place]()
        for i in order:
            delta, share = delta + discrepancy[i] / total, share + layers[i].size / parameters
            places.append(Place(i, delta, 1 - share))
        return places

    def _often(self, taken: bool) -> bool:
        """Return whether a layer is synchronized in every round: if not taken or, with `accelerate`, if taken."""
        return taken == self.accelerate

    def _sent(self, coords: Spec) -> Spec:
        """Return the blocks that are not private."""
        return coords.restrict(coords.named - self.never(coords))

    def _layers(self, sent: Spec) -> dict[str, Layer]:
        """Return the layers of all blocks that are not private, in the order of the model."""
        blocks = {block.name: block for block in sent}
        out = {}
        for group, names in self._groups(blocks).items():
            kernel = any(len(blocks[name].shape) > 1 for name in names)
            size = sum(blocks[name].numel for name in names)
            out[group] = Layer(names, size, self.rules == "paper" or kernel)
        return out

    def _groups(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Group names by module, or by weight with the public rules; coordinates of one weight stay together."""
        group_of = layer_of if self.rules == "paper" else weight_of
        out: dict[str, tuple[str, ...]] = {}
        for name in names:
            out[group_of(name)] = (*out.get(group_of(name), ()), name)
        return out


def _square(blocks: Iterable[Tensor]) -> Tensor:
    """Return the sum of all squares, in double precision."""
    return torch.stack([torch.linalg.vector_norm(block, dtype=torch.float64).square() for block in blocks]).sum()
