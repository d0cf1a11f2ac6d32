"""Parts of the summary of a run: privacy, what is left of adapters, and bytes by layer."""

from __future__ import annotations

from typing import Any

from thinwire.core.names import layer_of
from thinwire.core.tree import Block, Spec, to_device
from thinwire.federation.federation import Federation
from thinwire.federation.job import RunState
from thinwire.masks import nonzero_b
from thinwire.protocol.state import SyncCounts
from thinwire.protocol.upload import as_received
from thinwire.runs.run_directory import Summary

NEIGHBORS = "one client has other data (replace-one); cohorts of a fixed size, drawn without replacement"


def privacy_of(federation: Federation, rounds: int) -> Summary:
    """The privacy that some rounds have spent; empty without differential privacy."""
    if not rounds or (spent := federation.epsilon(rounds)) is None:
        return {}
    known = {"epsilon": spent[0], "delta": federation.job.method.privacy.delta, "neighbors": NEIGHBORS}
    return {**known, "epsilon_unknown": spent[1]} if spent[1] else known


def nonzero_b_of(federation: Federation, state: RunState) -> Summary:
    """The share of the values of all B that is not zero in what clients receive, where some are masked or not sent."""
    contract, public = federation.contract.at(state.server.public.version), state.server.public
    method = contract.method
    if not method.mask.active and (method.download != "full" or method.down.exact):
        return {}
    left = nonzero_b(to_device(as_received(contract, public, method.down).coords, "cpu"))
    return {} if left is None else {"nonzero_b": round(left, 4)}


def layers_of(coords: Spec, sync_counts: SyncCounts) -> list[dict[str, Any]]:
    """How often each layer was synchronized, and its bytes, in the order of the model.

    Blocks of a layer with different counts have one row each. Bytes are None where the upload codec encodes all blocks
    together.

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
