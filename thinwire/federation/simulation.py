"""A simulation: one machine is the server and all clients, or Ray manages several."""

from __future__ import annotations

from thinwire.errors import ConfigError
from thinwire.federation.buffered import BufferedClients
from thinwire.federation.engine import Engine
from thinwire.federation.federation import Clients, Federation
from thinwire.federation.job import Job
from thinwire.federation.ray_workers import RayClients
from thinwire.federation.simulated import SimulatedClients


def make_simulation(engine: Engine, job: Job) -> Federation:
    """The simulation of a job: model and data on the device, the contract made, the model tried on one example."""
    engine.check_device()
    if engine.workers and job.method.asynchronous.active:
        raise ConfigError("asynchronous rounds are simulated in one process; write engine.workers = 0")
    clients: type[Clients] = SimulatedClients
    if engine.workers:
        clients = RayClients
    elif job.method.asynchronous.active:
        clients = BufferedClients
    federation = Federation(engine, job, clients)
    federation.try_model()
    return federation
