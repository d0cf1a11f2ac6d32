"""The summary of a run: totals of its records, privacy, time over slow links, and bytes by layer."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core.spec import Spec
from thinwire.core.tree import to_device
from thinwire.errors import Diverged
from thinwire.experiments.chance import chance_of
from thinwire.experiments.collapse import Verdict, judge, summary_of
from thinwire.experiments.layers import layers_of
from thinwire.experiments.link_time import seconds_by_link
from thinwire.experiments.records import Accounting, byte_totals, totals
from thinwire.experiments.retry import Retry
from thinwire.experiments.run_directory import Summary
from thinwire.masks import dead_adapters, nonzero_b
from thinwire.protocol.sync_counts import SyncCounts
from thinwire.protocol.upload import as_received
from thinwire.runtime.job import RoundRecord, RunState
from thinwire.runtime.runner import Runner


def summarize_run(
    name: str,
    task: str,
    accounting: Accounting,
    simulation: Runner,
    state: RunState,
    records: Sequence[RoundRecord],
    retries: Sequence[Retry],
) -> Summary:
    """The totals of a run after some rounds, with what is left of its adapters; see `summarize`."""
    totalled = summarize(name, task, simulation, records, state.sync_counts, accounting, retries)
    return {**totalled, **_adapters(simulation, state)}


def summarize(
    name: str,
    task: str,
    simulation: Runner,
    records: Sequence[RoundRecord],
    sync_counts: SyncCounts,
    accounting: Accounting = "honest",
    retries: Sequence[Retry] = (),
) -> Summary:
    """The totals of a run.

    Args:
        name: the label of its method.
        task: the label of its task.
        simulation: the job on its device.
        records: one record a round.
        sync_counts: how often each block was synchronized.
        accounting: which bytes count in the total.
        retries: how often it went back; the bytes of the abandoned rounds are counted.
    """
    lines = [record._asdict() for record in records]
    all_lines = [*lines, *(line for retry in retries for line in retry.records)]
    again = {"retries": [retry.as_summary() for retry in retries]} if retries else {}
    chance = chance_of(simulation)
    sent = {block.name: block for stage in simulation.contract.stages for block in stage.coords}
    return {
        "method": name,
        "task": task,
        "seed": simulation.job.seed,
        "rounds": len(records),
        **summary_of(judge(lines, chance), chance),
        "parameters": simulation.federation.model.parameters(),
        "trainable": Spec.of(simulation.federation.first.coords).size,
        **totals(lines, accounting, sum(retry.bytes for retry in retries)),
        "objective": simulation.job.ranked_by.summary(lines),
        "seconds": round(sum(line["seconds"] for line in all_lines), 3),
        **again,
        **_privacy(simulation, len(records)),
        "seconds_by_link": seconds_by_link(all_lines),
        "layers": layers_of(Spec(tuple(sent.values())), sync_counts),
    }


def diverged_summary(summary: Summary, error: Diverged) -> Summary:
    """The totals of a run that ended with an error: its status, and the bytes of the round that failed."""
    verdict = Verdict("diverged", summary["rounds"] + 1, str(error))
    sizes = (summary["bytes_up"], summary["bytes_down"], summary["bytes_catchup"])
    lost = summary["bytes_abandoned"] + sum(error.sent)
    return summary | byte_totals(*sizes, summary["accounting"], lost) | summary_of(verdict)


def _adapters(simulation: Runner, state: RunState) -> Summary:
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
    out: Summary = {} if left is None else {"nonzero_b": round(left, 4)}
    return {**out, **({"dead_adapters": list(dead)} if dead else {})}


def _privacy(simulation: Runner, rounds: int) -> Summary:
    """The epsilon and delta of a method with differential privacy."""
    spent = simulation.federation.epsilon(rounds) if rounds else None
    if spent is None:
        return {}
    epsilon, why = spent
    delta = getattr(simulation.job.method.privacy, "delta", None)
    return {"epsilon": epsilon, "delta": delta, **({"epsilon_unknown": why} if why else {})}
