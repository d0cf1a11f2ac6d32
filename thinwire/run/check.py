"""What an experiment would cost, without training: numbers to train, bytes a round, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from thinwire.core.spec import Spec
from thinwire.core.tree import restrict
from thinwire.engines.local import LocalEngine
from thinwire.rounds.batches import plan_batches
from thinwire.rounds.down import open_round
from thinwire.rounds.protocol import plan_round
from thinwire.run.build import build_job
from thinwire.run.config import Experiment


def check(experiment: Experiment, data_dir: Path | None = None) -> dict[str, Any]:
    """Build everything, train nothing. Raises what a run would raise.

    The bytes are those of messages that are made for the purpose. Where the length of a message depends on its
    contents, they are None.
    """
    engine = LocalEngine("cpu", experiment.engine.vectorise, experiment.engine.chunk)
    job = build_job(experiment, data_dir)
    simulation = engine.prepare(job)
    contract, method = simulation.contract, job.method
    state = simulation.start()
    plan = plan_round(contract, state.server)
    planned = Spec.of(restrict(simulation.public.coords, plan.names))
    code = method.sketch.spec(planned)
    sizes = job.task.clients.sizes()
    steps = [plan_batches([int(n)], [simulation.key], job.local).rows.shape[1] for n in np.unique(sizes)]
    copies = 4 * contract.weights.nbytes  # weights, gradient, their change, optimiser
    return {
        "method": experiment.name,
        "task": experiment.task.kind,
        "clients": len(job.task.clients),
        "cohort": job.cohort,
        "examples_per_client": {"min": int(sizes.min()), "mean": float(sizes.mean()), "max": int(sizes.max())},
        "steps_per_round": {"min": min(steps), "max": max(steps)},
        "parameters": simulation.model.parameters(),
        "trainable": contract.coords.size,
        "numbers_sent_up": code.size,
        "payload_up": method.up.size(code),
        "payload_down": method.down.size(code) if method.link == "ledger" else method.down.size(contract.coords),
        "message_without_news": len(open_round(contract, state.server, {0: 0})[0]),
        "memory_estimate": copies * (min(job.cohort, engine.chunk or job.cohort)),
        "note": job.task.note,
    }
