"""Drift check: four bytes by which a client detects that its public state is not the server's.

Replayed on another device, a state differs by rounding; after a fault or a mistake, by more. A hash cannot tell one
from the other: however coarsely values are rounded first, some lie at the border of two steps. So a message carries one
random inner product, and the client compares with a tolerance:

    g(x) = sum_i s_i x_i / 2^(N+1),    s_i = +-1, new for every version
    drifted if |g(server) - g(mine)| > 1e-4 |x| / 2^(N+1)

where x is all that a replay computes (the coordinates, and the base where the space merges into it) and N is the number
of bits of its length. For a difference d the left side is about |d| times a normal number. Rounding (1e-6 and less)
never reaches the tolerance; a difference of a thousandth of |x| is found in nine messages of ten, and as the signs are
new each time, the next message finds what one message misses. Shared state and buffers are sent as values and cannot
differ.

The sum is exact, so that its bytes do not depend on the library, the threads or the instruction set:

    |x_i| < 2^E,    S = min(40, 62 - N),    q_i = round(x_i 2^(S - E)),    g = (sum_i s_i q_i) 2^(E - S - N - 1)

All q_i are integers of at most S bits (rounded half to even), rows of 4096 of them are added in float64, which is exact
below 2^53, rows in int64, which holds 2^62. The power of two keeps g finite in float32 for every finite x.

>>> import torch
>>> x, key = {"w": torch.linspace(-1, 1, 10_000)}, Key(1)
>>> one, other, near = (project({"w": x["w"] * factor}, key.signs) for factor in (1, 1.001, 1 + 1e-7))
>>> abs(one - other) > tolerance(x), abs(one - near) < tolerance(x)
(True, True)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.core.key import Key, signs_of_each
from thinwire.core.tree import Tree, flatten
from thinwire.errors import Drifted, WireError
from thinwire.protocol.contract import Contract
from thinwire.protocol.state import PublicState
from thinwire.wire.bits import Bytes

TOLERANCE = 1e-4
_WIDE = 4096
_FEW = 1 << 17  # values that are copied from a GPU faster than kernels are launched on them
_ROWS = 4096  # rows converted to float64 at a time on a GPU
_TOGETHER = 8  # versions whose signs are drawn together
_SHORT = 1 << 14  # signs of a version up to which they are
_ROWS_IN_CACHE = 64  # and on a CPU: they fit into its cache


def pack_drift_check(contract: Contract, public: PublicState) -> bytes:
    """The drift check of a download to this public state."""
    draw = partial(signs_of_version, contract.key, public.version)
    return struct.pack("<f", project(_replayed(contract, public), draw))


def check_drift(contract: Contract, public: PublicState, data: Bytes) -> None:
    """Raise Drifted if this public state does not match the drift check of a download."""
    if len(data) != 4:
        raise WireError(f"the drift check has {len(data)} bytes, expected 4")
    (theirs,), (mine,) = struct.unpack("<f", data), struct.unpack("<f", pack_drift_check(contract, public))
    most = tolerance(_replayed(contract, public))
    if not abs(theirs - mine) <= most:  # a NaN on either side is a difference
        raise Drifted(
            f"the public state of version {public.version} is not the server's: its drift check is {mine:.6g}, "
            f"expected {theirs:.6g} within {most:.2g}; request the whole state"
        )


def _replayed(contract: Contract, public: PublicState) -> Tree:
    """The tensors that a client computes itself when it replays entries."""
    if not contract.method.space.redraw_every:
        return public.coords
    return {**{f"base/{name}": block for name, block in public.base.items()}, **public.coords}


def signs_of_version(key: Key, version: int, n: int) -> Tensor:
    """The signs of a version: those of all columns, then those of all rows; not to be modified.

    Those of a few successive versions are drawn together, which takes little longer than one draw.
    """
    together = _TOGETHER if n <= _SHORT else 1
    return _signs_from(key, version - version % together, together, n)[version % together]


@lru_cache(maxsize=4)
def _signs_from(key: Key, first: int, versions: int, n: int) -> Tensor:
    """The signs of some successive versions, one row each."""
    return signs_of_each([key.fold("guard", version) for version in range(first, first + versions)], n)


def project(tree: Tree, draw: Callable[[int], Tensor]) -> float:
    """The sum of all values, each with a random sign, divided by 2^(N+1): a float32 value, the same on every machine.

    `draw` returns as many signs as it is asked for. The blocks are one vector in rows of 4096; a sign is the product of
    that of its row and that of its column.
    """
    size = sum(block.numel() for block in tree.values())
    flat = pad(flatten(tree, torch.float32), (0, -size % _WIDE))
    if size <= _FEW:
        flat = flat.cpu()
    low, high = torch.stack(torch.aminmax(flat)).tolist() if size else (0.0, 0.0)
    largest = max(high, -low)
    if not largest or not math.isfinite(largest):
        return largest
    bits = (size - 1).bit_length()
    exponent, digits = math.frexp(largest)[1], min(40, 62 - bits)
    factor, rows = math.ldexp(1.0, digits - exponent), flat.view(-1, _WIDE)
    signs = draw(_WIDE + len(rows)).to(flat.device)
    columns, total = signs[:_WIDE].double(), torch.zeros((), dtype=torch.int64, device=flat.device)
    at_once = _ROWS_IN_CACHE if flat.device.type == "cpu" else _ROWS
    for part, its_signs in zip(torch.split(rows, at_once), torch.split(signs[_WIDE:], at_once), strict=True):
        whole = part.double().mul_(factor).round_()  # integers, whose sums are exact
        total += ((whole @ columns).long() * its_signs.long()).sum()
    return float(np.float32(math.ldexp(float(total.item()), exponent - digits - bits - 1)))


def tolerance(tree: Tree) -> float:
    """The largest difference that counts as rounding: 1e-4 of the norm of all values, divided by 2^(N+1)."""
    size = sum(block.numel() for block in tree.values())
    square = math.fsum(torch.linalg.vector_norm(block, dtype=torch.float64).item() ** 2 for block in tree.values())
    return math.ldexp(TOLERANCE * math.sqrt(square), -(size - 1).bit_length() - 1)
