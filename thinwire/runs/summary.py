"""The summary of a run: totals of its records, privacy, time over slow links, and bytes by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.core.spec import Block, Spec, layer_of
from thinwire.core.tree import to_device
from thinwire.errors import Diverged
from thinwire.federation.federation import Federation
from thinwire.federation.job import RunState
from thinwire.federation.settings import Settings
from thinwire.masks import dead_adapters, nonzero_b
from thinwire.protocol.state import SyncCounts
from thinwire.protocol.upload import as_received
from thinwire.runs.collapse import Verdict, chance_of, judge, summary_of
from thinwire.runs.link_time import seconds_by_link
from thinwire.runs.records import totals
from thinwire.runs.retry import Retry
from thinwire.runs.run_directory import Summary


def summarize_run(
    settings: Settings,
    federation: Federation,
    state: RunState,
    lines: list[dict[str, Any]],
    retries: Sequence[Retry],
    error: Diverged | None = None,
) -> Summary:
    """The totals of a run.

    Args:
        settings: its settings.
        federation: what ran its rounds.
        state: the state after the rounds.
        lines: one record a round.
        retries: how often it went back; the bytes of the abandoned rounds are counted.
        error: why it ended, if it diverged; the bytes of the round that failed are counted.
    """
    chance, privacy = chance_of(federation), dict[str, Any]()
    verdict = Verdict("diverged", len(lines) + 1, str(error)) if error else judge(lines, chance)
    abandoned = sum(retry.bytes_abandoned for retry in retries) + sum(error.sent if error else ())
    if (spent := federation.epsilon(len(lines)) if lines else None) is not None:
        privacy = {"epsilon": spent[0], "delta": federation.job.method.privacy.delta}
        privacy |= {"epsilon_unknown": spent[1]} if spent[1] else {}
    sent = {block.name: block for stage in federation.contract.stages for block in stage.coords}
    return {
        "method": settings.name,
        "task": settings.task.label,
        "seed": settings.seed,
        "rounds": len(lines),
        **summary_of(verdict, chance),
        "parameters": federation.model.parameters(),
        "trainable": Spec.of(federation.first.coords).size,
        **totals(lines, settings.accounting, abandoned),
        "objective": federation.job.ranked_by.summary(lines),
        **({"retries": [retry._asdict() for retry in retries]} if retries else {}),
        **privacy,
        "seconds_by_link": seconds_by_link(lines),
        "layers": layers_of(Spec(tuple(sent.values())), state.sync_counts),
        **_adapters(federation, state),
    }


def _adapters(federation: Federation, state: RunState) -> Summary:
    """Where adapters are masked or sent in part: the share of B that is left, and the adapters that cannot change."""
    contract, public = federation.contract.at(state.server.public.version), state.server.public
    method = contract.method
    masked, sparse = method.mask.active, method.download == "full" and not method.down.exact
    if not masked and not sparse:
        return {}
    received = as_received(contract, public, method.down)
    coords = to_device(received.coords, "cpu")
    left = nonzero_b(coords)
    dead = dead_adapters(coords, contract.trained(received)) if masked else ()
    found: Summary = {} if left is None else {"nonzero_b": round(left, 4)}
    return found | ({"dead_adapters": list(dead)} if dead else {})


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
