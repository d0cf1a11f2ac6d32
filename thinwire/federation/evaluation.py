"""Evaluation in a simulation: the global model on the test set, and each client's model on its own examples."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.federation.client_evaluations import with_client_evaluations
from thinwire.federation.federation import Federation
from thinwire.federation.job import RoundRecord, RunState
from thinwire.protocol.client import drop_stale
from thinwire.training.evaluation import Evaluation


def evaluated(
    federation: Federation, state: RunState, record: RoundRecord, begun: Callable[[], Evaluation] | None = None
) -> tuple[RunState, RoundRecord]:
    """The state of a round with its averaged model, and its record with the evaluation, where they are asked for.

    Args:
        federation: model and data.
        state: the state after the round.
        record: its record.
        begun: returns the evaluation on the test set, where it was begun before.
    """
    state = federation.with_average(state)
    if not federation.is_evaluated(record.round):
        return state, record
    record = federation.evaluated(state, record, begun)
    found = client_evaluations(federation, state)
    weights = [float(one.examples) for one in found] if federation.test is None else None
    return state, with_client_evaluations(record, found, weights)


def client_evaluations(federation: Federation, state: RunState) -> list[Evaluation]:
    """Loss and accuracy of each client's model on its own validation examples, of all clients that have some.

    With `evaluate = "average"` it is the averaged model, except for clients whose model is not the public one: where
    the method has private blocks, and where the client has changes that it has not sent.
    """
    public, tests = state.server.public, federation.job.task.client_tests
    private = federation.contract.at(public.version).private
    average = federation.final(state) if federation.averages and not private else None
    found = []
    for i in range(len(tests)) if tests is not None else ():
        own = state.clients.get(i)
        if own is not None:
            own = drop_stale(own, state.server.ledger.synced_since(own.version))
        one = federation.client_evaluation(public, own, i, average)
        if one is not None:
            found.append(one)
    return found
