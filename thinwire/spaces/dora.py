"""DoRA: LoRA that also trains a length for each output (Liu et al., ICML 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.spaces.lora import LoRA, as_matrix, at_least_float32
from thinwire.spaces.unmerged import GAIN, M


@register("space", "dora", paper="Liu et al., ICML 2024")
@dataclass(frozen=True)
class DoRA(LoRA):
    """Train the directions of a frozen matrix by a low-rank adapter, and the lengths of its rows by themselves.

        V = W0 + s B A,    W_i = (||W0_i|| + m_i) V_i / ||V_i||    for each output i,    m initially 0

    As in peft with `use_dora`, ||V|| is a constant in gradients. The length of an output is stored as its change m, so
    all parties start with the same bits and weight decay acts towards the first length; an export holds the length.

    Args: those of `LoRA`, without `lora_dropout`, which in peft drops inputs of W0, too.

    >>> import torch
    >>> base, space = {"fc.weight": torch.tensor([[3.0, 4.0]])}, DoRA(rank=1, alpha=1.0)
    >>> coords = {"fc.weight/a": torch.ones(1, 2), "fc.weight/b": torch.zeros(1, 1), "fc.weight/m": torch.tensor([5.0])}
    >>> space.expand(base, {}, coords)["fc.weight"].tolist()
    [[6.0, 8.0]]

    Not `LoRA`, which moves length and direction together. The mean of clients' V_i / ||V_i|| is not that of mean A and
    B, as for `LoRA`.
    """

    has_lengths: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_dropout:
            raise ConfigError(f"DoRA has no lora_dropout here, given {self.lora_dropout}; write lora_dropout = 0.0")

    @property
    def starts_from_weights(self) -> bool:
        """False: lengths and directions of given weights are not fitted."""
        return False

    def lengths(self, base: Tree, coords: Tree) -> Tree:
        """Return the length of each output of each adapted matrix, as peft stores it."""
        transposed = self.transposed(Spec.of(base))
        found = [name for name in base if name + M in coords]
        return {name + M: _norms(_matrix(base[name], name in transposed)) + coords[name + M] for name in found}

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the base with all adapters added, each output scaled to its length."""
        transposed = self.transposed(Spec.of(base))
        out = super().expand(base, basis, coords)
        for key, length in self.lengths(base, coords).items():
            name = key.removesuffix(M)
            wide = at_least_float32(out[name].dtype)
            gain = length / _norms(_matrix(out[name], name in transposed).detach())
            shape = (1, -1) if name in transposed else (-1, *(1,) * (out[name].dim() - 1))
            out[name] = (out[name].to(wide) * gain.view(shape)).to(out[name].dtype)
        return out

    def expand_unmerged(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the weights without adapters, then A and s B of each, and the factor of each output."""
        out = super().expand_unmerged(base, basis, coords)
        transposed = self.transposed(Spec.of(base))
        for key, length in self.lengths(base, coords).items():
            name = key.removesuffix(M)
            a, b = (block.detach() for block in _factors(out, name))
            out[name + GAIN] = length / _added_norms(_matrix(base[name], name in transposed), a, b)
        return out


def _matrix(weight: Tensor, transposed: bool) -> Tensor:
    return as_matrix(weight, transposed).to(at_least_float32(weight.dtype))


def _factors(weights: Tree, name: str) -> tuple[Tensor, Tensor]:
    """Return A and s B of a matrix."""
    first, second = (block for key, block in weights.items() if key.rpartition("/")[0] == name)
    return first, second


def _norms(matrix: Tensor) -> Tensor:
    return matrix.square().sum(1).sqrt().clamp(min=1e-12)


def _added_norms(matrix: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the norms of the rows of W + B A without that matrix: |w|^2 + 2 b (A w) + b (A A^T) b."""
    squares = matrix.square().sum(1) + 2 * (b * (matrix @ a.mT)).sum(1) + ((b @ (a @ a.mT)) * b).sum(1)
    return squares.clamp(min=1e-24).sqrt()
