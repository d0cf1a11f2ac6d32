"""Networks that are a chain of layers, trained on a GPU without autograd, for all clients of a cohort at once.

A step of a small network under vmap and autograd is more than a hundred short kernels, and the GPU is bound by their
number. Here it is about 25: the layers of `kernels/explicit_gpu.py`, and weights, gradients and optimizer states as one
matrix each, with a row for each client. Supported are convolutions with ReLU and average pooling, then linear layers
with ReLU, cross entropy, and SGD on all weights; other models are trained by the general step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.tree import Spec, State, Tree, Vector
from thinwire.data.examples import Images
from thinwire.data.losses import cross_entropy
from thinwire.kernels import explicit_gpu
from thinwire.kernels.conv_cpu import pair, window_of
from thinwire.kernels.support import has_triton
from thinwire.optimizers.base import Optimizer
from thinwire.training.chain import may_be_chain, trace
from thinwire.training.functional import Functional
from thinwire.training.inputs import TrainingInputs, UnsupportedModel

MAX_OUTPUTS = 1 << 14  # outputs of a batch, which one program of the loss keeps in registers

Layers = list["explicit_gpu.ConvReluPool | explicit_gpu.Linear"]


def chain_step(inputs: TrainingInputs, factor: Tensor | None) -> ChainStep | None:
    """The step of all clients; None if the model or the method needs the general one."""
    model, optimizer, start = inputs.model, inputs.optimizer, inputs.start
    if not isinstance(model, Functional) or model.products != "fused" or not has_triton(inputs.work.index.device):
        return None
    plain = model.criterion is cross_entropy and not (model.logit_adjustment or model.adapter_dropout)
    one = {name: block[0] for name, block in start.items()}
    plain = plain and inputs.space.expand(inputs.base, inputs.basis, one) is one
    changed = inputs.correction.active or inputs.penalty.active or inputs.trainable
    if changed or not (
        plain and optimizer.elementwise and all(block.dtype == torch.float32 for block in start.values())
    ):
        return None
    x, y = inputs.work.gather(inputs.work.index[:1, 0])
    if not isinstance(x, Tensor) or x.dtype != torch.float32 or y.dim() != 2 or not may_be_chain(model, half=True):
        return None
    try:
        layers = _layers(model, x[0], {name: tuple(block.shape) for name, block in one.items()})
    except UnsupportedModel:
        return None
    return ChainStep(inputs, layers, factor) if layers else None


def _layers(model: Functional, x: Tensor, shapes: dict[str, tuple[int, ...]]) -> Layers:
    """The layers of a network, or none if they are not of the supported kind."""
    module, kind = model.module, torch.bfloat16 if model.half else torch.float32
    # one example on the CPU: a convolution on the meta device imports torch's compiler, which takes seconds
    calls = [call for call in trace(module, x[:1].cpu()) if not isinstance(call.layer, nn.Flatten)]
    kinds = [type(call.layer) for call in calls]
    made: Layers = []
    at, images = 0, x.dim() == 4
    while at < len(calls):
        layer, shape, weight, bias = calls[at]
        if weight not in shapes or (bias and bias not in shapes):
            return []
        if isinstance(layer, nn.Conv2d) and kinds[at : at + 3] == [nn.Conv2d, nn.ReLU, nn.AvgPool2d]:
            pool: Any = calls[at + 2].layer
            place = (pool.kernel_size, pool.stride, pool.padding, pool.ceil_mode)
            window = window_of(calls[at + 2].shape, *place, divisor_override=pool.divisor_override)
            if window is None:
                return []
            last = kinds[at + 3 : at + 4] == [nn.Linear]
            stride, padding = pair(layer.stride), pair(layer.padding)
            made.append(explicit_gpu.ConvReluPool(weight, bias, stride, padding, window, kind, not made, last))
            at += 3
        elif isinstance(layer, nn.Linear) and len(shape) == 2 and (made or not images):
            last = at == len(calls) - 1
            if not last and kinds[at + 1] is not nn.ReLU:
                return []
            made.append(explicit_gpu.Linear(weight, bias, kind, not made, last))
            at += 1 if last else 2
        else:
            return []
    ends = bool(made) and isinstance(made[-1], explicit_gpu.Linear) and made[-1].last
    rows, classes = (1 << (size - 1).bit_length() for size in (len(x), shapes[made[-1].weight][0])) if ends else (0, 0)
    trained = {name for layer in made for name in (layer.weight, layer.bias) if name}
    return made if ends and rows * classes <= MAX_OUTPUTS and trained == set(shapes) else []


def _shaped(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view of rows in this shape; of kernels (c, o, i, kh, kw) with channels last in memory, as products read them.

    >>> _shaped(torch.zeros(2, 24), (2, 3, 4, 1, 2)).stride()
    (24, 8, 1, 8, 4)
    """
    if len(shape) != 5:
        return rows.view(shape)
    c, o, i, kh, kw = shape
    return rows.view(c, o, kh, kw, i).permute(0, 1, 4, 2, 3)


class ChainStep:
    """A step of all clients. Coordinates and optimizer states are tensors of the step, which it changes in place.

    Args:
        inputs: the training inputs that it is made for.
        layers: the layers.
        factor: of the learning rate; None for a constant one.
    """

    def __init__(self, inputs: TrainingInputs, layers: Layers, factor: Tensor | None) -> None:
        self.layers, self.optimizer, self.gather, self.factor = layers, inputs.optimizer, inputs.work.gather, factor
        self.like = {name: block[0] for name, block in inputs.start.items()}
        clients = len(inputs.work.samples)
        size = sum(block.numel() for block in self.like.values())
        self.matrix, self.grad = (inputs.work.index.new_zeros((clients, size), dtype=torch.float32) for _ in range(2))
        fresh = self.optimizer.init({"": self.matrix})
        self.unclipped: Optimizer = replace(self.optimizer, clip_norm=math.inf)  # type: ignore[type-var]
        self.state: State = {slot: {"": torch.zeros_like(tree[""])} for slot, tree in fresh.items()}
        self.coords, self.grads = self._cut(self.matrix), self._cut(self.grad)
        # the column of each value in the usual order, and the place in that order of each column
        self.columns = torch.cat([block.reshape(-1) for block in self._cut(torch.arange(size)[None]).values()])
        self.places = torch.argsort(self.columns).to(self.matrix.device)
        self.columns = self.columns.to(self.matrix.device)
        self.opt = {slot: self._cut(tree[""]) for slot, tree in self.state.items()}

    def _cut(self, matrix: Tensor) -> Tree:
        """Blocks of all clients as views of a matrix with a row for each; kernels have their channels last in it."""
        sizes = [block.numel() for block in self.like.values()]
        parts = zip(self.like.items(), torch.split(matrix, sizes, 1), strict=True)
        return {name: _shaped(part, (len(matrix), *block.shape)) for (name, block), part in parts}

    def load(self, inputs: TrainingInputs, opt: State) -> None:
        """Copy the initial coordinates and optimizer states of a round to the tensors of the step."""
        if inputs.common_start is not None and tuple(inputs.start) == tuple(self.like):
            self.matrix.copy_(inputs.common_start[self.places])
        else:
            copy_trees((self.coords,), (inputs.start,))
        if self.opt:
            copy_trees(tuple(self.opt.values()), tuple(opt[slot] for slot in self.opt))

    def copied(self) -> Tree:
        """A copy of the coordinates, with the values of each block in their usual order."""
        return Vector(self.matrix.index_select(1, self.columns), Spec.of(self.like))

    def __call__(self, batches: Tensor, done: Tensor, losses: Tensor, masked: bool) -> None:
        """One step of all clients.

        Args:
            batches: (steps, clients, batch + 1) indices of examples; the last column is the number of those that count.
            done: (1,) the step.
            losses: (clients,) the mean losses times the examples that count are added.
            masked: whether clients may have finished.
        """
        x, y, rows = self._examples(batches, done)
        for layer in self.layers:
            x = layer.forward(x, self.coords)
        grad = self._loss(x, y, rows, losses)
        for layer in reversed(self.layers):
            if grad is not None:
                grad = layer.backward(grad, self.coords, self.grads)
        if self.optimizer.plain:
            self._descend(rows, masked)
            done.add_(1)
            return
        # on all clients at once; only the norm is one of each client
        change, state = self.unclipped.update({"": self._clipped()}, self.state, {"": self.matrix})
        step = change[""] if self.factor is None else change[""] * self.factor
        if masked:
            active = (rows > 0)[:, None]
            step = torch.where(active, step, 0)
            state = {s: {"": torch.where(active, tree[""], self.state[s][""])} for s, tree in state.items()}
        self.matrix.add_(step)
        for slot, tree in self.state.items():
            tree[""].copy_(state[slot][""])
        done.add_(1)

    def _clipped(self) -> Tensor:
        """The gradients; `clip_by_global_norm` of each client, by the kernels that `vmap` of it has."""
        most = self.optimizer.clip_norm
        if most == math.inf:
            return self.grad
        norm = torch.linalg.vector_norm(self.grad, dim=1)
        factor = torch.where(norm.isinf(), math.nan, (most / norm).clamp(max=1.0))
        return self.grad * factor[:, None]

    def _descend(self, rows: Tensor, masked: bool) -> None:
        """A step of plain gradient descent, in one pass over the weights."""
        step = self.grad if self.factor is None else self.grad * self.factor
        if masked:
            step = torch.where((rows > 0)[:, None], step, 0)
        self.matrix.add_(step, alpha=-self.optimizer.lr)

    def _examples(self, batches: Tensor, done: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets and numbers of examples that count."""
        own = getattr(self.gather, "__self__", None)
        first = self.layers[0]
        if type(own) is Images and own.pixels.is_contiguous() and isinstance(first, explicit_gpu.ConvReluPool):
            from thinwire.kernels import chain_triton

            mean, deviation = (block.view(-1) for block in own.statistics)
            found: tuple[Tensor, Tensor, Tensor] = chain_triton.gather(
                *(batches, done, own.pixels, own.targets, (mean, deviation), first.kind),
                first.channels(self.coords[first.weight]),
            )
            return found
        batch = batches.index_select(0, done)[0]
        x, y = self.gather(batch[:, :-1])
        if isinstance(first, explicit_gpu.Linear):
            x = x.flatten(2).to(first.kind)
        return x, y.contiguous(), batch[:, -1]

    def _loss(self, outputs: Tensor, targets: Tensor, rows: Tensor, losses: Tensor) -> Tensor | None:
        """The gradient by the outputs; writes that of the last bias."""
        from thinwire.kernels import chain_triton

        bias = self.layers[-1].bias
        own = (self.coords[bias], self.grads[bias]) if bias else (None, None)
        return chain_triton.cross_entropy(outputs, own[0], targets, rows, own[1], losses)


def copy_trees(places: Sequence[Tree], trees: Sequence[Tree]) -> None:
    """Copy trees into existing ones, all blocks in one call."""
    pairs = [(place[name], tree[name]) for place, tree in zip(places, trees, strict=True) for name in place]
    (into, blocks), others = by_strides(pairs)
    if into:
        torch._foreach_copy_(into, blocks)
    for place, block in others:
        place.copy_(block)


def by_strides(pairs: list[tuple[Tensor, Tensor]]) -> tuple[tuple[list[Tensor], list[Tensor]], list]:
    """Pairs of tensors with the same strides, as two lists, which one kernel of torch can take, and the others."""
    alike = [pair for pair in pairs if pair[0].stride() == pair[1].stride()]
    others = [pair for pair in pairs if pair[0].stride() != pair[1].stride()]
    return ([a for a, _ in alike], [b for _, b in alike]), others
