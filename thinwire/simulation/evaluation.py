"""Evaluation in a simulation: the global model on the test set, and each client's model on its own examples."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.core.tree import add, to_device
from thinwire.protocol.client import drop_stale
from thinwire.protocol.state import ClientState, ServerState
from thinwire.runtime.federation import Federation
from thinwire.runtime.job import RoundRecord, RunState


def evaluated(federation: Federation, state: RunState, record: RoundRecord) -> RoundRecord:
    """The record of a round with the evaluation of its result."""
    test_loss, accuracy = federation.evaluate(state.server.public)
    own = client_accuracy(federation, state.server, state.clients)
    return record._replace(test_loss=test_loss, accuracy=accuracy, client_accuracy=own)


def client_accuracy(federation: Federation, server: ServerState, clients: Mapping[int, ClientState]) -> float | None:
    """The mean accuracy of the clients' models (public blocks, and their own unsent changes) on their own examples."""
    tests, public = federation.job.task.client_tests, server.public
    if tests is None:
        return None
    contract, values = federation.contract.at(public.version), []
    basis = contract.basis(public.version, federation.device)
    for i in range(len(tests)):
        coords = public.coords
        if i in clients:
            own = drop_stale(clients[i], server.ledger.synced_since(clients[i].version))
            coords = {**coords, **add(to_device(own.unsent, federation.device), coords)}
        weights = contract.method.space.evaluation_weights(public.base, basis, coords)
        _, value = federation.model.evaluate(weights, public.buffers, federation.train, tests.client(i))
        if value is not None:
            values.append(value)
    return sum(values) / len(values) if values else None
