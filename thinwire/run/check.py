"""What an experiment would cost, without training: numbers to train, bytes a round, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.codecs import message as wire
from thinwire.core.spec import Spec
from thinwire.core.tree import restrict
from thinwire.engines.local import LocalEngine
from thinwire.engines.simulation import Simulation
from thinwire.rounds.batches import plan_batches
from thinwire.rounds.down import open_round
from thinwire.rounds.protocol import begin, plan_round
from thinwire.rounds.secure import secure_size
from thinwire.run.build import build_job
from thinwire.run.config import Experiment
from thinwire.schedules.base import Plan


def check(experiment: Experiment, data_dir: Path | None = None) -> dict[str, Any]:
    """Build everything, train nothing. Raises what a run would raise.

    The bytes are those of messages that are made for the purpose, with zeros in them; what returning clients must
    catch up comes on top. They are of a round in which every block speaks that ever does. Where the length of a message
    depends on its contents, they are None.
    """
    engine = LocalEngine("cpu", experiment.engine.vectorise, experiment.engine.chunk)
    job = build_job(experiment, data_dir)
    simulation = engine.prepare(job)
    contract, method = simulation.contract, job.method
    state = simulation.start()
    plan_round(contract, state.server)  # refuses what cannot be
    plan = Plan(contract.sendable.named)
    planned = Spec.of(restrict(simulation.public.coords, plan.names))
    code = method.sketch.spec(planned)
    sizes = job.task.clients.sizes()
    steps = [plan_batches([int(n)], [simulation.key], job.local).rows.shape[1] for n in np.unique(sizes)]
    up, down = _message_sizes(simulation, plan)
    cohort = min(job.cohort, len(simulation.asked))
    unknown = "lengths depend on contents: a short run (--rounds 3) measures them"
    copies = 4 * contract.weights.nbytes  # weights, gradient, their change, optimiser
    return {
        "method": experiment.name,
        "task": experiment.task.kind,
        "clients": len(job.task.clients),
        "cohort": cohort,
        "examples_per_client": {"min": int(sizes.min()), "mean": float(sizes.mean()), "max": int(sizes.max())},
        "steps_per_round": {"min": min(steps), "max": max(steps)},
        "parameters": simulation.model.parameters(),
        "trainable": contract.coords.size,
        **({"tiers": _tiers(simulation)} if method.budget.tiers else {}),
        "numbers_sent_up": code.size,
        "bytes_up_per_client": up,
        "bytes_down_per_client": down,
        "bytes_per_round": None if up is None or down is None else cohort * (up + down),
        "memory_estimate": copies * (min(cohort, engine.chunk or cohort)),
        "note": " ".join(filter(None, (job.task.note, unknown if up is None or down is None else ""))),
    }


def _message_sizes(simulation: Simulation, plan: Plan) -> tuple[int | None, int | None]:
    """The lengths of a client's message, and of the server's to a client that missed nothing but the last version.

    Where clients have different budgets, means over all clients.
    """
    contract, method = simulation.contract, simulation.job.method
    tiers = [contract.tier(client) for client in range(len(simulation.job.task.clients))]
    state = begin(contract, simulation.public)
    code = method.sketch.spec(contract.coords.restrict(plan.names))
    buffers = {wire.BUFFERS: bytes(contract.buffers.nbytes)} if contract.buffers.blocks else {}
    ups, down = [], None
    for codec in method.ups:
        if (size := codec.size(code)) is None:
            break
        lanes = {wire.COORDS: bytes(secure_size(size) if method.secure else size), **buffers}
        lanes |= {wire.WEIGHT: bytes(4)} if method.weigh.sent and not method.secure else {}
        lanes |= {wire.SHARED: bytes(contract.report.nbytes)} if contract.report.blocks else {}
        if noted := method.schedule.report(contract.coords.restrict(plan.names).shapes(), plan):
            lanes[wire.REPORT] = bytes(Spec.of(noted).nbytes)
        body = wire.pack_body(wire.Body(plan.names, lanes), contract.schema)
        ups.append(len(wire.pack(wire.UP, 0, [body], contract.schema)))
    up = _mean(ups, tiers) if len(ups) == len(method.ups) else None
    if method.link == "snapshot":
        one_of_each = [tiers.index(tier) for tier in sorted(set(tiers))]
        made = open_round(contract, state, dict.fromkeys(one_of_each, 0))
        down = _mean({tiers[client]: len(data) for client, data in made.items()}, tiers)
    elif (size := method.down.size(code)) is not None:
        shared = {wire.SHARED: bytes(contract.shared.nbytes)} if contract.shared.blocks else {}
        guard = {wire.GUARD: bytes(4)} if method.guard else {}
        entry = wire.pack_body(wire.Body(plan.names, {wire.COORDS: bytes(size)}), contract.schema)
        ask = wire.pack_body(wire.Body(plan.names, {**buffers, **shared, **guard}), contract.schema)
        down = len(wire.pack(wire.STEPS, 1, [entry, ask], contract.schema, 1))
    return up, down


def _mean(sizes: Sequence[int] | Mapping[int, int], tiers: Sequence[int]) -> int:
    """The mean length, to the next byte, over clients of these tiers."""
    return -(-sum(sizes[tier] for tier in tiers) // len(tiers))


def _tiers(simulation: Simulation) -> dict[str, int]:
    """How many clients each tier has."""
    tiers = [simulation.contract.tier(client) for client in range(len(simulation.job.task.clients))]
    return {f"tier {i}": tiers.count(i) for i in range(len(simulation.job.method.budget.tiers))}
