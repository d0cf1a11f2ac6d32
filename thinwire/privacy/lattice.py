"""Clip and round an update to integers (lattice points) whose 2-norm is checked in integer arithmetic.

Integer noise needs integer values. Each update is clipped and rounded to a lattice before the sum, so that the
sensitivity of the sum is the norm that was checked:

    z = round(c x / step)   with c <= 1 such that   |z|^2 = sum_j z_j^2 <= most^2

The bound holds after rounding, and does not depend on the order of a floating-point sum.

>>> x = torch.tensor([3.0, -4.0])
>>> onto_lattice(x, 2.0, 100).tolist(), onto_lattice(x, 200.0, 100).tolist()
([6, -8], [60, -80])
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LONGEST = 1 << 30  # the largest bound: squares of twice this value still fit into int64


def onto_lattice(x: Tensor, steps: float, most: int) -> Tensor:
    """Round a vector to a lattice, scaled down if its norm exceeds the bound.

    Args:
        x: a vector of finite values.
        steps: lattice steps per unit of x.
        most: the bound on the 2-norm of the result, in steps; at most 2^30.

    Returns:
        int64, of the shape of x.
    """
    assert 1 <= most <= LONGEST
    x = x.double()
    top = float(x.abs().max()) if x.numel() else 0.0
    factor = min(steps, most / top) if top else steps  # a value above the bound: scale down in one step
    while (square := squared_length(z := torch.round(x * factor).long())) > most * most:
        factor *= most / math.sqrt(square) * (1 - 2.0**-40)
    return z


def squared_length(z: Tensor) -> int:
    """The exact sum_j z_j^2 of integers up to 2^31 in magnitude.

    >>> squared_length(torch.tensor([1 << 31] * 8)) == 8 << 62
    True
    """
    squares = z * z
    return (int((squares >> 32).sum()) << 32) + int((squares & 0xFFFFFFFF).sum())


def length(x: Tensor) -> float:
    """The 2-norm of a vector, the same on all platforms: values are rounded to 2^-30 of the largest and summed exactly.

    >>> length(torch.tensor([3.0 * 2**100, 4.0 * 2**100])) == 5 * 2**100
    True
    """
    x = x.double()
    top = float(x.abs().max()) if x.numel() else 0.0
    if not top:
        return 0.0
    shift = min(30 - math.frexp(top)[1], 1000)
    return math.ldexp(math.sqrt(squared_length(torch.round(x * math.ldexp(1.0, shift)).long())), -shift)
