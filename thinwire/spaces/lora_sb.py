"""Adapters between fixed singular directions of the weights: only a small square matrix is trained and sent (Fed-SB).

Papers: LoRA-SB (Ponkshe et al., 2024), Fed-SB (Singhal et al., 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thinwire.core.key import Device, Key
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.spaces.base import Space
from thinwire.spaces.lora import Dense, LoRA, as_matrix
from thinwire.spaces.unmerged import A, B, Unmerged

R = "/r"
_GAP = 1e-7  # of the largest singular value: directions are then known to 1e-9, whatever the library


@register("space", "lora-sb", paper="Fed-SB (Singhal et al., 2025)")
@dataclass(frozen=True)
class LoRASB(Space):
    """Train a square matrix R between fixed directions of each frozen matrix.

        W = W0 + B R A,    W0 = U S V^T,    B = U_r,    A = V_r^T,    R: rank x rank, initially 0

    B and A are computed from the initial weights, which everyone has, and are never sent. The model is linear in R, so
    the mean of the clients' R is exactly the mean of their weights. Columns of B and rows of A are orthonormal: a step
    of R moves W by the projection of FedAvg's step, and FedAvg's learning rate fits. All directions have the sign for
    which the largest value of their row of A is positive.

    Args:
        rank: singular directions of each matrix; at most its smaller side is used.
        target_modules: selectors of the matrices that get an adapter, as in `LoRA`.
        modules_to_save: selectors of weights that are trained without an adapter, as in `LoRA`.
        fan_in_fan_out: selectors of matrices that are stored as `inputs x outputs`, such as those of GPT-2.
        dense: `auto` trains the head, and matrices for which R would not be smaller, without an adapter; as in `LoRA`.

    >>> base = {"fc.weight": torch.diag(torch.tensor([3.0, 2.0, 1.0])), "fc.bias": torch.zeros(3)}
    >>> space = LoRASB(rank=2)
    >>> basis = space.basis_from(base, Key(0), "cpu")
    >>> coords = space.init(base, basis, Key(0))
    >>> {name: tuple(block.shape) for name, block in coords.items()}
    {'fc.weight/r': (2, 2)}
    >>> space.expand(base, basis, {"fc.weight/r": torch.ones(2, 2)})["fc.weight"].tolist()
    [[4.0, 1.0, 0.0], [1.0, 3.0, 0.0], [0.0, 0.0, 1.0]]

    Not `LoRA(freeze_a=True)`, which trains all of B: r outputs values instead of r^2.
    """

    rank: int = 32
    target_modules: tuple[str, ...] = ("*",)
    modules_to_save: tuple[str, ...] = ()
    fan_in_fan_out: tuple[str, ...] = ()
    dense: Dense = "none"

    def __post_init__(self) -> None:
        _ = self.lora  # checks the settings

    @cached_property
    def lora(self) -> LoRA:
        """The space of the same adapters as products B A: what they are exported as."""
        return _Frame(
            *(self.rank, float(self.rank), self.target_modules, self.modules_to_save),
            freeze_a=True,
            fan_in_fan_out=self.fan_in_fan_out,
            dense=self.dense,
        )

    @property
    def reads_base(self) -> bool:
        """True: B and A are those of the initial weights."""
        return True

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError if a selector matches nothing."""
        self.lora.check(spec)

    def note(self, spec: Spec) -> str:
        """Return which adapters have a lower rank, and which matrices have none though they were selected."""
        return self.lora.note(spec)

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Raise a ConfigError: the basis depends on the weights; see `basis_from`."""
        raise ConfigError("the basis of lora-sb depends on the weights; call basis_from with them")

    def basis_from(self, base: Tree, key: Key, device: Device) -> Tree:
        """Return the leading singular vectors of each matrix, computed on the CPU in float64."""
        out, transposed = dict[str, Tensor](), self.lora.transposed(Spec.of(base))
        for name, b in self.lora.init(base, {}, key).items():
            if name.endswith(B) and (at := name.removesuffix(B)) in base:
                left, right = _directions(at, as_matrix(base[at], at in transposed), b.shape[1])
                out[at + A], out[at + B] = right.to(device, b.dtype), left.to(device, b.dtype)
        return out

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return R = 0, so that W = W0; and the weights of `modules_to_save` from the base."""
        out: Tree = {}
        for name, block in self.lora.init(base, basis, key).items():
            if name in basis:
                out[name.removesuffix(B) + R] = block.new_zeros(block.shape[1], block.shape[1])
            else:
                out[name] = block
        return out

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the base with all adapters added."""
        return self.lora.expand(base, basis, self.as_lora(basis, coords))

    def unmerged(self) -> Space:
        """Return a space that keeps A and B R apart from the weights."""
        return Unmerged(self)  # type: ignore[arg-type]

    def expand_unmerged(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the weights without adapters, followed by A and B R of each."""
        return self.lora.expand_unmerged(base, basis, self.as_lora(basis, coords))

    def as_lora(self, basis: Tree, coords: Tree) -> Tree:
        """Return the coordinates of `lora` with the same weights: B R in place of R."""
        out: Tree = {}
        for name, block in coords.items():
            at = name.removesuffix(R)
            if at + B in basis:
                out[at + B] = basis[at + B] @ block
            else:
                out[name] = block
        return out


@dataclass(frozen=True)
class _Frame(LoRA):
    """LoRA where an adapter has the size of R."""

    def _is_dense(self, name: str, last: str, side: tuple[int, int]) -> bool:
        outputs, inputs = side
        return self._rank(side) ** 2 >= outputs * inputs or (name == last and outputs < inputs)


def _directions(name: str, matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the leading singular vectors as columns and as rows; ConfigError if the weights do not determine them."""
    u, s, v = torch.linalg.svd(matrix.detach().double().cpu(), full_matrices=False)
    gaps = torch.cat((s, s.new_zeros(1))).diff().neg()[:rank]
    if not s[0] > 0 or bool((gaps < _GAP * s[0]).any()):
        raise ConfigError(
            f"the first {rank} singular values of {name!r} are not all different and above 0, so they determine no "
            f"directions; leave it out of target_modules (write '!{name}'), or write a smaller rank"
        )
    v = v[:rank]
    sign = torch.where(v.gather(1, v.abs().argmax(1, keepdim=True)) < 0, -1.0, 1.0)
    return u[:, :rank] * sign[:, 0], v * sign
