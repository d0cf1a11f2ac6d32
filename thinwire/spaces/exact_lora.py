"""LoRA whose server adds clients' adapters to the base, so that nothing is lost in the mean: FedEx-LoRA and FLoRA.

    wanted:  sum_i p_i B_i A_i                       a sum of m adapters, of rank up to m r
    sent:    [.., p_i B_i, ..]  and  [..; A_i; ..]   stacked factors, or their product where that is smaller

Everyone adds the same factors to the base, which stays a function of the version. The more clients take part in a
round, the longer is the download: exact, not thin.

Papers: FedEx-LoRA (Singhal et al., ACL 2025), FLoRA (Wang et al., NeurIPS 2024).

Updates that are linear in both trained factors, so that means of factors are exact (FedMUD).

Adapters between fixed singular directions of the weights: only a small square matrix is trained and sent (Fed-SB).

Papers: LoRA-SB (Ponkshe et al., 2024), Fed-SB (Singhal et al., 2025).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thinwire.core.key import Device, Key
from thinwire.core.registry import register_part
from thinwire.core.tree import Block, Spec, Tree
from thinwire.errors import ConfigError
from thinwire.spaces.adapters import for_layers
from thinwire.spaces.base import Space, Stack, Stacking
from thinwire.spaces.lora import A, B, Dense, LoRA, as_matrix, at_least_float32

W = "/w"  # a change of full size
_Pair = tuple[list[Tensor], list[Tensor]]  # factors B and A to stack


@dataclass(frozen=True)
class StackingLoRA(LoRA, Stacking):
    """LoRA that adds stacked adapters to the base after every round; `stack` says which."""

    redraw_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.redraw_every != 1:
            raise ConfigError(f"{type(self).__name__} changes the base after every round; write redraw_every = 1")
        if self.freeze_a or self.from_start:
            what = "freeze_a" if self.freeze_a else "from_start"
            raise ConfigError(
                f"{type(self).__name__} stacks A and B as they are; write {what} = false, or space = 'lora'"
            )

    @property
    def stacking(self) -> Stacking | None:  # type: ignore[override]
        """This space."""
        return self

    def averaged(self, coords: Spec) -> Spec:
        """Return all coordinates."""
        return coords

    def stack(self, values: Sequence[Tree], shares: Sequence[float]) -> Stack:
        """Return the stack of all adapters, computed in float64."""
        out: Tree = {}
        for name in (key.removesuffix(B) for key in values[0] if key.endswith(B) and key[: -len(B)] + A in values[0]):
            b, a = ([tree[name + side].double() for tree in values] for side in (B, A))
            left, right = self.factors(b, a, shares)
            if not left:
                continue
            like = values[0][name + B]
            b_all, a_all = torch.cat(left, 1), torch.cat(right)
            if _is_dense(b_all.shape[0], b_all.shape[1], a_all.shape[1]):
                out[name + W] = (b_all @ a_all).to(like)
            else:
                out[name + B], out[name + A] = b_all.to(like), a_all.to(like)
        return Stack(self.count(len(values)), out)

    def count(self, clients: int) -> int:
        """Return the number of clients."""
        return clients

    @abstractmethod
    def factors(self, b: list[Tensor], a: list[Tensor], shares: Sequence[float]) -> _Pair:
        """Return the factors of one matrix to stack, from those of all clients."""

    def stack_spec(self, weights: Spec, count: int) -> Spec:
        """Return the blocks of a stack of that many adapters."""
        sides, _ = self._select(weights)
        dtypes = {block.name: at_least_float32(block.dtype) for block in weights}
        blocks = []
        for name, (outputs, inputs) in sides.items() if count else ():
            n, dtype = count * self._rank((outputs, inputs)), dtypes[name]
            if _is_dense(outputs, n, inputs):
                blocks.append(Block(name + W, (outputs, inputs), dtype))
            else:
                blocks += [Block(name + B, (outputs, n), dtype), Block(name + A, (n, inputs), dtype)]
        return Spec(tuple(blocks))

    def with_stack(self, base: Tree, blocks: Tree) -> Tree:
        """Return the base with s times the product of the stacked factors added."""
        transposed, out = self.transposed(base), dict(base)
        for name, weight in base.items():
            if name + W in blocks or name + B in blocks:
                change = blocks[name + W] if name + W in blocks else blocks[name + B] @ blocks[name + A]
                out[name] = self.plus(weight, change, name in transposed)
        return out


@register_part("space", "lora-residual", paper="FedEx-LoRA (Singhal et al., ACL 2025)")
class LoRAResidual(StackingLoRA):
    """LoRA whose factors are averaged, and whose base takes what the product of the means misses.

        B <- sum_i p_i B_i,    A <- sum_i p_i A_i,    W0 <- W0 + s (sum_i p_i B_i A_i - B A)

    The residual is  sum_{i<m} p_i (B_i - B) (A_i - A_m),  since sum_i p_i (B_i - B) = 0: m - 1 stacked adapters for m
    clients, and nothing for one. The arguments are those of `LoRA`.

    >>> space, base = LoRAResidual(rank=1, alpha=1.0), {"w": torch.zeros(9, 9)}
    >>> values = [{"w/a": Key(i).normal(1, 9), "w/b": Key(i + 9).normal(9, 1)} for i in range(3)]
    >>> stack = space.stack(values, [0.5, 0.25, 0.25])
    >>> {name: tuple(block.shape) for name, block in stack.blocks.items()}
    {'w/b': (9, 2), 'w/a': (2, 9)}

    Not `LoRAStack`, which adds all of the adapters to the base and starts new ones.
    """

    def count(self, clients: int) -> int:
        """Return one less than the number of clients."""
        return clients - 1

    def factors(self, b: list[Tensor], a: list[Tensor], shares: Sequence[float]) -> _Pair:
        """Return  p_i (B_i - B)  and  A_i - A_m  of all clients but the last."""
        mean = torch.stack([share * one for share, one in zip(shares, b, strict=True)]).sum(0)
        left = [share * (one - mean) for share, one in zip(shares[:-1], b[:-1], strict=True)]
        return left, [one - a[-1] for one in a[:-1]]

    def merge(self, base: Tree, basis: Tree, coords: Tree, key: Key) -> tuple[Tree, Tree]:
        """Return both as they are: the adapters go on."""
        return base, coords


@register_part("space", "lora-stack", paper="FLoRA (Wang et al., NeurIPS 2024)")
class LoRAStack(StackingLoRA):
    """LoRA whose clients' adapters are all added to the base after every round, where new adapters start.

        W0 <- W0 + s sum_i p_i B_i A_i = W0 + s [p_1 B_1, p_2 B_2, ...] [A_1; A_2; ...]

    The stacked factors are broadcast in place of mean factors; weights without an adapter are averaged. New A are drawn
    from the seed, and B is 0. The arguments are those of `LoRA`.

    >>> space, base = LoRAStack(rank=1, alpha=1.0), {"w": torch.zeros(9, 9)}
    >>> values = [{"w/a": torch.ones(1, 9), "w/b": torch.full((9, 1), i)} for i in (1.0, 5.0)]
    >>> space.with_stack(base, space.stack(values, [0.75, 0.25]).blocks)["w"].unique().tolist()
    [2.0]

    Not `LoRA(redraw_every=1)`, which merges the product of mean factors.
    """

    def averaged(self, coords: Spec) -> Spec:
        """Return the weights without an adapter."""
        adapted = {name.removesuffix(B) for name in coords.names if name.endswith(B)}
        return coords.restrict([n for n in coords.names if n.removesuffix(A).removesuffix(B) not in adapted])

    def factors(self, b: list[Tensor], a: list[Tensor], shares: Sequence[float]) -> _Pair:
        """Return  p_i B_i  and  A_i  of all clients."""
        return [share * one for share, one in zip(shares, b, strict=True)], a


@register_part("space", "lora-sum", paper="FedMUD (Li et al., ICML 2025)")
class LoRASum(LoRA):
    """Train both factors of an update, each times a fixed random partner, so that the mean of factors is exact.

        W = W0 + s (B A0 + B0 A),    A0, B0: random, never sent;    A, B: initially 0

    W is linear in (A, B). After `redraw_every` rounds the update is merged into W0, and A0 and B0 are drawn again. The
    arguments are those of `LoRA`.

    >>> space, base = LoRASum(rank=1), {"w": torch.zeros(3, 3)}
    >>> basis = space.basis(Spec.of(base), Key(0), "cpu")
    >>> coords = space.init(base, basis, Key(0))
    >>> sorted(basis), [int(block.count_nonzero()) for block in coords.values()]
    (['w/a', 'w/b'], [0, 0])

    Not `LoRA`, whose update is the product of the two trained factors.
    """

    exports_adapter = starts_from_weights = False  # type: ignore[assignment]
    redraw_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.freeze_a or self.from_start or self.adapter:
            raise ConfigError("LoRASum trains B and A from 0; write freeze_a = false, from_start = false, adapter = ''")

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Return A0 and B0 of each matrix."""
        out: Tree = {}
        for name, side in self._select(spec)[0].items():
            out[name + A] = self._draw_a(name, side, torch.float32, key, device)
            out[name + B] = self._draw_a(name, side[::-1], torch.float32, key.fold("b"), device).mT.contiguous()
        return out

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return A = 0 and B = 0, and the weights of `modules_to_save` from the base."""
        first = super().init(base, basis, key)
        return {name: torch.zeros_like(block) if name in basis else block for name, block in first.items()}

    def parts(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return [B, B0] and [A0; A] of each matrix, whose product is the update, and the other weights."""
        out = dict(coords)
        for name, fixed in basis.items():
            first, last = (fixed, coords[name]) if name.endswith(A) else (coords[name], fixed)
            out[name] = torch.cat((first, last), -2 if name.endswith(A) else -1)
        return out


def _is_dense(outputs: int, rank: int, inputs: int) -> bool:
    """Return whether a product is not larger than its factors."""
    return rank * (outputs + inputs) >= outputs * inputs


R = "/r"
_GAP = 1e-7  # of the largest singular value: directions are then known to 1e-9, whatever the library


@register_part("space", "lora-sb", paper="Fed-SB (Singhal et al., 2025)")
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

    exports_adapter = True
    reads_base = True  # B and A are those of the initial weights
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
        return _SquareLoRA(
            rank=self.rank,
            alpha=float(self.rank),
            target_modules=self.target_modules,
            modules_to_save=self.modules_to_save,
            freeze_a=True,
            fan_in_fan_out=self.fan_in_fan_out,
            dense=self.dense,
        )

    for_model = for_layers

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
        out, transposed = dict[str, Tensor](), self.lora.transposed(base)
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

    def expand_unmerged(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the weights without adapters, followed by A and B R of each."""
        return self.lora.expand_unmerged(base, basis, self.as_lora(basis, coords))

    def exported(self, basis: Tree, coords: Tree) -> tuple[LoRA, Tree]:
        """Return the LoRA whose B is B R."""
        return self.lora, self.as_lora(basis, coords)

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
class _SquareLoRA(LoRA):
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
