"""The axis of clients first: what the rules under vmap of our own operations have in common."""

from __future__ import annotations

from torch import Tensor


def batch_dim_first(value: Tensor, dim: int | None, clients: int) -> Tensor:
    """With the client axis first; repeated where there is none.

    >>> import torch
    >>> batch_dim_first(torch.zeros(2, 3), 1, 3).shape, batch_dim_first(torch.zeros(2), None, 3).shape
    (torch.Size([3, 2]), torch.Size([3, 2]))
    """
    return value.expand(clients, *value.shape) if dim is None else value.movedim(dim, 0)
