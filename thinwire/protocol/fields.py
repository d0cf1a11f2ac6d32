"""Fields of a message: trees as raw bytes, and checks of what a received body contains."""

from __future__ import annotations

from collections.abc import Set

from thinwire.codecs.base import Peer, Raw
from thinwire.core.key import Key
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.errors import WireError
from thinwire.protocol.contract import Contract
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes

_RAW = Raw()
_NO_PEER = Peer(Key(0))  # Raw uses no shared randomness


def raw(tree: Tree) -> Bytes:
    """A tree as the bytes of its values; inverse: `unraw`."""
    return _RAW.encode(tree, {}, _NO_PEER)[0]


def unraw(data: Bytes, spec: Spec) -> Tree:
    """The tree with this spec from the bytes of its values; inverse: `raw`."""
    return _RAW.decode(data, spec, _NO_PEER)


def planned_names(contract: Contract, body: wire.Body) -> frozenset[str]:
    """The blocks of a body. Raises WireError for private blocks, so that no message can read or overwrite them."""
    names = contract.coords.named if body.plan is None else body.plan
    if private := names - contract.sendable.named:
        raise WireError(f"the message contains block {min(private)!r}, which is private and never sent")
    return names


def expect_fields(body: wire.Body, expected: Set[int]) -> None:
    """Raise WireError unless a body has exactly these fields."""
    if body.fields.keys() != expected:
        raise WireError(f"the message has fields {sorted(body.fields)}, expected {sorted(expected)}")
