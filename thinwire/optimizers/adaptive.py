"""Optimizers with a step size for each coordinate: Adam, AdamW, Yogi and Adagrad, for clients and server.

On the server, where the gradient is the negated mean update, they are FedAdam, FedYogi and FedAdagrad (Reddi et al.,
ICLR 2021), which leave out the bias correction and use a large `eps`.

Muon: steps of matrices whose singular values are all near one.

The mode of a Beta posterior over probabilities, from the sampled masks of clients, for the server (FedPM).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated

import torch
from torch import Tensor

from thinwire.core.registry import rare, register_part
from thinwire.core.text import BelowOne, NonNegativeFloat, PositiveFloat, PositiveInt
from thinwire.core.tree import ALL_BLOCKS, State, Tree, zeros_like
from thinwire.errors import ConfigError
from thinwire.optimizers.base import ClipNorm, Optimizer, clip_by_global_norm


def no_steps(coords: Tree) -> Tree:
    """Return a count of zero steps, for all blocks together."""
    first = next(iter(coords.values()), torch.zeros(()))
    # float64, because 1 - 0.999**t in float32 is wrong in the fourth digit
    return {ALL_BLOCKS: torch.zeros((), dtype=torch.float64, device=first.device)}


@dataclass(frozen=True)
class _Adaptive(Optimizer):
    """Common part: running estimates of the first moment m and the second moment v of the gradient, by block.

    State: `state["count"][ALL_BLOCKS]` (number of steps), `state["m"][block]` and `state["v"][block]`.
    """

    _decoupled = False  # whether weight decay is added to the step instead of the gradient
    lr: PositiveFloat = 0.001
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    bias_correction: bool = True
    clip_norm: ClipNorm = rare(math.inf)

    def init(self, coords: Tree) -> State:
        """Return zeros for both moments and a step count of 0."""
        return {"count": no_steps(coords), "m": zeros_like(coords), "v": zeros_like(coords)}

    def update(self, grads: Tree, state: State, coords: Tree) -> tuple[Tree, State]:
        """Take one step."""
        grads = clip_by_global_norm(grads, self.clip_norm)
        count = state["count"][ALL_BLOCKS] + 1
        change: Tree = {}
        first: Tree = {}
        second: Tree = {}
        for name, g in grads.items():
            if self.weight_decay and not self._decoupled:
                g = g + self.weight_decay * coords[name]
            m = self.beta1 * state["m"][name] + (1 - self.beta1) * g
            v = self._second_moment(state["v"][name], g.square())
            first[name], second[name] = m, v
            if self.bias_correction:
                bias1, bias2 = ((1 - beta**count).to(g.dtype) for beta in (self.beta1, self.beta2))
                step = m / bias1 / (v.sqrt() / bias2.sqrt() + self.eps)
            else:
                step = m / (v.sqrt() + self.eps)
            change[name] = step * -self.lr
            if self.weight_decay and self._decoupled:
                change[name] = change[name] - self.lr * self.weight_decay * coords[name]
        return change, {"count": {ALL_BLOCKS: count}, "m": first, "v": second}

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@register_part("optimizer", "adam", paper="Kingma and Ba, ICLR 2015; at the server Reddi et al., ICLR 2021")
class Adam(_Adaptive):
    """Adam: a step by the first moment over the root of the second (equal to `torch.optim.Adam`).

        m <- beta1 m + (1 - beta1) g,    v <- beta2 v + (1 - beta2) g^2,    w <- w - lr m / (sqrt(v) + eps)

    with m and v divided by 1 - beta^t if `bias_correction`.

    Args:
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment; 1e-3 in FedAdam.
        weight_decay: factor of the L2 penalty, added to the gradient.
        bias_correction: divide both moments by 1 - beta^t; off in FedAdam.
        clip_norm: the largest L2 norm of the gradient g over all values that are trained; a longer one is scaled down
            (`clip_by_global_norm`). In the unit of the gradient; at the server, of the mean update.

    >>> opt = Adam(lr=0.5)
    >>> change, _ = opt.update({"w": torch.tensor([3.0, -0.01])}, opt.init({"w": torch.zeros(2)}), {})
    >>> [round(x, 4) for x in change["w"].tolist()]
    [-0.5, 0.5]
    """


@register_part("optimizer", "adamw", paper="Loshchilov and Hutter, ICLR 2019")
class AdamW(_Adaptive):
    """Adam with decoupled weight decay (equal to `torch.optim.AdamW`).

        w <- w - lr (m / (sqrt(v) + eps) + weight_decay w)

    Args as for `Adam`; weight decay is added to the step, not to the gradient.

    >>> opt, w = AdamW(lr=0.5, weight_decay=0.1), {"w": torch.tensor([10.0])}
    >>> change, _ = opt.update({"w": torch.zeros(1)}, opt.init(w), w)
    >>> change["w"].tolist()
    [-0.5]
    """

    weight_decay: NonNegativeFloat = 0.01

    _decoupled = True


@register_part("optimizer", "muon", paper="Jordan et al., 2024; Liu et al., 2025")
class Muon(AdamW):
    """Orthogonal steps for matrices, AdamW for all else (as `torch.optim.Muon`, but in float32).

        M <- momentum M + g,    O = five Newton-Schulz steps from g + momentum M towards the nearest orthogonal matrix
        w <- w - lr (0.2 sqrt(max(rows, columns)) O + weight_decay w)        (`adjust_lr_fn="match_rms_adamw"`)

    Args as for `AdamW`, and:
        momentum: factor on the previous M.
        adamw: selectors of matrices that AdamW trains: embeddings and heads.

    >>> opt, w = Muon(lr=1.0, weight_decay=0.0), {"w": torch.eye(2)}
    >>> change, _ = opt.update({"w": torch.diag(torch.tensor([9.0, 3.0]))}, opt.init(w), w)
    >>> (change["w"].diag() / (-0.2 * 2**0.5)).round()
    tensor([1., 1.])
    """

    momentum: BelowOne = 0.95
    adamw: tuple[str, ...] = ("*embed*", "*wte*", "*wpe*", "*head*")

    def _split(self, tree: Tree) -> tuple[Tree, Tree]:
        """Return the blocks that Muon trains, and the others."""
        rest = {n for n, x in tree.items() if x.dim() < 2 or any(fnmatchcase(n, one) for one in self.adamw)}
        return {n: x for n, x in tree.items() if n not in rest}, {n: tree[n] for n in tree if n in rest}

    def init(self, coords: Tree) -> State:
        """Return zeros: M of matrices, both moments of other blocks, and a step count."""
        mine, rest = self._split(coords)
        return {**super().init(rest), "count": no_steps(coords), "momentum": zeros_like(mine)}

    def update(self, grads: Tree, state: State, coords: Tree) -> tuple[Tree, State]:
        """Take one step."""
        mine, rest = self._split(clip_by_global_norm(grads, self.clip_norm))
        change, after = super().update(rest, state, coords)
        after["momentum"] = {}
        for name, g in mine.items():
            m = after["momentum"][name] = self.momentum * state["momentum"][name] + g
            step = _orthogonal((g + self.momentum * m).flatten(1).float())
            step = (0.2 * math.sqrt(max(step.shape)) * step).reshape(g.shape).to(g.dtype)
            change[name] = -self.lr * (step + self.weight_decay * coords[name])
        return {name: change[name] for name in grads}, after


def _orthogonal(x: Tensor) -> Tensor:
    """Return a matrix with the singular vectors of x and singular values near 1."""
    if x.shape[0] > x.shape[1]:
        return _orthogonal(x.mT).mT
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x
    return x


@register_part("optimizer", "yogi", paper="Zaheer et al., NeurIPS 2018; Reddi et al., ICLR 2021")
class Yogi(_Adaptive):
    """Adam whose second moment changes by at most (1 - beta2) g^2 in a step.

        v <- v - (1 - beta2) sign(v - g^2) g^2

    Args as for `Adam`.

    >>> opt = Yogi(beta2=0.5)
    >>> _, state = opt.update({"w": torch.tensor([2.0])}, opt.init({"w": torch.zeros(1)}), {})
    >>> state["v"]["w"].tolist()
    [2.0]
    """

    beta2: BelowOne = 0.99
    eps: PositiveFloat = 1e-3
    bias_correction: bool = False

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * torch.sign(v - square) * square


@register_part("optimizer", "adagrad", paper="Duchi et al., JMLR 2011; Reddi et al., ICLR 2021")
class Adagrad(_Adaptive):
    """Adagrad: the second moment is the sum of all squared gradients.

        v <- v + g^2,    w <- w - lr m / (sqrt(v) + eps)        (beta1 = 0: m = g, equal to `torch.optim.Adagrad`)

    Args as for `Adam`; `beta2` has no effect.

    >>> opt = Adagrad(lr=0.5)
    >>> _, state = opt.update({"w": torch.tensor([2.0])}, opt.init({"w": torch.zeros(1)}), {})
    >>> state["v"]["w"].tolist()
    [4.0]
    """

    beta1: BelowOne = 0.0
    eps: PositiveFloat = 1e-3
    bias_correction: bool = False

    def __post_init__(self) -> None:
        if self.bias_correction:
            raise ConfigError("adagrad sums squares, so there is no bias to correct; write bias_correction = false")

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@register_part("optimizer", "beta-posterior", paper="Isik et al., ICLR 2023")
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

    lr: PositiveFloat = 1.0
    prior: Annotated[float, "[1, inf)"] = 1.0
    masks: PositiveInt = 10
    reset_every: PositiveInt = 1

    def init(self, coords: Tree) -> State:
        """Return no rounds and no masks."""
        return {
            "rounds": {name: block.new_zeros(()) for name, block in coords.items()},
            "sum": zeros_like(coords),
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
