"""Evaluation in a simulation: the global model on the test set, and each client's model on its own examples."""

from __future__ import annotations

from thinwire.protocol.client import drop_stale
from thinwire.runtime.federation import Federation, with_client_accuracies
from thinwire.runtime.job import RoundRecord, RunState


def evaluated(federation: Federation, state: RunState, record: RoundRecord) -> RoundRecord:
    """The record of a round with the evaluation of its result."""
    record = federation.evaluated(state.server.public, record)
    return with_client_accuracies(record, client_accuracies(federation, state))


def client_accuracies(federation: Federation, state: RunState) -> list[float]:
    """The accuracy of each client's model on its own validation examples, of all clients that have some."""
    tests, server = federation.job.task.client_tests, state.server
    values = []
    for i in range(len(tests)) if tests is not None else ():
        own = state.clients.get(i)
        if own is not None:
            own = drop_stale(own, server.ledger.synced_since(own.version))
        value = federation.client_accuracy(server.public, own, i)
        if value is not None:
            values.append(value)
    return values
