"""How often each layer was synchronized, and its bytes: a table for summaries (`layer_chart.py` draws it).

Bytes are known where the upload codec encodes block by block, and None where it encodes all blocks together.
"""

from __future__ import annotations

from typing import Any

from thinwire.core.spec import Block, Spec, layer_of
from thinwire.protocol.sync_counts import SyncCounts

Layers = list[dict[str, Any]]


def layers_of(coords: Spec, sync_counts: SyncCounts) -> Layers:
    """One row for each layer in the order of the model; blocks of a layer with different counts have one row each.

    >>> import torch
    >>> spec = Spec.of({"fc.weight": torch.zeros(2, 2), "fc.bias": torch.zeros(2)})
    >>> layers_of(spec, SyncCounts({"fc.weight": 3, "fc.bias": 3}, {"fc.weight": 48, "fc.bias": 24}))
    [{'layer': 'fc', 'numbers': 6, 'syncs': 3, 'bytes_up': 72}]
    >>> [row["layer"] for row in layers_of(spec, SyncCounts({"fc.weight": 3, "fc.bias": 9}, None))]
    ['fc.weight', 'fc.bias']
    """
    modules: dict[str, list[Block]] = {}
    for block in coords:
        modules.setdefault(layer_of(block.name), []).append(block)
    rows = []
    for module, blocks in modules.items():
        equal = len({sync_counts.syncs.get(block.name, 0) for block in blocks}) == 1
        for name, own in [(module, blocks)] if equal else [(block.name, [block]) for block in blocks]:
            known = sync_counts.bytes_up
            rows.append(
                {
                    "layer": name,
                    "numbers": sum(block.numel for block in own),
                    "syncs": sync_counts.syncs.get(own[0].name, 0),
                    "bytes_up": None if known is None else sum(known.get(block.name, 0) for block in own),
                }
            )
    return rows
