"""One client's change as whole numbers: steps of a lattice, no longer than a bound, which is checked in whole numbers.

Noise in whole numbers hides what is a whole number. So changes are clipped and rounded to a lattice, one by one, before
they are added up; then one client moves the sum by no more than the length that was checked:

    z = round(c x / step)   with c = 1, or less:   |z|^2 = sum_j z_j^2 <= most^2

There is no norm of rounded numbers to be bounded apart, and nothing depends on the order of a floating-point sum.

>>> x = torch.tensor([3.0, -4.0])
>>> onto_lattice(x, 2.0, 100).tolist(), onto_lattice(x, 200.0, 100).tolist()
([6, -8], [60, -80])
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LONGEST = 1 << 30  # the largest bound: squares of numbers twice as long still fit into int64


def onto_lattice(x: Tensor, steps: float, most: int) -> Tensor:
    """The numbers x in steps of a lattice, all of them scaled down where they are longer than the bound.

    Args:
        x: a vector of finite numbers.
        steps: how many steps one is.
        most: the bound on the 2-norm of what comes out, in steps; at most 2^30.

    Returns:
        int64, of the shape of x.
    """
    assert 1 <= most <= LONGEST
    x = x.double()
    top = float(x.abs().max()) if x.numel() else 0.0
    factor = min(steps, most / top) if top else steps  # if one number alone is longer, all are shortened at once
    while (square := squared_length(z := torch.round(x * factor).long())) > most * most:
        factor *= most / math.sqrt(square) * (1 - 2.0**-40)
    return z


def squared_length(z: Tensor) -> int:
    """sum_j z_j^2 of whole numbers up to 2^31 in size, exactly.

    >>> squared_length(torch.tensor([1 << 31] * 8)) == 8 << 62
    True
    """
    squares = z * z
    return (int((squares >> 32).sum()) << 32) + int((squares & 0xFFFFFFFF).sum())


def length(x: Tensor) -> float:
    """The 2-norm of a vector, the same on every machine: numbers are rounded to 2^-30 of the largest and added exactly.

    >>> length(torch.tensor([3.0 * 2**100, 4.0 * 2**100])) == 5 * 2**100
    True
    """
    x = x.double()
    top = float(x.abs().max()) if x.numel() else 0.0
    if not top:
        return 0.0
    shift = min(30 - math.frexp(top)[1], 1000)
    return math.ldexp(math.sqrt(squared_length(torch.round(x * math.ldexp(1.0, shift)).long())), -shift)
