"""How parts that cannot work together are found and refused: probes of a method, and one sentence for each row."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from thinwire.core.tree import Tree
from thinwire.errors import IncompatibleParts
from thinwire.protocol.method import Method

PROBE: Tree = {"probe": torch.zeros(1)}


def has_state(method: Method) -> bool:
    """Whether the correction keeps a state anywhere."""
    c = method.correction
    return bool(c.init_client(PROBE) or c.init_shared(PROBE) or c.init_server(PROBE))


def refuse(sentence: str, rows: Iterable[tuple[object, object, str, str]]) -> None:
    """Raise IncompatibleParts for the first row that applies: (applies, part, why, what to write instead)."""
    for applies, part, why, instead in rows:
        if applies:
            raise IncompatibleParts(sentence.format(part=part, why=why, instead=instead))
