"""Convolutions of many clients at once, each with kernels of its own, as products of matrices.

vmap turns them into one grouped convolution, for which GPU libraries have slow kernels. Here the pictures are laid out
so that one batched product does the work:

    columns[client] = all patches of its pictures, one a row;    outputs[client] = columns[client] kernel[client]

Inside `by_products()` every ordinary `conv2d` is done this way; dilated and grouped ones are left alone. On a GPU with
triton, `by_products("fused")` does not even lay the patches out, see `kernels`. All ways differ by rounding only.

Means over windows side by side are taken as means, since torch's kernel for their gradient is several times slower than
a copy; group norms are done by `normalise` where that has kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from thinwire.kernels import group_norm as normalise
from thinwire.kernels.batch_dim import batch_dim_first
from thinwire.kernels.conv_cpu import Pair, patches
from thinwire.kernels.support import has_triton

Products = Literal["im2col", "fused"]

_SPLIT = 1 << 10  # rows of patches in one piece of a kernel's gradient: long sums are cut so that they run side by side


class by_products(TorchFunctionMode):  # noqa: N801 - a context manager, used like a function
    """A context in which `conv2d` is a product of matrices.

    >>> x, w = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)
    >>> with by_products():
    ...     torch.conv2d(x, w, padding=1)[0, 0, 0].tolist()
    [4.0, 6.0, 4.0]
    """

    def __init__(self, how: Products = "im2col") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.how = how

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every call of a torch function inside the context."""
        kwargs = kwargs or {}
        if func is torch.conv2d and (call := _arguments(*args, **kwargs)):
            return convolve(*call, self.how)
        if func is F.avg_pool2d and (window := _window(*args, **kwargs)):
            return means(args[0], window)
        if func is F.group_norm and (norm := _norm(*args, **kwargs)):
            return normalise.group_norm(*norm)
        return func(*args, **kwargs)


def convolve(
    x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, how: Products = "im2col"
) -> Tensor:
    """The convolution of pictures (n, channels, height, width) with a kernel (out, channels, height, width)."""
    if torch.is_autocast_enabled(x.device.type):
        kind = torch.get_autocast_dtype(x.device.type)
        x, kernel, bias = x.to(kind), kernel.to(kind), None if bias is None else bias.to(kind)
    if how == "fused" and _kernels(x) is not None:
        return _Fused.apply(x, kernel, bias, stride, padding)  # type: ignore[no-untyped-call, no-any-return]
    out, _ = _Convolve.apply(x, kernel, stride, padding)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias[:, None, None]  # type: ignore[no-any-return]


def _kernels(x: Tensor) -> Any:
    """The module with kernels of our own, where they can run."""
    if x.dtype not in (torch.float32, torch.bfloat16) or not has_triton(x.device):
        return None
    from thinwire.kernels import conv_triton as kernels

    return kernels


def _arguments(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Pair, Pair] | None:
    """The arguments of `convolve`, or None for a convolution that it does not do."""
    if isinstance(padding, str) or groups != 1 or _pair(dilation) != (1, 1) or x.dim() != 4:
        return None
    return x, weight, bias, _pair(stride), _pair(padding)


def means(x: Tensor, window: Pair) -> Tensor:
    """Means over windows side by side that fill the picture.

    >>> means(torch.arange(4.0).view(1, 1, 2, 2), (2, 2))
    tensor([[[[1.5000]]]])
    """
    return _Means.apply(x, window)  # type: ignore[no-untyped-call, no-any-return]


def _window(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Pair | None:
    """The window of a mean that `means` takes, or None for another."""
    size = _pair(kernel_size)
    beside = stride is None or stride == () or _pair(stride) == size
    plain = _pair(padding) == (0, 0) and not ceil_mode and divisor_override is None
    fills = x.dim() == 4 and x.shape[-2] % size[0] == 0 and x.shape[-1] % size[1] == 0
    return size if beside and plain and fills else None


def _norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, int, Tensor, Tensor, float] | None:
    """The arguments of a group norm that `normalise` does, or None for another."""
    if weight is None or bias is None or not normalise.suits(x, num_groups, weight, bias):
        return None
    return x, num_groups, weight, bias, eps


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


# -- with a leading client axis: x (c, n, i, h, w), kernel (c, o, i, kh, kw), columns (c, n oh ow, kh kw i) ------------


def _forward(x: Tensor, kernel: Tensor, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
    c, n = x.shape[:2]
    kh, kw = kernel.shape[-2:]
    view = patches(x, (kh, kw), stride, padding)
    oh, ow = view.shape[2:4]
    columns = view.reshape(c, n * oh * ow, -1)
    out = torch.bmm(columns, _flat(kernel).mT)
    return out.view(c, n, oh, ow, -1).permute(0, 1, 4, 2, 3), columns


def _kernel_gradient(grad: Tensor, columns: Tensor, size: Pair) -> Tensor:
    c, n, o, oh, ow = grad.shape
    rows = n * oh * ow
    # cut at whole pictures, so that pieces are equal
    pieces = next((p for p in range(max(1, rows // _SPLIT), 0, -1) if n % p == 0), 1)
    g = grad.permute(0, 1, 3, 4, 2).reshape(c * pieces, rows // pieces, o)
    made = torch.bmm(g.mT, columns.reshape(c * pieces, rows // pieces, -1))
    made = made.view(c, pieces, o, *size, -1).sum(1) if pieces > 1 else made.view(c, o, *size, -1)
    return made.permute(0, 1, 4, 2, 3)


def _input_gradient(grad: Tensor, kernel: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    c, n, o, oh, ow = grad.shape
    i, kh, kw = kernel.shape[-3:]
    h, w = size[0] + 2 * padding[0], size[1] + 2 * padding[1]
    g = grad.permute(0, 1, 3, 4, 2).reshape(c, n * oh * ow, o)
    patches = torch.bmm(g, _flat(kernel)).view(c, n, oh, ow, kh, kw, i).permute(0, 1, 2, 3, 6, 4, 5)
    rows: Tensor = torch.ops.aten.unfold_backward(patches, (c, n, oh, w, i, kh), 3, kw, stride[1])
    x: Tensor = torch.ops.aten.unfold_backward(rows, (c, n, h, w, i), 2, kh, stride[0])
    x = x[:, :, padding[0] : h - padding[0], padding[1] : w - padding[1]]
    return x.permute(0, 1, 4, 2, 3)


def _flat(kernel: Tensor) -> Tensor:
    """(c, o, i, kh, kw) -> (c, o, kh kw i)."""
    return kernel.permute(0, 1, 3, 4, 2).flatten(2)


# -- the same under autograd and vmap ----------------------------------------------------------------------------------


def _part(value: Tensor, clients: int) -> Tensor:
    """FlatTree the first axis into equal parts, one a client."""
    return value.unflatten(0, (clients, -1))  # type: ignore[no-untyped-call, no-any-return]


class _Convolve(torch.autograd.Function):
    """The convolution; its columns come along, for the gradient."""

    @staticmethod
    def forward(x: Tensor, kernel: Tensor, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
        out, columns = _forward(x[None], kernel[None], stride, padding)
        return out[0], columns[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        x, kernel, ctx.stride, ctx.padding = inputs
        ctx.size, ctx.kernel_size = tuple(x.shape[-2:]), tuple(kernel.shape[-2:])
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(kernel, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple:  # type: ignore[override]
        kernel, columns = ctx.saved_tensors
        need_x, need_kernel = ctx.needs_input_grad[:2]
        x = _InputGradient.apply(grad, kernel, ctx.size, ctx.stride, ctx.padding) if need_x else None  # type: ignore[no-untyped-call]
        k = _KernelGradient.apply(grad, columns, ctx.kernel_size) if need_kernel else None  # type: ignore[no-untyped-call]
        return x, k, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, kernel: Tensor, stride: Pair, padding: Pair) -> tuple:
        c = info.batch_size
        x = batch_dim_first(x, in_dims[0], c)
        if in_dims[1] is None:  # one kernel for everybody: one long product
            out, columns = _forward(x.flatten(0, 1)[None], kernel[None], stride, padding)
            return (_part(out[0], c), _part(columns[0], c)), (0, 0)
        return _forward(x, batch_dim_first(kernel, in_dims[1], c), stride, padding), (0, 0)


class _KernelGradient(torch.autograd.Function):
    """The gradient by the kernel."""

    @staticmethod
    def forward(grad: Tensor, columns: Tensor, size: Pair) -> Tensor:
        return _kernel_gradient(grad[None], columns[None], size)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple, grad: Tensor, columns: Tensor, size: Pair) -> tuple:
        c = info.batch_size
        return _kernel_gradient(batch_dim_first(grad, in_dims[0], c), batch_dim_first(columns, in_dims[1], c), size), 0


class _InputGradient(torch.autograd.Function):
    """The gradient by the pictures."""

    @staticmethod
    def forward(grad: Tensor, kernel: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
        return _input_gradient(grad[None], kernel[None], size, stride, padding)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple, grad: Tensor, kernel: Tensor, size: Pair, stride: Pair, padding: Pair) -> tuple:
        c = info.batch_size
        grad = batch_dim_first(grad, in_dims[0], c)
        if in_dims[1] is None:
            made = _input_gradient(grad.flatten(0, 1)[None], kernel[None], size, stride, padding)
            return _part(made[0], c), 0
        return _input_gradient(grad, batch_dim_first(kernel, in_dims[1], c), size, stride, padding), 0


class _Means(torch.autograd.Function):
    """Means over windows; their gradient is a copy to every pixel, channels last as the products want it."""

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
        share = (grad / (kh * kw)).permute(0, 2, 3, 1)[:, :, None, :, None]
        spread = share.expand(n, oh, kh, ow, kw, c).reshape(n, oh * kh, ow * kw, c)
        return spread.permute(0, 3, 1, 2), None


# -- the same without columns ------------------------------------------------------------------------------------------


class _Fused(torch.autograd.Function):
    """The convolution; its gradients fetch the patches again."""

    @staticmethod
    def forward(x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
        many = None if bias is None else bias[None]
        return _kernels(x).forward(x[None], kernel[None], many, stride, padding)[0]  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, kernel, bias, ctx.stride, ctx.padding = inputs
        ctx.bias = bias is not None
        ctx.size, ctx.kernel_size = tuple(x.shape[-2:]), tuple(kernel.shape[-2:])
        ctx.save_for_backward(x, kernel)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        x, kernel = ctx.saved_tensors
        need_x, need_kernel, need_bias = ctx.needs_input_grad[:3]
        by_x = by_kernel = by_bias = None
        if need_x:
            by_x = _FusedInputGradient.apply(grad, kernel, ctx.size, ctx.stride, ctx.padding)  # type: ignore[no-untyped-call]
        if need_kernel or need_bias:
            by_kernel, by_bias = _FusedKernelGradient.apply(  # type: ignore[no-untyped-call]
                grad, x, ctx.kernel_size, ctx.stride, ctx.padding, ctx.bias
            )
        return by_x, by_kernel, by_bias if ctx.bias else None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
    ) -> tuple:
        c = info.batch_size
        x = batch_dim_first(x, in_dims[0], c)
        if in_dims[1] is None and in_dims[2] is None:  # one kernel for everybody: one long product
            return _part(_Fused.forward(x.flatten(0, 1), kernel, bias, stride, padding), c), 0
        many = None if bias is None else batch_dim_first(bias, in_dims[2], c)
        return _kernels(x).forward(x, batch_dim_first(kernel, in_dims[1], c), many, stride, padding), 0


class _FusedKernelGradient(torch.autograd.Function):
    """The gradients by the kernel and by the bias; an empty one where there is no bias."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, size: Pair, stride: Pair, padding: Pair, bias: bool) -> tuple[Tensor, Tensor]:
        by_kernel, by_bias = _kernels(x).kernel_gradient(grad[None], x[None], size, stride, padding, bias)
        return by_kernel[0], by_bias[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, grad: Tensor, x: Tensor, size: Pair, stride: Pair, padding: Pair, bias: bool
    ) -> tuple:
        c = info.batch_size
        grad, x = batch_dim_first(grad, in_dims[0], c), batch_dim_first(x, in_dims[1], c)
        return _kernels(x).kernel_gradient(grad, x, size, stride, padding, bias), (0, 0)


class _FusedInputGradient(torch.autograd.Function):
    """The gradient by the pictures."""

    @staticmethod
    def forward(grad: Tensor, kernel: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
        return _kernels(grad).input_gradient(grad[None], kernel[None], size, stride, padding)[0]  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple, grad: Tensor, kernel: Tensor, size: Pair, stride: Pair, padding: Pair) -> tuple:
        c = info.batch_size
        grad = batch_dim_first(grad, in_dims[0], c)
        if in_dims[1] is None:
            return _part(_FusedInputGradient.forward(grad.flatten(0, 1), kernel, size, stride, padding), c), 0
        return _kernels(grad).input_gradient(grad, batch_dim_first(kernel, in_dims[1], c), size, stride, padding), 0
