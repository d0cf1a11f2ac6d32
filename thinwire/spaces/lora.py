"""Small corrections of two thin factors beside frozen matrices: LoRA and its federated relatives.

Papers: LoRA (Hu et al., ICLR 2022), FFA-LoRA (Sun et al., ICLR 2024), FedSA-LoRA (Guo et al., ICLR 2025),
FedLoRU (Park and Klabjan, 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from thinwire.core.key import Device, Key
from thinwire.core.registry import register
from thinwire.core.spec import Spec, select
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.spaces.base import Space
from thinwire.spaces.unmerged import TRANSPOSED_A, TRANSPOSED_B, A, B, Unmerged


@register("space", "lora", paper="Hu et al., ICLR 2022")
@dataclass(frozen=True)
class LoRA(Space):
    """Leave the model as it is and train a small correction beside each of its matrices.

        W = W0 + (alpha / rank) B A,    A: rank x inputs, starts random;    B: outputs x rank, starts at 0

    A convolution is the matrix `outputs x (inputs * height * width)`, an embedding the matrix `words x width`. A is
    uniform in ±1 / sqrt(inputs) (Kaiming-uniform as in torch's own linear layers), drawn from the shared key. What is
    neither in `layers` nor in `dense` is frozen: not trained, not sent, not among the coordinates.

    Where the model has 16 bits, coordinates are float32, as peft keeps them: 8 bits would lose small steps. The weights
    that they make have the model's own type.

    Args:
        rank: columns of B and rows of A; at most the smaller side of every chosen matrix.
        alpha: with `rank`, the size of the correction.
        target_modules: selectors of the matrices that get a correction; biases and other vectors never do.
        modules_to_save: selectors of weights that are trained as they are, such as the task head; they win over `layers`.
        freeze_a: draw A from the shared seed and train B alone (FFA-LoRA): then the mean of the clients' corrections
            is the correction of the mean, and half as much is sent.
        redraw_every: rounds after which the correction is merged into W0 and a new one begins (FedLoRU); 0 means never.
        fan_in_fan_out: selectors of matrices that are stored as `inputs x outputs`, such as those of GPT-2.

    >>> base = {"fc.weight": torch.ones(3, 2), "fc.bias": torch.zeros(3)}
    >>> space = LoRA(rank=1, alpha=2)
    >>> coords = space.init(base, {}, Key(0))
    >>> {name: tuple(block.shape) for name, block in coords.items()}
    {'fc.weight/a': (1, 2), 'fc.weight/b': (3, 1)}
    >>> coords = {"fc.weight/a": torch.tensor([[1.0, 2.0]]), "fc.weight/b": torch.tensor([[0.0], [1.0], [2.0]])}
    >>> space.expand(base, {}, coords)["fc.weight"].tolist()
    [[1.0, 1.0], [3.0, 5.0], [5.0, 9.0]]

    Not low-rank training, which replaces a matrix by two factors: here W0 stays, and a correction of rank 8 beside it.
    Averaging A and B apart is not averaging B A, but for `freeze_a`.
    """

    rank: int = 8
    alpha: float = 16.0
    target_modules: tuple[str, ...] = ("*",)
    modules_to_save: tuple[str, ...] = ()
    freeze_a: bool = False
    redraw_every: int = 0
    fan_in_fan_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"rank must be 1 or more, not {self.rank}; write for example rank = 8")
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"alpha must be above 0, not {self.alpha}; write for example alpha = 16.0")
        if self.redraw_every < 0:
            raise ConfigError(f"redraw_every must be 0 (never merge) or a number of rounds, not {self.redraw_every}")
        if not self.target_modules:
            raise ConfigError('layers selects nothing; write for example layers = ["*"]')

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError when a selector matches nothing, or a chosen matrix is smaller than the rank."""
        sides, _ = self._choose(spec)
        for name, (outputs, inputs) in sides.items():
            if self.rank > min(outputs, inputs):
                raise ConfigError(
                    f"rank {self.rank} is above {min(outputs, inputs)}, the largest that {name!r}, a matrix of "
                    f'{outputs} x {inputs}, can have; lower it, leave the matrix out (layers = ["*", "!{name}"]), '
                    f'or train it as it is (dense = ["{name}"])'
                )

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """The frozen A of each matrix, or nothing where A is trained."""
        if not self.freeze_a:
            return {}
        sides, _ = self._choose(spec)
        kinds = {block.name: _at_least_float32(block.dtype) for block in spec}
        return {f"{name}/a": self._first_a(name, side[1], kinds[name], key, device) for name, side in sides.items()}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """A random, B zero: a correction of nothing; and the dense weights as the base has them."""
        sides, dense = self._choose(Spec.of(base))
        out: Tree = {}
        for name, weight in base.items():
            kind = _at_least_float32(weight.dtype)
            if name in sides:
                outputs, inputs = sides[name]
                if not self.freeze_a:
                    out[f"{name}/a"] = self._first_a(name, inputs, kind, key, weight.device)
                out[f"{name}/b"] = weight.new_zeros(outputs, self.rank, dtype=kind)
            elif name in dense:
                out[name] = weight.to(kind)
        return out

    @property
    def starts_from_weights(self) -> bool:
        """False if A is frozen: then the best B A of a rank cannot be represented."""
        return not self.freeze_a

    def from_weights(self, base: Tree, weights: Tree, key: Key) -> Tree:
        """Coordinates whose weights come as close to the given ones as the rank allows.

            W - W0 = U S V^T,    B = U_r sqrt(S_r / s),    A = sqrt(S_r / s) V_r^T,    s = alpha / rank

        so s B A is the best correction of that rank. Where the singular value is zero A is drawn and B stays zero, as
        at any start: two zeros would never move.
        """
        first, size = self.init(weights, {}, key), self.alpha / self.rank
        turned = self._turned(Spec.of(base))
        out: Tree = {}
        for name, block in first.items():
            out[name] = block
            if name.endswith("/b") and (at := name.removesuffix("/b")) in base:
                change = (weights[at] - base[at]).double().cpu()
                change = change.mT if at in turned else change.reshape(len(change), -1)
                u, s, v = torch.linalg.svd(change, full_matrices=False)
                u, s, v = u[:, : self.rank], s[: self.rank], v[: self.rank]
                root = (s / size).sqrt()
                there = s > s[0] * max(change.shape) * torch.finfo(block.dtype).eps
                a = first[f"{at}/a"]
                out[f"{at}/a"] = torch.where(there.to(a.device)[:, None], (root[:, None] * v).to(a), a)
                out[name] = torch.where(there, u * root, 0.0).to(block)
        return out

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """The base plus all corrections; merging is keeping what this gives."""
        turned = self._turned(Spec.of(base)) if self.fan_in_fan_out else frozenset()
        parts = {**basis, **coords}
        out: Tree = {}
        for name, weight in base.items():
            if f"{name}/b" in coords:
                change = parts[f"{name}/b"] @ parts[f"{name}/a"]
                change = change.mT if name in turned else change.reshape(weight.shape)
                out[name] = (weight + (self.alpha / self.rank) * change).to(weight.dtype)
            else:
                out[name] = coords.get(name, weight).to(weight.dtype)
        return out

    def unmerged(self) -> Space:
        """Return a space that keeps A and B apart from the weights."""
        return Unmerged(self)

    def expand_unmerged(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """The base, with the corrections beside it instead of in it: see `beside`."""
        turned = self._turned(Spec.of(base)) if self.fan_in_fan_out else frozenset()
        parts = {**basis, **coords}
        out = {name: coords.get(name, weight).to(weight.dtype) for name, weight in base.items()}
        for name in base:
            if f"{name}/b" in coords:
                a, b = (TRANSPOSED_A, TRANSPOSED_B) if name in turned else (A, B)
                out[name + a] = parts[f"{name}/a"]
                out[name + b] = (self.alpha / self.rank) * parts[f"{name}/b"]
        return out

    def _choose(self, spec: Spec) -> tuple[dict[str, tuple[int, int]], frozenset[str]]:
        """The chosen matrices with their outputs and inputs, and the names of the dense weights."""
        dense = frozenset(select(spec.names, self.modules_to_save, what="dense") if self.modules_to_save else ())
        shapes = {block.name: block.shape for block in spec if len(block.shape) > 1}
        if not shapes:
            raise ConfigError("the model has no matrix to correct, only vectors; take the space 'full'")
        chosen = [name for name in select(tuple(shapes), self.target_modules, what="layers") if name not in dense]
        if not chosen:
            raise ConfigError("layers leaves no matrix to correct: dense takes all of them; take the space 'full'")
        turned = self._turned(spec)
        sides = {}
        for name in chosen:
            first, rest = shapes[name][0], math.prod(shapes[name][1:])
            sides[name] = (rest, first) if name in turned else (first, rest)
        return sides, dense

    def _turned(self, spec: Spec) -> frozenset[str]:
        """The matrices that are stored as inputs x outputs."""
        if not self.fan_in_fan_out:
            return frozenset()
        flat = tuple(block.name for block in spec if len(block.shape) == 2)
        return frozenset(select(flat, self.fan_in_fan_out, what="transposed"))

    def _first_a(self, name: str, inputs: int, dtype: torch.dtype, key: Key, device: Device) -> torch.Tensor:
        """(rank, inputs) uniform in ±1 / sqrt(inputs): 2 u - 1 is exact, so one rounded product is all there is."""
        draw = key.fold("lora", name).uniform(self.rank, inputs, device=device)
        return ((2 * draw - 1) * (1 / math.sqrt(inputs))).to(dtype)


def _at_least_float32(kind: torch.dtype) -> torch.dtype:
    """The type of coordinates beside a weight of this type."""
    return torch.promote_types(kind, torch.float32)
