"""What kernels share: whether Triton runs, the client axis in vmap rules, the precision of products.

Triton is part of the CUDA builds of torch. It is optional: all operations have an implementation without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=16)
def has_triton(device: torch.device) -> bool:
    """Whether a minimal kernel runs on this device; checked once per process and device.

    >>> has_triton(torch.device("cpu"))
    False
    """
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from thinwire.kernels.sums_triton import run_one

        with ThreadPoolExecutor(1) as pool:  # in another thread: the caller may be inside vmap, where values are traced
            return pool.submit(run_one, device).result()
    except Exception:  # triton, or the C compiler that it needs, is not installed
        return False


def batch_dim_first(value: Tensor, dim: int | None, clients: int) -> Tensor:
    """Move the client axis to the front, or expand a tensor that has none.

    >>> batch_dim_first(torch.zeros(2, 3), 1, 3).shape, batch_dim_first(torch.zeros(2), None, 3).shape
    (torch.Size([3, 2]), torch.Size([3, 2]))
    """
    return value.expand(clients, *value.shape) if dim is None else value.movedim(dim, 0)


def batch_dims_first(args: Sequence[Any], dims: Sequence[Any], clients: int) -> list[Any]:
    """`batch_dim_first` of all tensors among some arguments."""
    pairs = zip(args, dims, strict=True)
    return [batch_dim_first(one, dim, clients) if isinstance(one, Tensor) else one for one, dim in pairs]


def for_one(kernel: Callable[..., Any], *args: Any) -> Any:
    """Call a function of many clients, on the first axis of its tensors, for one client."""
    out = kernel(*(one[None] if isinstance(one, Tensor) else one for one in args))
    return out[0] if isinstance(out, Tensor) else tuple(block[0] for block in out)


def for_many(kernel: Callable[..., Any], info: Any, in_dims: tuple, args: Sequence[Any]) -> tuple[Any, Any]:
    """The rule for vmap of a function of many clients: its results, and their client axes."""
    out = kernel(*batch_dims_first(args, in_dims, info.batch_size))
    return out, 0 if isinstance(out, Tensor) else (0,) * len(out)


def derivative(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one client under autograd and vmap, from one of many clients; it has no derivative."""

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return for_one(kernel, *args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
            return

        @staticmethod
        def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[Any, Any]:
            return for_many(kernel, info, in_dims, args)

    return Derivative.apply


def split_clients(value: Tensor, clients: int) -> Tensor:
    """Split the first axis into equal parts, one per client. The inverse of `flatten(0, 1)`."""
    return value.unflatten(0, (clients, -1))  # type: ignore[no-untyped-call]


# float32 on tensor cores: each factor is split into two of 11 bits, and three of the four products are computed. This
# is as accurate as float32 up to the last two bits, and several times faster than without tensor cores.
EXACT = "tf32x3"


def dot_precision(kind: torch.dtype) -> str:
    """The `input_precision` of `tl.dot` for factors of this type, by torch's setting for float32.

    >>> dot_precision(torch.bfloat16)
    'tf32'
    """
    allowed = torch.backends.cuda.matmul.fp32_precision  # type: ignore[attr-defined]
    return "tf32" if allowed == "tf32" or kind == torch.bfloat16 else EXACT
