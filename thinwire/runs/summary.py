"""The summary of a run: totals of its records, privacy, time over slow links, and bytes by layer.

How often each layer was synchronized, and its bytes: a table for summaries (`layer_chart.py` draws it).

Bytes are known where the upload codec encodes block by block, and None where it encodes all blocks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.core.spec import Block, Spec, layer_of
from thinwire.core.tree import to_device
from thinwire.errors import Diverged
from thinwire.federation.federation import Federation
from thinwire.federation.job import RoundRecord, RunState
from thinwire.federation.settings import Accounting
from thinwire.masks import dead_adapters, nonzero_b
from thinwire.protocol.state import SyncCounts
from thinwire.protocol.upload import as_received
from thinwire.runs.collapse import Verdict, chance_of, judge, summary_of
from thinwire.runs.link_time import seconds_by_link
from thinwire.runs.records import byte_totals, totals
from thinwire.runs.retry import Retry
from thinwire.runs.run_directory import Summary


def summarize_run(
    name: str,
    task: str,
    accounting: Accounting,
    simulation: Federation,
    state: RunState,
    records: Sequence[RoundRecord],
    retries: Sequence[Retry],
) -> Summary:
    """The totals of a run.

    Args:
        name: the label of its method.
        task: the label of its task.
        accounting: which bytes count in the total.
        simulation: the job on its device.
        state: the state after the rounds.
        records: one record a round.
        retries: how often it went back; the bytes of the abandoned rounds are counted.
    """
    lines = [record._asdict() for record in records]
    all_lines = [*lines, *(line for retry in retries for line in retry.records)]
    again = {"retries": [retry.as_summary() for retry in retries]} if retries else {}
    chance, privacy = chance_of(simulation), dict[str, Any]()
    if (spent := simulation.federation.epsilon(len(records)) if records else None) is not None:
        privacy = {"epsilon": spent[0], "delta": simulation.job.method.privacy.delta}
        privacy |= {"epsilon_unknown": spent[1]} if spent[1] else {}
    sent = {block.name: block for stage in simulation.contract.stages for block in stage.coords}
    return {
        "method": name,
        "task": task,
        "seed": simulation.job.seed,
        "rounds": len(records),
        **summary_of(judge(lines, chance), chance),
        "parameters": simulation.federation.model.parameters(),
        "trainable": Spec.of(simulation.federation.first.coords).size,
        **totals(lines, accounting, sum(retry.bytes_abandoned for retry in retries)),
        "objective": simulation.job.ranked_by.summary(lines),
        "seconds": round(sum(line["seconds"] for line in all_lines), 3),
        **again,
        **privacy,
        "seconds_by_link": seconds_by_link(all_lines),
        "layers": layers_of(Spec(tuple(sent.values())), state.sync_counts),
        **_adapters(simulation, state),
    }


def diverged_summary(summary: Summary, error: Diverged) -> Summary:
    """The totals of a run that ended with an error: its status, and the bytes of the round that failed."""
    verdict = Verdict("diverged", summary["rounds"] + 1, str(error))
    sizes = (summary["bytes_up"], summary["bytes_down"], summary["bytes_catchup"])
    lost = summary["bytes_abandoned"] + sum(error.sent)
    return summary | byte_totals(*sizes, summary["accounting"], lost) | summary_of(verdict)


def _adapters(simulation: Federation, state: RunState) -> Summary:
    """Where adapters are masked or sent in part: the share of B that is left, and the adapters that cannot change."""
    contract, public = simulation.contract.at(state.server.public.version), state.server.public
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
