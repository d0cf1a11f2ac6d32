"""Convolutions of many clients at once, each with its own kernel, as matrix products.

vmap turns them into one grouped convolution, for which GPU libraries have slow kernels. `by_products()` is a context in
which `conv2d` is one batched matrix product instead, in Triton on a GPU (`conv_fused.py`). Dilated and grouped
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

from thinwire.kernels import conv_fused, group_norm
from thinwire.kernels.conv_cpu import Pair, pair, window_of

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
            return means(args[0], window)
        if func is F.group_norm and (norm := _norm(*args, **kwargs)):
            return group_norm.group_norm(*norm)
        if func is F.batch_norm and args[0].is_cuda and (kwargs.get("training") or args[5:6] == (True,)):
            return batch_norm(*args, **kwargs)
        return func(*args, **kwargs)


def convolve(x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """The convolution of images (n, channels, height, width) with a kernel (out, channels, height, width)."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if conv_fused.triton_kernels(x) is not None:
        return conv_fused.convolve_fused(x, kernel, bias, stride, padding)
    return torch.conv2d(x, kernel, bias, stride, padding)


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


def means(x: Tensor, window: Pair) -> Tensor:
    """Average pooling over adjacent windows that cover the image.

    >>> means(torch.arange(4.0).view(1, 1, 2, 2), (2, 2))
    tensor([[[[1.5000]]]])
    """
    return _Means.apply(x, window)  # type: ignore[no-untyped-call]


def _norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, int, Tensor, Tensor, float] | None:
    """The arguments of a group norm that `group_norm.py` supports, or None."""
    return (x, num_groups, *_affine(x, weight, bias), eps) if group_norm.suits(x, num_groups) else None


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
    """Average pooling; its gradient is a copy to each pixel, channels last as matrix products need it."""

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
