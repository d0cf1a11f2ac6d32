"""Evaluation in a simulation: the global model on the test set, and each client's model on its own examples."""

from __future__ import annotations

from thinwire.protocol.client import drop_stale
from thinwire.runtime.federation import Federation, with_client_accuracies
from thinwire.runtime.job import RoundRecord, RunState


def evaluated(federation: Federation, state: RunState, record: RoundRecord) -> tuple[RunState, RoundRecord]:
    """The state of a round with its averaged model, and its record with the evaluation, where they are asked for."""
    state = federation.with_average(state)
    if not federation.is_evaluated(record.round):
        return state, record
    record = federation.evaluated(state, record)
    return state, with_client_accuracies(record, client_accuracies(federation, state))


def client_accuracies(federation: Federation, state: RunState) -> list[float]:
    """The accuracy of each client's model on its own validation examples, of all clients that have some.

    With `evaluate = "average"` it is the averaged model, except for clients whose model is not the public one: where
    the method has private blocks, and where the client has changes that it has not sent.
    """
    public, tests = state.server.public, federation.job.task.client_tests
    private = federation.contract.at(public.version).private
    average = federation.final(state) if federation.averages and not private else None
    values = []
    for i in range(len(tests)) if tests is not None else ():
        own = state.clients.get(i)
        if own is not None:
            own = drop_stale(own, state.server.ledger.synced_since(own.version))
        value = federation.client_accuracy(public, own, i, average)
        if value is not None:
            values.append(value)
    return values
