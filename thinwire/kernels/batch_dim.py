"""The client axis in vmap rules of custom autograd functions."""

from __future__ import annotations

from torch import Tensor


def batch_dim_first(value: Tensor, dim: int | None, clients: int) -> Tensor:
    """Move the client axis to the front, or expand a tensor that has none.

    >>> import torch
    >>> batch_dim_first(torch.zeros(2, 3), 1, 3).shape, batch_dim_first(torch.zeros(2), None, 3).shape
    (torch.Size([3, 2]), torch.Size([3, 2]))
    """
    return value.expand(clients, *value.shape) if dim is None else value.movedim(dim, 0)


def split_clients(value: Tensor, clients: int) -> Tensor:
    """Split the first axis into equal parts, one per client. The inverse of `flatten(0, 1)`."""
    return value.unflatten(0, (clients, -1))  # type: ignore[no-untyped-call, no-any-return]
