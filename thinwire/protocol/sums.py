"""Sums of entries: what a client missed, as one vector, where steps add up without rounding.

Steps that are multiples of a power of two (`Lattice`, `OnLattice`) add up exactly in floating point, as long as the
coordinates are multiples of a power of two themselves and not too large for it. Then

    coords(now) = coords(v) + sum of the entries since v

holds bit for bit, in any order: a client that replays every entry and one that adds the sum have the same state. The
sum is one vector of small integers, which `LatticeSum` encodes in fewer bytes than the entries take together.

Nothing relies on the codec: the server checks each step (`adds_up`), and the ledger remembers since which version all
of them were exact (`Ledger.adds_since`). Sums never go further back.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.core.tree import Tree, bring, tmap
from thinwire.errors import WireError
from thinwire.protocol.contract import EVERYONE, Contract
from thinwire.protocol.entries import ServerStep, read_step
from thinwire.protocol.fields import expect_fields, planned_names
from thinwire.protocol.ledger import Ledger
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes

KEPT = 4  # entries are kept up to this multiple of the coordinates: sums are shorter than they are
_CPU = torch.device("cpu")
_MANTISSA = {torch.float32: 24, torch.float64: 53}
_SPARE = 4  # bits by which coordinates can grow beyond the largest one of their block at the start


def on_grid(coords: Tree) -> Tree:
    """Initial coordinates as multiples of a power of two, so that steps on a lattice are added to them exactly.

    The power of two of a block is 2^-20 times that above its largest value (float32): its values can grow sixteenfold.
    Blocks of short types are not rounded; their steps are not exact either.

    >>> on_grid({"w": torch.tensor([0.1, 1.0])})["w"].tolist()
    [0.10000038146972656, 1.0]
    """
    return tmap(_rounded, coords)


def _rounded(block: Tensor) -> Tensor:
    largest = float(block.abs().max()) if block.numel() else 0.0
    if block.dtype not in _MANTISSA or not 0 < largest < math.inf:
        return block
    grid = math.ldexp(1.0, max(-1000, math.frexp(largest)[1] + _SPARE - _MANTISSA[block.dtype]))
    return (torch.round(block.double() / grid) * grid).to(block.dtype)


def adds_up(before: Tree, step: Tree, after: Tree) -> bool:
    """Whether after = before + step without rounding, value by value.

    >>> one, tiny = {"w": torch.ones(1)}, {"w": torch.full((1,), 2.0**-30)}
    >>> adds_up(one, one, {"w": torch.full((1,), 2.0)}), adds_up(one, tiny, one)
    (True, False)
    """
    return all(_is_exact(before[name].double(), step[name].double(), after[name].double()) for name in step)


def _is_exact(before: Tensor, step: Tensor, after: Tensor) -> bool:
    # both differences: one alone could be rounded in float64. A negative zero would lose its sign in a sum.
    exact = (after - before == step) & (after - step == before) & ~((after == 0) & after.signbit())
    return bool(exact.all())


class Sums:
    """Sums of the newest entries of a ledger; versions in descending order decode each entry once.

    Args:
        contract: the contract.
        ledger: the ledger.
    """

    def __init__(self, contract: Contract, ledger: Ledger) -> None:
        self._contract, self._ledger = contract, ledger
        self._since, self._total = ledger.version, dict[str, Tensor]()

    def body(self, version: int) -> bytes | None:
        """The sum of the entries since that version, as it is sent; None where there is none.

        There is none where an entry is missing or was rounded, and none of a single entry or of more than 512.
        """
        ledger, missed = self._ledger, self._ledger.version - version
        if not self._contract.method.sends_sums or version < ledger.adds_since or not 1 < missed <= wire.MAX_STEPS:
            return None
        entries = ledger.since(version)
        return None if entries is None else pack_sum(self._contract, self._add(version, entries))

    def _add(self, version: int, entries: tuple[Bytes, ...]) -> ServerStep:
        """The sum, in float64, of these entries, of which the first starts at that version."""
        if version > self._since:
            self._since, self._total = self._ledger.version, {}
        for at in reversed(range(version, self._since)):
            body = wire.unpack_body(entries[at - version], self._contract.schema)
            for name, block in read_step(self._contract, body, at, _CPU).code.items():
                more = block.double()
                self._total[name] = self._total[name] + more if name in self._total else more
        self._since = version
        total = {name: self._total[name] for name in self._contract.coords.names if name in self._total}
        return ServerStep(frozenset(total), total)


def pack_sum(contract: Contract, total: ServerStep) -> bytes | None:
    """A sum of entries as it is sent, encoded by the merge codec; None if its values are too long for their type."""
    values = {block.name: total.code[block.name].to(block.dtype) for block in contract.coords.restrict(total.names)}
    if not all(torch.equal(values[name].double(), block) for name, block in total.code.items()):
        return None
    payload, _ = contract.method.merge_codec.encode(values, {}, contract.peer(0, EVERYONE))
    return wire.pack_body(wire.Body(total.names, {wire.SUM: payload}), contract.schema)


def read_sum(contract: Contract, body: wire.Body, device: torch.device) -> ServerStep:
    """A sum of entries, from a body that is not trusted."""
    if not contract.method.sends_sums:
        raise WireError("the message has a sum of entries, which is not sent with this method")
    names = planned_names(contract, body)
    expect_fields(body, {wire.SUM})
    spec = contract.coords.restrict(names)
    total = contract.method.merge_codec.decode(body.fields[wire.SUM], spec, contract.peer(0, EVERYONE))
    return ServerStep(names, bring((total,), device)[0])
