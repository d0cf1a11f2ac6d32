"""Networks that are a chain of layers, trained without autograd: for small models most of its time is overhead.

A network is a chain if each of its layers gets exactly the output of the layer before it, which is found by running it
once. Supported are Conv2d, ReLU, AvgPool2d, MaxPool2d, Flatten and Linear. Convolutions are computed in the memory
order in which CPU kernels are fastest, those with few channels packed (`kernels/packed.py`). Results differ from those
of autograd by rounding only; the first gradient is compared with it.

>>> model = Functional.of(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)))
>>> batch = torch.randn(4, 2), torch.tensor([0, 1, 2, 0]), None
>>> grads, (loss, _) = Chain(model).gradient(model.weights(), {}, *batch)
>>> {name: tuple(block.shape) for name, block in grads.items()}
{'0.weight': (8, 2), '0.bias': (8,), '2.weight': (3, 8), '2.bias': (3,)}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from thinwire.core.tree import Tree, Vector
from thinwire.data.losses import cross_entropy
from thinwire.kernels import conv_cpu, explicit
from thinwire.kernels.conv_cpu import pair
from thinwire.kernels.explicit import Layer
from thinwire.kernels.packed import WASTE, PackedFirst, PackedKernel, PackedNext
from thinwire.metrics.classification import IGNORED
from thinwire.training.functional import Functional
from thinwire.training.inputs import UnsupportedModel

TOLERANCE = 1e-3  # of the first gradient, relative to its norm; rounding alone gives 1e-5
NARROW = 16  # channels of a packed convolution, at most: the width of the widest vector units

_CONVOLUTIONS = (nn.Conv2d, conv_cpu.Conv2d)
_AVERAGES = (nn.AvgPool2d, conv_cpu.AvgPool2d)
_MAXIMA = (nn.MaxPool2d, conv_cpu.MaxPool2d)
_KNOWN = (*_CONVOLUTIONS, *_AVERAGES, *_MAXIMA, nn.ReLU, nn.Flatten, nn.Linear)
_aten: Any = torch.ops.aten


def may_be_chain(model: Functional, *, half: bool = False) -> bool:
    """Whether a model has only layers that a chain may have; whether it is one is known when it runs.

    With `half` also a model that is trained in 16 bits.

    >>> may_be_chain(Functional.of(nn.Linear(2, 2))), may_be_chain(Functional.of(nn.LSTM(2, 2)))
    (True, False)
    """
    return (half or not model.half) and not model.buffers() and all(map(_is_known, _leaves(model.module)))


def _leaves(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if not any(True for _ in layer.children())]


def _is_known(layer: nn.Module) -> bool:
    """Whether a layer is of a supported kind, without hooks that change its output."""
    if type(layer) not in _KNOWN or layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
        return False
    if isinstance(layer, nn.Conv2d):
        plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        return plain and not isinstance(layer.padding, str)
    if isinstance(layer, nn.MaxPool2d):
        return not layer.return_indices
    return not isinstance(layer, nn.Flatten) or (layer.start_dim, layer.end_dim) == (1, -1)


@dataclass(eq=False)
class Chain:
    """A model whose gradient is computed layer by layer. For one thread at a time.

    Args:
        model: the model and its loss.
        programs: the layers and the weights that are constants, by the shape of a batch and by whether oneDNN is on.
    """

    explicit: ClassVar[bool] = True
    model: Functional
    programs: dict[tuple, tuple[list[Layer], Tree]] = field(default_factory=dict)

    def loss(
        self, weights: Tree, buffers: Tree, inputs: Any, targets: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tree]:
        """The loss of the model, by autograd."""
        return self.model.loss(weights, buffers, inputs, targets, mask)

    @torch.no_grad()
    def gradient(
        self, weights: Tree, buffers: Tree, inputs: Any, targets: Tensor, mask: Tensor | None
    ) -> tuple[Tree, tuple[Tensor, Tree]]:
        """The gradient of `loss` with respect to weights that require one, the loss, and the buffers.

        Raises UnsupportedModel if the model is not a chain of known layers.
        """
        if not isinstance(inputs, Tensor) or inputs.dtype != torch.float32:
            raise UnsupportedModel("the inputs of a chain of layers are one tensor of float32")
        key = (*inputs.shape, bool(torch.backends.mkldnn.enabled))
        made = self.programs.get(key)
        if made is None:
            made = program(self.model.module, inputs), _constants(self.model.module, weights)
            _check(self.model, self._gradient(*made, weights, inputs, targets, mask)[0], weights, inputs, targets, mask)
            self.programs[key] = made
        grads, loss = self._gradient(*made, weights, inputs, targets, mask)
        return grads, (loss, buffers)

    def _gradient(
        self, layers: list[Layer], constants: Tree, weights: Tree, x: Tensor, targets: Tensor, mask: Any
    ) -> tuple[Tree, Tensor]:
        used = {**constants, **weights} if constants else weights
        for layer in layers:
            x = layer.forward(x, used)
        loss, grad = self._loss(x, targets, mask)
        grads: Tree = {}
        for layer in reversed(layers):
            grad = layer.backward(grad, used, grads)  # type: ignore[assignment]
            if grad is None:
                break
        if isinstance(weights, Vector):
            return Vector(torch.cat([grads[name].view(-1) for name in weights.spec.names]), weights.spec), loss
        return {name: grads[name] for name in weights}, loss

    def _loss(self, outputs: Tensor, targets: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The mean loss, and its gradient with respect to the outputs."""
        model = self.model
        if model.criterion is not cross_entropy or model.logit_adjustment or targets.shape != outputs.shape[:1]:
            leaf = outputs.detach().requires_grad_()
            with torch.enable_grad():
                value = model._mean(leaf, targets, mask)
            (grad,) = torch.autograd.grad(value, leaf)
            return value.detach(), grad.clone()
        targets = targets.long() if mask is None else torch.where(mask > 0, targets.long(), IGNORED)
        logs, mean = outputs.log_softmax(1), 1
        value, count = _aten.nll_loss_forward(logs, targets, None, mean, IGNORED)
        if not count:
            return torch.zeros_like(value), torch.zeros_like(logs)
        grad = _aten.nll_loss_backward(torch.ones_like(value), logs, targets, None, mean, IGNORED, count)
        return value, _aten._log_softmax_backward_data(grad, logs, 1, logs.dtype)


def _constants(module: nn.Module, weights: Tree) -> Tree:
    """The parameters of a chain that are not trained."""
    named = {name: p.detach() for name, p in module.named_parameters()}
    held = [p for layer in _leaves(module) for p in layer._parameters.values() if p is not None]
    if len(named) < len(held):
        raise UnsupportedModel("the model uses a weight twice, which a chain of layers does not")
    if not named.keys() >= weights.keys():
        raise UnsupportedModel("the method trains more than the weights of the model")
    return {name: p for name, p in named.items() if name not in weights}


def _check(model: Functional, found: Tree, weights: Tree, inputs: Tensor, targets: Tensor, mask: Tensor | None) -> None:
    """Raise UnsupportedModel unless this is the gradient that autograd computes."""
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
    expected, _ = model.gradient(leaves, {}, inputs, targets, mask)
    difference = sum(float((found[name] - block).double().square().sum()) for name, block in expected.items())
    norm = sum(float(block.double().square().sum()) for block in expected.values())
    if difference > TOLERANCE**2 * norm:
        raise UnsupportedModel("the model computes more than its layers one after another")


def program(module: nn.Module, x: Tensor) -> list[Layer]:
    """The layers of a network for batches of this shape."""
    calls = trace(module, x)
    first = 1 if isinstance(calls[0].layer, nn.Flatten) and len(calls) > 1 else 0  # the first with weights
    if not isinstance(calls[first].layer, nn.Conv2d | nn.Linear):
        raise UnsupportedModel("a chain of layers begins with a Conv2d or Linear, after at most one Flatten")
    made: list[Layer] = []
    at = pixels = 0  # channels of images that were flattened in our memory order
    while at < len(calls):
        layer, shape, weight, bias = calls[at]
        if packed := _packed(calls, at):
            made.append(explicit.ConvReluPool(weight, bias, packed))
            at += 3
            continue
        if isinstance(layer, nn.Conv2d):
            stride, padding = pair(layer.stride), pair(layer.padding)
            made.append(explicit.Conv2d(weight, bias, stride, padding, at == first))
        elif isinstance(layer, nn.Linear):
            made.append(explicit.Linear(weight, bias, pixels, at == first))
            pixels = 0
        elif isinstance(layer, nn.Flatten):
            pixels = shape[1] if len(shape) == 4 and at else pixels
            made.append(explicit.Flatten())
        else:
            made.append(explicit.ReLU() if isinstance(layer, nn.ReLU) else _pool(layer))
        at += 1
    if pixels or any(isinstance(call.layer, nn.Linear) and len(call.shape) != 2 for call in calls):
        raise UnsupportedModel("the linear layers of a chain get one row for each example, and one of them is the last")
    return made


class Call(NamedTuple):
    """A layer, the shape of its input, and the names of its weight and bias, if it has them."""

    layer: nn.Module
    shape: tuple[int, ...]
    weight: str
    bias: str | None


def trace(module: nn.Module, x: Tensor) -> list[Call]:
    """The layers in the order in which they run.

    Raises UnsupportedModel if the model is not a chain of known layers.
    """
    if not all(map(_is_known, leaves := _leaves(module))):
        raise UnsupportedModel("the model has other layers than Conv2d, ReLU, AvgPool2d, MaxPool2d, Flatten and Linear")
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []
    versions = [0]  # of the last output, which counts changes in place
    unchanged: list[bool] = []

    def compare(layer: nn.Module, args: tuple) -> None:
        unchanged.append(args[0]._version == versions[-1] or not seen)

    def keep(layer: nn.Module, args: tuple, out: Tensor) -> None:
        seen.append((layer, args[0], out))
        versions.append(out._version)

    handles = [layer.register_forward_pre_hook(compare) for layer in leaves]
    handles += [layer.register_forward_hook(keep) for layer in leaves]
    try:
        with torch.no_grad():
            weights = {name: p.detach().to(x.device) for name, p in module.named_parameters()}
            end = functional_call(module, weights, (x.clone(),))
    finally:
        for handle in handles:
            handle.remove()
    follows = all(after[1] is before[2] for before, after in pairwise(seen)) and all(unchanged)
    once = len(seen) == len(leaves) == len({layer for layer, *_ in seen}) and len(seen) > 0
    if not (follows and once and end is seen[-1][2] and end.dim() == 2 and end._version == versions[-1]):
        raise UnsupportedModel("the model is not a chain of layers, each of which gets the output of the one before")
    names = {layer: f"{name}." if name else "" for name, layer in module.named_modules()}
    biased = {layer for layer in leaves if getattr(layer, "bias", None) is not None}
    return [
        Call(layer, tuple(given.shape), f"{names[layer]}weight", f"{names[layer]}bias" if layer in biased else None)
        for layer, given, _ in seen
    ]


def _pool(layer: nn.Module) -> explicit.Pool:
    """A pooling layer."""
    at: Any = layer
    place: tuple = (pair(at.kernel_size), pair(at.stride), pair(at.padding))
    if isinstance(layer, nn.MaxPool2d):
        return explicit.Pool(True, (*place, pair(at.dilation), at.ceil_mode))
    return explicit.Pool(False, (*place, at.ceil_mode, at.count_include_pad, at.divisor_override))


def _packed(calls: list[Call], at: int) -> PackedFirst | PackedNext | None:
    """The kernels of a convolution with ReLU and pooling that is packed; None for others."""
    kernel = _narrow(calls, at)
    if kernel is None:
        return None
    if at == 0:
        size: Any = calls[0].shape
        following = _narrow(calls, 3)
        return PackedFirst(kernel, size, (2, 1) if following and torch.backends.mkldnn.enabled else (1, 1))
    previous = at == 3 and _narrow(calls, 0)
    return PackedNext(kernel) if previous and torch.backends.mkldnn.enabled else None


def _narrow(calls: list[Call], at: int) -> tuple[int, int, int, int] | None:
    """The shape of the kernel if here is a convolution with few channels that can be packed, ReLU and pooling."""
    if at + 2 >= len(calls) or not isinstance(conv := calls[at].layer, nn.Conv2d):
        return None
    relu, pool = calls[at + 1].layer, calls[at + 2].layer
    o, i, kh, kw = conv.weight.shape
    same = conv.stride == (1, 1) and kh % 2 == kw % 2 == 1 and conv.padding == (kh // 2, kw // 2)
    if not (same and isinstance(relu, nn.ReLU) and isinstance(pool, nn.AvgPool2d)):
        return None
    place = _pool(pool).place
    if place[:3] != ((2, 2), (2, 2), (0, 0)) or place[-1] is not None:  # not averages of 2 x 2 pixels
        return None
    height, width = calls[at].shape[2:]
    block, most = ((2, 2), 4) if at == 0 else ((2, 1), NARROW // 2)
    if height % 2 or width % 2 or o > NARROW or i > most:
        return None
    shape = (o, i, kh, kw)
    return shape if PackedKernel(shape, block, joined=at == 0).waste <= WASTE else None
