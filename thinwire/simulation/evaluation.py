"""Evaluation in a simulation: the global model on the test set, and each client's model on its own examples."""

from __future__ import annotations

import statistics

from thinwire.protocol.client import drop_stale
from thinwire.runtime.federation import Federation, with_client_accuracies
from thinwire.runtime.job import RoundRecord, RunState
from thinwire.training.evaluation import Evaluation


def evaluated(federation: Federation, state: RunState, record: RoundRecord) -> RoundRecord:
    """The record of a round with the evaluation of its result."""
    record = federation.evaluated(state.server.public, record)
    if not (found := client_evaluations(federation, state)):
        return record
    record = record._replace(client_loss=statistics.fmean(one.loss for one in found))
    return with_client_accuracies(record, [one.accuracy for one in found if one.accuracy is not None])


def client_evaluations(federation: Federation, state: RunState) -> list[Evaluation]:
    """Loss and accuracy of each client's model on its own validation examples, of all clients that have some."""
    tests, server = federation.job.task.client_tests, state.server
    found = []
    for i in range(len(tests)) if tests is not None else ():
        own = state.clients.get(i)
        if own is not None:
            own = drop_stale(own, server.ledger.synced_since(own.version))
        one = federation.client_evaluation(server.public, own, i)
        if one is not None:
            found.append(one)
    return found
