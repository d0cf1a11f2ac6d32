"""LoRA and its federated variants: low-rank adapters of frozen matrices.

Papers: LoRA (Hu et al., ICLR 2022), FFA-LoRA (Sun et al., ICLR 2024), FedSA-LoRA (Guo et al., ICLR 2025),
FedLoRU (Park and Klabjan, 2024), rsLoRA (Kalajdzievski, 2023).

Adapters kept apart from the weights, for training: no client needs a full matrix for itself.

    merged:     W = W0 + B A, then x W^T          one W for each client of a cohort that trains in parallel
    unmerged:   x W0^T + (x A^T) B^T              one W0 for all clients; only A and B differ between clients

A tree of weights may hold adapters under the name of their matrix: `fc.weight/a` and `fc.weight/b`. The model applies
them in its forward pass. Only training uses such trees; merging and testing compute W.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from thinwire.core.key import Device, Key
from thinwire.core.names import select
from thinwire.core.registry import rare, register_part
from thinwire.core.text import BelowOne, NonNegativeInt, PositiveFloat, PositiveInt
from thinwire.core.tree import Spec, Tree
from thinwire.errors import ConfigError
from thinwire.spaces.adapters import by_keyword, first_coordinates, for_layers, saved as chosen_to_save, targets
from thinwire.spaces.base import Space

Scaling = Literal["standard", "rslora"]
InitA = Literal["kaiming", "isometric", "orthonormal"]
Dense = Literal["none", "auto"]


@register_part("space", "lora", paper="Hu et al., ICLR 2022")
class LoRA(Space):
    """Train a low-rank adapter for each matrix of a frozen model.

        W = W0 + s B A,    A: rank x inputs, initially random;    B: outputs x rank, initially 0
        s = alpha / rank,    with scaling = "rslora"  s = alpha / sqrt(rank)

    A convolution is the matrix `outputs x (inputs * height * width)`, an embedding the matrix `words x width`. A is
    uniform, drawn from the shared key. Weights that are neither in `target_modules` nor in `modules_to_save` are
    frozen: not trained, not sent, no coordinates. A matrix with a side below `rank` has an adapter of the rank of that
    side, with the same s.

    A gradient step of B moves W by s^2 A^T A times FedAvg's step: in expectation, by s^2 rank / (3 inputs) with
    Kaiming's A, which for the usual s is a small fraction. `init_lora_weights="isometric"` draws A in
    ±sqrt(3 / rank) / s, so that s^2 E[A^T A] = I and FedAvg's learning rate fits; s then only sets how fast A is
    trained (by s^2 B B^T).

    For models of 16 bits, coordinates are float32, as in peft, because small steps would be lost to rounding. The
    weights keep the type of the model.

    Args:
        rank: columns of B and rows of A; at most the smaller side of a matrix is used.
        alpha: scale of the adapter, divided by `rank` or its root.
        target_modules: selectors of the matrices that get an adapter; vectors such as biases never do. `*` is every
            matrix, or in a model of transformers what peft adapts (`for_layers`). Also names of layers as in peft,
            `regex:` and a regular expression, `query-value` or `all-linear` (`adapters.py`).
        modules_to_save: selectors of weights, or names of modules as in peft, that are trained without an adapter, such
            as the task head; they take precedence over `target_modules`.
        freeze_a: draw A from the shared seed and train only B (FFA-LoRA): then the mean of the clients' adapters is the
            adapter of the mean, and uploads have half the size.
        redraw_every: rounds after which the adapter is merged into W0 and a new one is initialized (FedLoRU); 0 means
            never.
        fan_in_fan_out: selectors of matrices that are stored as `inputs x outputs`; those of GPT-2 are found by
            the type of their layer.
        scaling: `standard`, or `rslora`, which keeps the size of the adapter for large ranks; as `use_rslora` in peft.
        init_lora_weights: A is uniform in ±1 / sqrt(inputs) (`kaiming`, as in `torch.nn.Linear` and peft), or
            `isometric`; `orthonormal` makes the rows of that orthonormal.
        dense: `auto` trains matrices of `target_modules` without an adapter, and with the bias of their layer, if the
            adapter would not be smaller, or if the matrix is the head: the last of the model, with fewer outputs than
            inputs. `none`: only those of `modules_to_save`.
        from_start: A and the weights without an adapter are stored as changes from their initial values, which all
            parties know. All coordinates are 0 at first, and a codec that sends the largest values only (`TopK`) leaves
            the others at their start instead of 0.
        lora_dropout: probability with which an input of A is left out of a training step, as in peft; in linear layers.
        adapter: the folder of an adapter of peft, the same at all parties, from which training goes on; rank, alpha and
            `target_modules` must be those of the adapter (`lora_from_peft`).

    >>> base = {"fc.weight": torch.ones(3, 2), "fc.bias": torch.zeros(3)}
    >>> space = LoRA(rank=1, alpha=2)
    >>> coords = space.init(base, {}, Key(0))
    >>> {name: tuple(block.shape) for name, block in coords.items()}
    {'fc.weight/a': (1, 2), 'fc.weight/b': (3, 1)}
    >>> coords = {"fc.weight/a": torch.tensor([[1.0, 2.0]]), "fc.weight/b": torch.tensor([[0.0], [1.0], [2.0]])}
    >>> space.expand(base, {}, coords)["fc.weight"].tolist()
    [[1.0, 1.0], [3.0, 5.0], [5.0, 9.0]]

    Not `LowRank`, which replaces a matrix by two factors: here W0 stays. Averaging A and B separately is not averaging
    B A, except with `freeze_a`.
    """

    exports_adapter = True
    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    target_modules: tuple[str, ...] = ("*",)
    modules_to_save: tuple[str, ...] = ()
    freeze_a: bool = False
    redraw_every: NonNegativeInt = 0
    fan_in_fan_out: tuple[str, ...] = ()
    scaling: Scaling = rare("standard", in_repr=True)
    init_lora_weights: InitA = rare("kaiming", in_repr=True)
    dense: Dense = rare("none", in_repr=True)
    from_start: bool = rare(False, in_repr=True)
    lora_dropout: BelowOne = rare(0.0, in_repr=True)
    adapter: str = rare("", in_repr=True)

    def __post_init__(self) -> None:
        if self.adapter and (self.from_start or self.redraw_every):
            other = "from_start" if self.from_start else "redraw_every"
            raise ConfigError(f"adapter gives the first values of A and B, and {other} changes them; leave {other} out")
        if not self.target_modules:
            raise ConfigError('target_modules selects nothing; write for example target_modules = ["*"]')

    @property
    def starts_from_weights(self) -> bool:  # type: ignore[override]
        """False if A is frozen, given or counted from its start: the best B A is not known without seed or adapter."""
        return not self.freeze_a and not self.from_start and not self.adapter

    @property
    def counts_from_start(self) -> bool:  # type: ignore[override]
        """Whether A is stored as a change: `from_start`."""
        return self.from_start

    @property
    def adapter_dropout(self) -> float:  # type: ignore[override]
        """The probability `lora_dropout`."""
        return self.lora_dropout

    def exported(self, basis: Tree, coords: Tree) -> tuple[LoRA, Tree]:
        """Return the space itself and its coordinates."""
        return self, coords

    for_model = for_layers

    @property
    def scale(self) -> float:
        """The factor s of all adapters.

        >>> LoRA(rank=4, alpha=8).scale, LoRA(rank=4, alpha=8, scaling="rslora").scale
        (2.0, 4.0)
        """
        return self.alpha / (self.rank if self.scaling == "standard" else math.sqrt(self.rank))

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError if a selector matches nothing."""
        self._select(spec)

    def note(self, spec: Spec) -> str:
        """Return which adapters have a lower rank, and which matrices have none though they were selected."""
        sides, saved = self._select(spec)
        lower = [f"{name} {min(side)}" for name, side in sides.items() if min(side) < self.rank]
        matrices = [block.name for block in spec if block.name in saved and (len(block.shape) > 1 or not sides)]
        matrices = [name for name in matrices if not name.endswith("bias")]
        text = f"LoRA has rank {self.rank}, but for smaller matrices: {', '.join(lower)}." if lower else ""
        if self.dense == "auto" and matrices:
            text += f"{' ' if text else ''}Trained without an adapter: {', '.join(matrices)}."
        return text

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Return the frozen or initial A of each adapter; empty if A is a coordinate."""
        if not self.freeze_a and not self.from_start:
            return {}
        sides, _ = self._select(spec)
        if self.adapter:
            given = first_coordinates(self.adapter, self.rank, self.scale, sides, ())
            return {name: block.to(device or "cpu") for name, block in given.items() if name.endswith("/a")}
        dtypes = {block.name: at_least_float32(block.dtype) for block in spec}
        return {f"{name}/a": self._draw_a(name, side, dtypes[name], key, device) for name, side in sides.items()}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return random A and zero B, so that W = W0; and the weights of `modules_to_save` from the base."""
        sides, saved = self._select(Spec.of(base))
        out: Tree = {}
        for name, weight in base.items():
            dtype = at_least_float32(weight.dtype)
            if name in sides:
                if not self.freeze_a:
                    out[f"{name}/a"] = self._draw_a(name, sides[name], dtype, key, weight.device)
                out[f"{name}/b"] = weight.new_zeros(sides[name][0], self._rank(sides[name]), dtype=dtype)
            elif name in saved:
                out[name] = weight.to(dtype)
        if self.adapter:
            given = first_coordinates(
                self.adapter, self.rank, self.scale, sides, [name for name in out if "/" not in name]
            )
            return {name: given[name].to(block) if name in given else block for name, block in out.items()}
        return {name: torch.zeros_like(block) for name, block in out.items()} if self.from_start else out

    def parts(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the values that coordinates stand for: A, B and the weights without an adapter.

        >>> space = LoRA(rank=1, from_start=True, modules_to_save=("fc.bias",))
        >>> base = {"fc.weight": torch.ones(3, 2), "fc.bias": torch.ones(3)}
        >>> basis = {"fc.weight/a": torch.ones(1, 2)}
        >>> {n: v.tolist() for n, v in space.parts(base, basis, space.init(base, basis, Key(0))).items()}
        {'fc.weight/a': [[1.0, 1.0]], 'fc.bias': [1.0, 1.0, 1.0], 'fc.weight/b': [[0.0], [0.0], [0.0]]}
        """
        if not self.from_start:
            return {**basis, **coords}
        start = {**basis, **{name: weight for name, weight in base.items() if name in coords}}
        return {**start, **{name: block + start[name] if name in start else block for name, block in coords.items()}}

    def from_weights(self, base: Tree, weights: Tree, key: Key) -> Tree:
        """Return the adapters whose weights are closest to the given ones.

            W - W0 = U S V^T,    B = U_r sqrt(S_r / s),    A = sqrt(S_r / s) V_r^T

        so s B A is the best update of that rank. Where a singular value is zero, A is random and B zero, as in `init`:
        if both were zero, neither would get a gradient.
        """
        first, size = self.init(weights, {}, key), self.scale
        transposed = self.transposed(base)
        out: Tree = {}
        for name, block in first.items():
            out[name] = block
            if name.endswith("/b") and (at := name.removesuffix("/b")) in base:
                change = as_matrix((weights[at] - base[at]).double().cpu(), at in transposed)
                u, s, v = torch.linalg.svd(change, full_matrices=False)
                rank = block.shape[1]
                u, s, v = u[:, :rank], s[:rank], v[:rank]
                root = (s / size).sqrt()
                nonzero = s > s[0] * max(change.shape) * torch.finfo(block.dtype).eps
                a = first[f"{at}/a"]
                out[f"{at}/a"] = torch.where(nonzero.to(a.device)[:, None], (root[:, None] * v).to(a), a)
                out[name] = torch.where(nonzero, u * root, 0.0).to(block)
        return out

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the base with all adapters added."""
        transposed = self.transposed(base)
        parts = self.parts(base, basis, coords)
        out: Tree = {}
        for name, weight in base.items():
            if f"{name}/b" in coords:
                out[name] = self.plus(weight, parts[f"{name}/b"] @ parts[f"{name}/a"], name in transposed)
            else:
                out[name] = parts.get(name, weight).to(weight.dtype)
        return out

    def expand_unmerged(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the weights without adapters, followed by A and s B of each."""
        transposed = self.transposed(base)
        parts = self.parts(base, basis, coords)
        out = {name: parts.get(name, weight).to(weight.dtype) for name, weight in base.items()}
        for name in base:
            if f"{name}/b" in coords:
                a, b = (TRANSPOSED_A, TRANSPOSED_B) if name in transposed else (A, B)
                out[name + a] = parts[f"{name}/a"]
                out[name + b] = self.scale * parts[f"{name}/b"]
        return out

    def _select(self, spec: Spec) -> tuple[dict[str, tuple[int, int]], frozenset[str]]:
        """Return outputs and inputs of each adapted matrix, and the names of weights that are trained without one."""
        saved = frozenset(chosen_to_save(spec.names, self.modules_to_save) if self.modules_to_save else ())
        shapes = {block.name: block.shape for block in spec if len(block.shape) > 1}
        if not shapes and self.dense == "auto" and self.target_modules == ("*",):
            return {}, frozenset(spec.names)
        if not shapes:
            raise ConfigError("the model has no matrix to adapt, only vectors; take the space 'full'")
        chosen = [name for name in targets(tuple(shapes), self.target_modules) if name not in saved]
        if not chosen:
            raise ConfigError(
                "target_modules leaves no matrix to adapt: modules_to_save selects all of them; take the space 'full'"
            )
        transposed = self.transposed(spec.shapes())
        sides = {}
        for name in chosen:
            first, rest = shapes[name][0], math.prod(shapes[name][1:])
            sides[name] = (rest, first) if name in transposed else (first, rest)
        if self.dense == "none":
            return sides, saved
        adapted = by_keyword(tuple(shapes), self.target_modules)
        alone = {n for n in sides if n not in adapted and self._is_dense(n, tuple(shapes)[-1], sides[n])}
        vectors = [block.name for block in spec if len(block.shape) < 2]
        biases = {v for v in vectors for name in alone if _layer(v) == _layer(name) and _is_only(name, tuple(shapes))}
        return {name: side for name, side in sides.items() if name not in alone}, saved | alone | biases

    def _is_dense(self, name: str, last: str, side: tuple[int, int]) -> bool:
        """Return whether `dense = "auto"` trains a matrix without an adapter: a small one, or the head."""
        outputs, inputs = side
        return self._rank(side) * (outputs + inputs) >= outputs * inputs or (name == last and outputs < inputs)

    def _rank(self, side: tuple[int, int]) -> int:
        return min(self.rank, *side)

    def transposed(self, weights: Tree) -> frozenset[str]:
        """Return the matrices that are stored as inputs x outputs."""
        if not self.fan_in_fan_out:
            return frozenset()
        matrices = [name for name, weight in weights.items() if weight.dim() == 2]
        return frozenset(select(matrices, self.fan_in_fan_out, what="fan_in_fan_out"))

    def plus(self, weight: Tensor, change: Tensor, transposed: bool) -> Tensor:
        """Return W + scale * change, stored as W is; change is outputs x inputs, as B A."""
        change = change.mT if transposed else change.reshape(weight.shape)
        return (weight + self.scale * change).to(weight.dtype)

    def _draw_a(self, name: str, side: tuple[int, int], dtype: torch.dtype, key: Key, device: Device) -> Tensor:
        """Draw A uniform in plus or minus a bound: 2 u - 1 is exact, so only one product is rounded."""
        rank, inputs = self._rank(side), side[1]
        bound = 1 / math.sqrt(inputs) if self.init_lora_weights == "kaiming" else math.sqrt(3 / rank) / self.scale
        draw = key.fold("lora", name).uniform(rank, inputs, device=device)
        a = (2 * draw - 1) * bound
        if self.init_lora_weights == "orthonormal":
            a = torch.linalg.qr(a.mT.double().cpu()).Q.mT.contiguous().to(draw.device)
        return a.to(dtype)


def as_matrix(weight: Tensor, transposed: bool = False) -> Tensor:
    """Return a weight as the matrix outputs x inputs.

    >>> as_matrix(torch.zeros(8, 4, 3, 3)).shape, as_matrix(torch.zeros(4, 8), transposed=True).shape
    (torch.Size([8, 36]), torch.Size([8, 4]))
    """
    return weight.mT if transposed else weight.reshape(len(weight), -1)


def _layer(name: str) -> str:
    """Return the name of the layer of a weight: `fc` of `fc.weight`."""
    return name.rpartition(".")[0]


def _is_only(name: str, matrices: tuple[str, ...]) -> bool:
    """Return whether a matrix is the only one of its layer; recurrent layers have several."""
    return [_layer(other) for other in matrices].count(_layer(name)) == 1


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the adapter of a weight of this type."""
    return torch.promote_types(dtype, torch.float32)


A, B = "/a", "/b"
TRANSPOSED_A, TRANSPOSED_B = "/a.T", "/b.T"  # of a matrix that is stored as inputs x outputs


def split(weights: Tree) -> tuple[Tree, dict[str, tuple[Tensor, Tensor, bool]]]:
    """Separate weights from adapters.

    Returns:
        The weights alone, and by name of a weight its adapter: A, B, and whether the matrix is stored transposed
        (inputs x outputs).
    """
    adapters, taken = {}, set()
    for transposed, (a, b) in ((False, (A, B)), (True, (TRANSPOSED_A, TRANSPOSED_B))):
        for key, block in weights.items():
            if key.endswith(b) and (name := key.removesuffix(b)) in weights and name + a in weights:
                adapters[name] = (weights[name + a], block, transposed)
                taken |= {name + a, key}
    if not adapters:
        return weights, adapters
    return {name: block for name, block in weights.items() if name not in taken}, adapters
