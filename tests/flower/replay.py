"""Simulate a deployed run with the clients whose uploads it accepted, and compare the final weights bit for bit.

Batches, bases and initial weights depend on the seed alone, so this gives the weights of the deployment, unless a
client sent something else than its method says, or lost a state that its method needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file

from thinwire.core.tree import same, to_device
from thinwire.federation.buffered import BufferedClients
from thinwire.federation.federation import Collected, Federation
from thinwire.federation.job import RunState
from thinwire.federation.simulated import SimulatedClients
from thinwire.protocol.round import Round
from thinwire.runs.build import build_job
from thinwire.runs.deployment_records import CohortLog, RoundCohort
from thinwire.runs.run_directory import RunFolder


class RecordedClients(SimulatedClients):
    """Simulated clients with the accepted clients of a deployment as cohorts."""

    rounds: Mapping[int, RoundCohort]

    def cohort(self, round: Round, state: RunState) -> tuple[int, ...]:
        """The accepted clients of a round."""
        return self.rounds[state.round + 1].accepted or ()


class RecordedArrivals(BufferedClients):
    """Simulated clients whose uploads arrive in the round in which a deployment accepted them."""

    rounds: Mapping[int, RoundCohort]

    def _asked(self, round: Round, state: RunState) -> tuple[int, ...]:
        return tuple(sorted(self._accepted_in(round.version)))

    def arrivals(self, got: Collected) -> dict[int, float]:
        """The number of the round in which each upload was accepted."""
        return self._accepted_in(got.round.version)

    def _accepted_in(self, version: int) -> dict[int, float]:
        """The round in which the uploads that were trained from a version were accepted, by client."""
        pairs = {n: zip(one.accepted or (), one.based, strict=True) for n, one in self.rounds.items()}
        return {client: float(n) for n, some in pairs.items() for client, base in some if base == version}


def replay(path: Path) -> bool:
    """Whether a simulation with the recorded cohorts of a finished deployment has its final weights, bit for bit."""
    folder, rounds = RunFolder.open(path), CohortLog(path).rounds
    job = build_job(folder.experiment)
    kind = RecordedArrivals if job.method.asynchronous.active else RecordedClients

    def clients(federation: Federation) -> SimulatedClients:
        made = kind(federation)
        made.rounds = rounds
        return made

    simulation = Federation(folder.experiment.engine, job, clients)
    state = simulation.start()
    for _ in range(job.rounds):
        state, _ = simulation.round(state)
    weights, buffers = simulation.final(state)
    deployed, made = load_file(path / "model.safetensors"), to_device({**weights, **buffers}, "cpu")
    return same({name: deployed[name] for name in made}, made)
