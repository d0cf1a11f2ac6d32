"""Evaluation at the sites, for a server without test data: after a round, clients evaluate its model on their examples.

Every client that is there is asked, not the cohort alone; after a quorum, the server waits `grace` seconds. A request
is the download that takes the client to the new version; the client evaluates that model on its validation examples,
keeps nothing, and sends numbers. The downloads count as catch-up.

    a number that is not finite, an accuracy outside 0 to 1, a metric that the job does not have    refused
    examples                                    at most 1,000 times the median client's count in means
    losses                                      at most `method.norm_bound` times the median client's in means
    a metric that is not finite                 left out: it is not defined for this client
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from thinwire.core.text import visible
from thinwire.errors import WireError
from thinwire.federation.evaluation import with_client_evaluations
from thinwire.federation.federation import Federation
from thinwire.federation.job import RoundRecord, RunState
from thinwire.flower.collect import Collector
from thinwire.flower.transport import Deadline
from thinwire.protocol.bounds import WEIGHT_LIMIT, factors
from thinwire.protocol.round import EVALUATE, Request, Response, Round
from thinwire.protocol.upload import MAX_EXAMPLES
from thinwire.training.evaluation import Evaluation


def evaluated_at_sites(
    federation: Federation, collector: Collector, state: RunState, record: RoundRecord
) -> RoundRecord:
    """The record of a round with the evaluations of the clients that are there, if the round is evaluated at sites.

    It is where there is no test set, and clients hold examples out. Not with secure aggregation: the server must learn
    no number of a single client.

    Args:
        federation: the job.
        collector: brings requests to clients; has the policy and the log.
        state: the state after the round.
        record: the record of the round.
    """
    task, job, policy = federation.job.task, federation.job, collector.policy
    at_sites = task.test is None and task.client_tests is not None and not job.method.secure_aggregation
    if not at_sites or not federation.is_evaluated(record.round):
        return record
    here = sorted(collector.idle() & set(federation.eligible))
    versions = {i: state.clients[i].version if i in state.clients else -1 for i in here}
    following = Round.open(federation.contract, state.server)
    down = following.downloads({i: max(0, version) for i, version in versions.items()})
    requests = {i: Request(down[i], version, EVALUATE) for i, version in versions.items()}
    found: dict[int, Evaluation] = {}
    deadline, name = Deadline(policy.seconds), collector.transport.name
    for client, response in collector.ask_idle(requests, deadline) if requests else ():
        if client in found:
            continue
        try:
            found[client] = checked(response, job.all_metrics)
        except WireError as error:
            collector.log(f"round {record.round}: no evaluation of {name(client)}: {error}")
        if policy.grace is not None and len(found) >= policy.needed(len(requests)):
            deadline.at_most(policy.grace)
    if not found:
        collector.log(f"round {record.round}: no client evaluated the model")
    named = {name(client): _as_numbers(one) for client, one in sorted(found.items())}
    record = in_record(record, found, job.method.norm_bound)
    return record._replace(sites_eval=named, bytes_catchup=record.bytes_catchup + sum(map(len, down.values())))


def checked(response: Response, metrics: Collection[str]) -> Evaluation:
    """The evaluation in a response; raises if one of its numbers is not valid.

    Args:
        response: the response, not trusted.
        metrics: the names of the metrics of the job.

    >>> checked(Response(b"", evaluation=Evaluation(0.5, 1.5, {}, 10)), ())
    Traceback (most recent call last):
    thinwire.errors.WireError: its accuracy is 1.5, expected a number from 0 to 1
    """
    found = response.evaluation
    if response.error or found is None:
        raise WireError(visible(response.error, 300) or "it has no validation examples")
    if not math.isfinite(found.loss) or not 0 < found.examples <= MAX_EXAMPLES:
        raise WireError(f"its loss is {found.loss} over {found.examples} examples")
    if found.accuracy is not None and not 0 <= found.accuracy <= 1:
        raise WireError(f"its accuracy is {found.accuracy}, expected a number from 0 to 1")
    if unknown := found.metrics.keys() - set(metrics):
        raise WireError(f"it sends {len(unknown)} metrics that the run does not have")
    return found._replace(metrics={name: x for name, x in found.metrics.items() if math.isfinite(x)})


def in_record(record: RoundRecord, found: Mapping[int, Evaluation], limit: float) -> RoundRecord:
    """The record with means and quantiles over clients; examples and losses far above the median are bounded.

    Args:
        record: the record of the round.
        found: the evaluation of each client.
        limit: the largest loss in units of the median; 0 for no bound.
    """
    if not found:
        return record
    ordered = [found[client] for client in sorted(found)]
    by_loss = factors([abs(one.loss) for one in ordered], limit) if limit else [1.0] * len(ordered)
    counts = [float(one.examples) for one in ordered]
    weights = [n * by for n, by in zip(counts, factors(counts, WEIGHT_LIMIT), strict=True)]
    bounded = [one._replace(loss=one.loss * by) for one, by in zip(ordered, by_loss, strict=True)]
    return with_client_evaluations(record, bounded, weights)


def _as_numbers(found: Evaluation) -> dict[str, float]:
    """An evaluation as the values of `RoundRecord.sites_eval`."""
    accuracy = {} if found.accuracy is None else {"accuracy": found.accuracy}
    return {"examples": found.examples, "loss": found.loss, **accuracy, **found.metrics}
