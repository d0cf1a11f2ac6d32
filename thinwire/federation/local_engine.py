"""The simulation engine: one machine is the server and all clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.federation.asynchronous import AsynchronousSimulation
from thinwire.federation.engine import EngineSettings
from thinwire.federation.federation import OnMessage
from thinwire.federation.job import Job, RoundRecord
from thinwire.federation.simulation import Simulation


@dataclass(frozen=True)
class LocalEngine(EngineSettings):
    """Simulates a federation on one CPU or GPU, or through Ray on several."""

    def prepare(self, job: Job) -> Simulation:
        """The simulation of a job: model and data on the device, the contract made, the model tried on one example."""
        self.check_device()
        if self.workers and job.method.asynchronous.active:
            raise ConfigError("asynchronous rounds are simulated in one process; write engine.workers = 0")
        if self.workers:
            from thinwire.federation.ray_workers import RaySimulation

            simulation: Simulation = RaySimulation(self, job)
        elif job.method.asynchronous.active:
            simulation = AsynchronousSimulation(self, job)
        else:
            simulation = Simulation(self, job)
        simulation.federation.try_model()
        return simulation

    def run(self, job: Job, on_message: OnMessage | None = None) -> Iterator[RoundRecord]:
        """Run all rounds, one record each.

        Args:
            job: what to run.
            on_message: is called with every message, as it would be sent.
        """
        simulation = self.prepare(job)
        state = simulation.start()
        for _ in range(job.rounds):
            state, record = simulation.round(state, on_message)
            yield record
