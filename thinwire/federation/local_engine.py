"""The simulation engine: one machine is the server and all clients."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.federation.buffered import BufferedClients
from thinwire.federation.engine import EngineSettings
from thinwire.federation.federation import Clients, Federation
from thinwire.federation.job import Job
from thinwire.federation.pipeline import PipelinedClients
from thinwire.federation.simulated import SimulatedClients


@dataclass(frozen=True)
class LocalEngine(EngineSettings):
    """Simulates a federation on one CPU or GPU, or through Ray on several."""

    def prepare(self, job: Job) -> Federation:
        """The simulation of a job: model and data on the device, the contract made, the model tried on one example."""
        self.check_device()
        if self.workers and job.method.asynchronous.active:
            raise ConfigError("asynchronous rounds are simulated in one process; write engine.workers = 0")
        clients: type[Clients] = SimulatedClients
        if self.workers:
            from thinwire.federation.ray_workers import RayClients

            clients = RayClients
        elif job.method.asynchronous.active:
            clients = BufferedClients
        elif self.device != "cpu" and not (job.attack or job.local.trainer):  # an attack cannot be predicted
            clients = PipelinedClients
        federation = Federation(self, job, clients)
        federation.try_model()
        return federation
