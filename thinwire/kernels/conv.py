"""Convolutions of many clients at once, each with its own kernel, as matrix products.

vmap turns them into one grouped convolution, for which GPU libraries have slow kernels. `by_products()` is a context in
which `conv2d` is one batched matrix product instead, in Triton on a GPU (`conv_triton.py`). Dilated and grouped
convolutions, and those that Triton cannot compute, are left to torch. The results differ from torch's by rounding only.

The context also replaces average pooling over adjacent windows, whose gradient in torch is several times slower than a
copy, group norms where `group_norm.py` has kernels, and batch norms on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from thinwire.kernels import group_norm
from thinwire.kernels.conv_cpu import Pair, pair, window_of
from thinwire.kernels.support import batch_dim_first, derivative, for_many, for_one, has_triton, split_clients

Products = Literal["fused"]


class by_products(TorchFunctionMode):  # noqa: N801 - a context manager, used like a function
    """A context in which `conv2d` is a matrix product where Triton can compute it.

    >>> x, w = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)
    >>> with by_products():
    ...     torch.conv2d(x, w, padding=1)[0, 0, 0].tolist()
    [4.0, 6.0, 4.0]
    """

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the supported functions; call all others."""
        kwargs = kwargs or {}
        if func is torch.conv2d and (call := _arguments(*args, **kwargs)):
            return convolve(*call)
        if func is F.avg_pool2d and (window := window_of(args[0].shape, *args[1:], **kwargs)):
            return _Means.apply(args[0], window)  # type: ignore[no-untyped-call]
        if func is F.group_norm:
            return norm(*args, **kwargs)
        if func is F.batch_norm and args[0].is_cuda and (kwargs.get("training") or args[5:6] == (True,)):
            return batch_norm(*args, **kwargs)
        return func(*args, **kwargs)


def triton_kernels(x: Tensor) -> Any:
    """The module of Triton kernels, or None where they cannot run."""
    if x.dtype not in (torch.float32, torch.bfloat16) or not has_triton(x.device):
        return None
    from thinwire.kernels import conv_triton as kernels

    return kernels


def convolve(x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """The convolution of images (n, channels, height, width) with a kernel (out, channels, height, width).

    In the type of the images; kernel and bias may have another one: their gradients have it, without rounding to that
    of the images.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if triton_kernels(x) is None:
        return torch.conv2d(x, kernel, bias, stride, padding)
    return _Fused.apply(x, kernel, bias, stride, padding)[0]  # type: ignore[no-untyped-call]


def _arguments(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Pair, Pair] | None:
    """The arguments of `convolve`, or None for an unsupported convolution."""
    if isinstance(padding, str) or groups != 1 or pair(dilation) != (1, 1) or x.dim() != 4:
        return None
    return x, weight, bias, pair(stride), pair(padding)


def norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """`F.group_norm`, by the kernels of `group_norm.py` where they support it."""
    if not group_norm.suits(x, num_groups):
        return F.group_norm(x, num_groups, weight, bias, eps)
    return group_norm.group_norm(x, num_groups, *_affine(x, weight, bias), eps)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weight and bias of a norm; ones and zeros where it has none."""
    one = torch.ones(x.shape[1], device=x.device) if weight is None else weight
    return one, torch.zeros(x.shape[1], device=x.device) if bias is None else bias


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm` in training, by operations that torch's vmap supports on a GPU in 16 bits and channels last.

    Sums are in float32, the result has the type of the input. The running variance is the unbiased one, as in torch.
    """
    weight, bias = _affine(x, weight, bias)
    count, wide = x.numel() // x.shape[1], x.to(torch.promote_types(x.dtype, weight.dtype))
    variance, mean = torch.var_mean(wide, (0, *range(2, x.dim())), correction=0, keepdim=True)
    for running, value in ((running_mean, mean), (running_var, variance * (count / max(1, count - 1)))):
        if running is not None:
            running.mul_(1 - momentum).add_(value.detach().flatten().to(running.dtype), alpha=momentum)
    scale, shift = (block.view(mean.shape) for block in (weight, bias))
    return ((wide - mean) * torch.rsqrt(variance + eps) * scale + shift).to(x.dtype)


class _Means(torch.autograd.Function):
    """Average pooling over adjacent windows that cover the image.

    Its gradient is a copy to each pixel, channels last as matrix products need it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, window: Pair) -> Tensor:
        return F.avg_pool2d(x, window)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.window = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        (n, c, oh, ow), (kh, kw) = grad.shape, ctx.window
        each = (grad / (kh * kw)).permute(0, 2, 3, 1)[:, :, None, :, None]
        by_x = each.expand(n, oh, kh, ow, kw, c).reshape(n, oh * kh, ow * kw, c)
        return by_x.permute(0, 3, 1, 2), None


class _Fused(torch.autograd.Function):
    """The convolution; patches are not stored, each gradient loads them again.

    The kernel as the products read it is a further output, saved for the gradient.
    """

    @staticmethod
    def forward(x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
        return for_one(_of_many, x, kernel, bias, stride, padding)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        x, kernel, bias, ctx.stride, ctx.padding = inputs
        own = output[1]
        ctx.bias, ctx.kind = bias is not None, kernel.dtype
        ctx.size, ctx.kernel_size = tuple(x.shape[-2:]), tuple(kernel.shape[-2:])
        ctx.mark_non_differentiable(own)
        ctx.set_materialize_grads(False)  # no zeros for them
        ctx.save_for_backward(x, own if own.numel() else kernel)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple:  # type: ignore[override]
        x, kernel = ctx.saved_tensors
        need_x, need_kernel, need_bias = ctx.needs_input_grad[:3]
        by_x = by_kernel = by_bias = None
        if need_x:
            by_x = _FusedInputGradient.apply(grad, kernel, ctx.size, ctx.stride, ctx.padding)  # type: ignore[no-untyped-call]
        if need_kernel or need_bias:
            by_kernel, by_bias = _kernel_gradient(grad, x, ctx.kernel_size, ctx.stride, ctx.padding, ctx.bias, ctx.kind)
        return by_x, by_kernel, by_bias if ctx.bias else None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, *others: Any) -> tuple:
        if in_dims[1] is None and in_dims[2] is None:  # all clients share one kernel: one long product
            c = info.batch_size
            out, own = _Fused.forward(batch_dim_first(x, in_dims[0], c).flatten(0, 1), *others)
            return (split_clients(out, c), own), (0, None)
        return for_many(_of_many, info, in_dims, (x, *others))


def _of_many(x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
    """The convolutions of all clients, and the copy of the kernels that they read; empty if it is no copy."""
    kernels = triton_kernels(x)
    own = kernels.channels_last(kernel, x.dtype)
    out = kernels.forward(x, own, bias, stride, padding)
    return out, own.new_empty(len(own), 0) if own is kernel else own


@derivative
def _kernel_gradient(grad: Tensor, x: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """The gradients with respect to the kernel and the bias, in their type; the second is empty without a bias."""
    return triton_kernels(x).kernel_gradient(grad, x, *settings)  # type: ignore[no-any-return]


class _FusedInputGradient(torch.autograd.Function):
    """The gradient with respect to the images."""

    @staticmethod
    def forward(grad: Tensor, kernel: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
        return for_one(triton_kernels(grad).input_gradient, grad, kernel, size, stride, padding)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        return

    @staticmethod
    def vmap(info: Any, in_dims: tuple, grad: Tensor, *others: Any) -> tuple:
        if in_dims[1] is None:
            c = info.batch_size
            long = batch_dim_first(grad, in_dims[0], c).flatten(0, 1)
            return split_clients(_FusedInputGradient.forward(long, *others), c), 0
        return for_many(triton_kernels(grad).input_gradient, info, in_dims, (grad, *others))
