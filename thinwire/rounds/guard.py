"""Whether a client's public state still is the server's, in four bytes.

Replayed on another device, a state differs by rounding; after a fault or a mistake, by more. A hash cannot tell one
from the other: however coarsely numbers are rounded first, some lie at the border of two steps. So what travels is one
random inner product, and the client compares with a tolerance:

    g(x) = sum_i s_i x_i,    s_i = +-1, drawn anew for every version;    apart if |g(server) - g(mine)| > 1e-4 ||mine||

where x is all that a replay makes: the coordinates, and the base where the space merges into it. For a difference d the
left side is about ||d|| times a normal number. Rounding (1e-6 and less) never reaches the tolerance; a difference of a
thousandth of the length of x is found in nine messages of ten, and as the signs are new each time, what one message
misses the next one finds. Shared memory and buffers are sent whole and cannot come apart.

>>> import torch
>>> x, key = {"w": torch.linspace(-1, 1, 10_000)}, Key(1)
>>> one, length = project(x, key)
>>> other, _ = project({"w": x["w"] * 1.001}, key)
>>> abs(one - other) > TOLERANCE * length, abs(one - project({"w": x["w"] * (1 + 1e-7)}, key)[0]) < TOLERANCE * length
(True, True)
"""

from __future__ import annotations

import math

import torch

from thinwire.codecs.bits import Bytes
from thinwire.core.rng import Key
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree, to_device
from thinwire.errors import Drifted
from thinwire.rounds.lanes import raw, unraw
from thinwire.rounds.state import Contract, Public

TOLERANCE = 1e-4
_NUMBER = Spec.of({"guard": torch.zeros(())})
_WIDE = 4096
_FEW = 1 << 17  # numbers that are fetched from a GPU sooner than it is told what to do with them


def pack_guard(contract: Contract, public: Public) -> Bytes:
    """What a message down says of the state that it leads to."""
    value, _ = project(_replayed(contract, public), contract.key.fold("guard", public.version))
    return raw({"guard": torch.tensor(value)})


def check_guard(contract: Contract, public: Public, data: Bytes) -> None:
    """Raise Drifted if the state that a client arrived at is not the one that the message speaks of."""
    theirs = float(unraw(data, _NUMBER)["guard"])
    mine, length = project(_replayed(contract, public), contract.key.fold("guard", public.version))
    if not abs(theirs - mine) <= TOLERANCE * length:  # a NaN on either side is a difference
        raise Drifted(
            f"the public state of version {public.version} is not the server's: its guard is {mine:.6g}, expected "
            f"{theirs:.6g} to within {TOLERANCE * length:.2g}; ask for the whole state"
        )


def project(tree: Tree, key: Key) -> tuple[float, float]:
    """The sum of all numbers, each with a random sign, and their length.

    The blocks are one vector, cut into rows; its signs are products of those of a row and of a column, so that few are
    drawn, and a device has a handful of kernels to run, not some for each block.
    """
    size = sum(block.numel() for block in tree.values())
    if size <= _FEW:
        tree = to_device(tree, "cpu")
    blocks = [block.reshape(-1).to(torch.float32) for block in tree.values()]
    flat = torch.cat([*blocks, blocks[0].new_zeros(-size % _WIDE)])
    signs = key.signs(_WIDE + len(flat) // _WIDE).to(flat.device)
    sums = flat.view(-1, _WIDE) @ signs[:_WIDE]
    total, square = torch.stack((sums.double() @ signs[_WIDE:].double(), flat.dot(flat).double())).tolist()
    return total, math.sqrt(square)


def _replayed(contract: Contract, public: Public) -> Tree:
    """What a client computes for itself on its way to a version, and could get wrong."""
    base = public.base if contract.method.space.fresh_every else {}
    return {**{f"base/{name}": block for name, block in base.items()}, **public.coords}
