"""The cost of an experiment before it is run: trainable parameters, bytes of real messages, memory of one client.

A client takes one step of local training, and its upload is encoded; a few do where lengths depend on values. With
these uploads the first round is closed, and the download of the next version is encoded. The bytes of all rounds are
those of the real cohorts, with such an upload and this ledger entry in every round: exact where lengths do not depend
on values, and an upper bound under FedLAMA, whose layers may wait.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.tree import restrict
from thinwire.federation.engine import Engine
from thinwire.federation.federation import Federation
from thinwire.federation.job import Job
from thinwire.federation.settings import Settings
from thinwire.federation.simulated import GroupTask, SimulatedClients
from thinwire.federation.simulation import make_simulation
from thinwire.protocol.client import Group, initial_client_state
from thinwire.protocol.contract import Contract
from thinwire.protocol.download import pack_snapshot
from thinwire.protocol.ledger import Ledger
from thinwire.protocol.receive import switch_stage
from thinwire.protocol.round import Reply, Round
from thinwire.protocol.server import append_entry
from thinwire.protocol.setup import initial_server_state
from thinwire.protocol.state import ClientState, PublicState, ServerState
from thinwire.runs.build import build_job
from thinwire.runs.probe import CLIENT_RATE, with_rate
from thinwire.schedules.base import Plan
from thinwire.secure.masks import sum_masked
from thinwire.wire.bits import Bytes

ROBUST = "method.aggregator.kind=multi-krum"  # measured in docs/safe-rounds.md
TRAINED = 10  # clients of the first cohort that take a step


class Traffic(NamedTuple):
    """Bytes of one stage of a method: of a client, and of all rounds."""

    up_per_client: int
    down_per_client: int
    up: int
    down: int
    catchup: int


def check(experiment: Settings, data_dir: Path | None = None, job: Job | None = None) -> dict[str, Any]:
    """The cost of the experiment, or of a job of it that was made. Raises the errors that a run would raise.

    Bytes of a client are means over all clients, in a round that synchronizes all blocks, without catch-up; for a
    method with two stages, in the first. Memory is that of this process, before and while one client trains one step on
    the CPU; None where the system does not tell (Linux does).
    """
    backend = experiment.engine.backend
    engine = Engine("cpu", "loop" if backend in ("auto", "graph") else backend)
    experiment, job = with_rate(experiment, job or build_job(experiment, data_dir))
    simulation = make_simulation(engine, job)
    contract, public = simulation.contract, simulation.first
    Round.open(contract, simulation.start().server)  # raises if the method cannot run
    cohort = min(job.cohort, len(simulation.eligible))
    with suppress(OSError):  # let the peak of this process begin again, where the system can
        Path("/proc/self/clear_refs").write_text("5")
    before, first = _resident("VmRSS"), simulation.sampler.cohort(0)[0]
    message = _upload(simulation, public, first)
    peak = _resident("VmHWM")
    until = min([job.rounds, *(later.since for later in contract.stages[1:])])
    stages = [_traffic(simulation, public, until, {first: message})]
    for later in contract.stages[1:]:  # from the initial weights
        switched = switch_stage(contract.stages[0], later, public._replace(version=later.since))
        stages.append(_traffic(simulation, switched, job.rounds, {}))
    sums = {way: sum(getattr(stage, way) for stage in stages) for way in ("up", "down", "catchup")}
    notes = [job.task.note, *(stage.method.space.note(stage.weights) for stage in contract.stages)]
    if varies := any(map(_vary, contract.stages)):
        notes.append("Lengths depend on values: these are after one step; a short run (--rounds 3) measures them.")
    method = job.method
    if method.aggregator.is_weighted_mean and not (method.privacy.active or method.secure_aggregation):
        notes.append(f"If several clients may be malicious, write --set {ROBUST} (docs/attacks.md says what it costs).")
    if (goal := experiment.eval.target_accuracy) < 1:
        notes.append(f"A run that reaches {100 * goal:g} % ends before its last round.")
    return {
        "method": experiment.name,
        "task": experiment.task.label,
        "clients": len(job.task.clients),
        "cohort": cohort,
        "parameters": simulation.model.parameters(),
        "trainable": contract.coords.size,
        "bytes_up_per_client": stages[0].up_per_client,
        "bytes_down_per_client": stages[0].down_per_client,
        "bytes_per_round": cohort * (stages[0].up_per_client + stages[0].down_per_client),
        "lengths_depend_on_values": varies,
        **_rate(experiment),
        "rounds": job.rounds,
        **{f"bytes_{way}_of_all_rounds": size for way, size in sums.items()},
        "bytes_of_all_rounds": sum(sums.values()),
        "memory_before": before,
        "memory_of_a_client": None if before is None or peak is None else peak - before,
        "note": " ".join(dict.fromkeys(filter(None, notes))),
    }


def _rate(settings: Settings) -> dict[str, Any]:
    """The learning rate that was found, and the training loss after each that was tried."""
    if not settings.lr_trials:
        return {}
    return {CLIENT_RATE: settings.method.client_opt.lr, "lr_trials": {f"{lr:g}": x for lr, x in settings.lr_trials}}


def _upload(simulation: Federation, public: PublicState, client: int) -> Bytes:
    """The upload of a client after one step of local training."""
    plan = Plan(simulation.contract.at(public.version).sendable.named)
    group = Group(public, plan, (client,), (initial_client_state(simulation.contract, public, client),))
    work = simulation.sampler.workload(public.version, (client,))
    if not simulation.job.local.trainer:
        work = work.first(1, 1)
    cohort = tuple(sorted({client, *simulation.sampler.cohort(public.version)}))
    clients = SimulatedClients(simulation)
    with simulation.compute():
        return clients.answer(GroupTask(public.version, clients.backend[0], group, cohort, work))[0].message


def _traffic(simulation: Federation, public: PublicState, until: int, known: dict[int, Bytes]) -> Traffic:
    """The bytes of the rounds from a version up to another one; `known` are uploads of this version by client."""
    contract, since, clients = simulation.contract.at(public.version), public.version, simulation.job.task.clients
    plan, tiers = Plan(contract.sendable.named), [contract.tier(client) for client in range(len(clients))]
    one_of_each = {tier: tiers.index(tier) for tier in set(tiers)}
    few = simulation.sampler.cohort(since)
    if not contract.method.secure_aggregation:  # whose masks only cancel in the sum of all
        few = few[: TRAINED if _vary(contract) else 1]
    one_of_each |= {tiers[client]: client for client in few}
    messages = {c: known.get(c) or _upload(simulation, public, c) for c in {*few, *one_of_each.values()}}
    up = [len(messages[one_of_each[tier]]) for tier in tiers]
    server = initial_server_state(contract, public)
    full, after = contract.method.download == "full", server
    if not full:
        after = _next(simulation, server, plan, {client: messages[client] for client in few})
    made = Round(contract, after, plan).downloads.messages(dict.fromkeys(one_of_each.values(), since))
    sizes = {tier: len(made[client]) for tier, client in one_of_each.items()}
    down = [sizes[tier] for tier in tiers]
    total, held = [0, 0, 0], dict[int, int]()
    for version in range(since, until):
        cohort = simulation.sampler.cohort(version)
        total[0] += sum(up[client] for client in cohort)
        if full:
            total[1] += sum(down[client] for client in cohort)
            continue
        server = server._replace(public=after.public._replace(version=version))
        downloads = Round(contract, server, plan).downloads
        ordinary, extra = downloads.split(downloads.parts({client: held.get(client, 0) for client in cohort}))
        total[1], total[2] = total[1] + ordinary, total[2] + extra
        held.update(dict.fromkeys(cohort, version))
        server = server._replace(ledger=_appended(contract, server, after, plan))
    means = (-(-sum(lengths) // len(lengths)) for lengths in (up, down))  # rounded up
    return Traffic(*means, *total)


def _next(simulation: Federation, server: ServerState, plan: Plan, messages: dict[int, Bytes]) -> ServerState:
    """The state after a round in which the cohort sends these messages, repeated if there are fewer than clients."""
    round, version = Round(simulation.contract, server, plan), server.public.version
    sent = [Reply(client, version, data, 0.0, 1, ClientState(version)) for client, data in messages.items()]
    uploads = [round.read(one) for one in sorted(sent)]
    cohort = simulation.sampler.cohort(server.public.version)
    repeated = {client: uploads[i % len(uploads)] for i, client in enumerate(cohort)}
    return round.close(repeated, len(simulation.job.task.clients), sum_masked=sum_masked).server


def _appended(contract: Contract, server: ServerState, after: ServerState, plan: Plan) -> Ledger:
    """The ledger with the newest entry of another state, and with the end of its window if the round ends one."""
    method, version, window = contract.method, server.public.version + 1, after.ledger.past[-1:]
    kept = after.ledger.entries or (window[0].entries or (window[0].end,))
    body: Bytes = kept[-1]
    end: Bytes | None = None
    if version == contract.window_end(version - 1):
        values = restrict(after.public.coords, plan.names)
        end = pack_snapshot(contract, values, version)
        if not method.merge_codec.exact:
            body = end
        elif method.space.redraw_every == 1:
            end = body
    return append_entry(contract, server.ledger, plan, body, end, adds_up=after.ledger.adds_since == 0)


def _resident(name: str) -> int | None:
    """Resident memory of this process in bytes, now (VmRSS) or at its peak (VmHWM); None where it is not known."""
    file = Path("/proc/self/status")
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), None)


def _vary(contract: Contract) -> bool:
    """Whether lengths of messages depend on their values."""
    downs = [(contract.method.down, contract.step), (contract.method.merge_codec, contract.coords)]
    if contract.method.download == "full":
        downs = [(codec, contract.sendable) for codec in contract.method.downs]
    return any(codec.size(spec) is None for codec, spec in (*downs, *((c, contract.code) for c in contract.method.ups)))
