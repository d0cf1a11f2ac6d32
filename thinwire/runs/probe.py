"""A learning rate from short trials before the first round: `lr="auto"`.

A trial trains a few clients for a few rounds, by the method itself with a constant rate, and measures their training
loss. Rates are tried in steps of 4 from the stated one until one no longer lowers the loss, and then in between:

    lr = min(limit / 4, 2 best)     limit: the largest rate that lowers the loss
                                    best: the largest one that lowers it by 90 % of what the best one does

A smaller rate is tried where `best` is the smallest so far, and where it gains less than a tenth of the loss: so much
a network gains, too, that a large rate has left without active units. The lowest loss alone would not do: what is best
for a few steps is often too small for many. If the loss less than doubles at the stated rate, skewed labels of clients
are the reason more than the rate: the rate falls by a factor of 4 at most. Test examples are not read. The rule was
chosen on the eight tasks of `benchmarks/stranger_tasks.py`, by whole runs of FedAvg at seven rates.

Methods whose server normalizes the update (`rate_key`) keep their rates: trials so short choose worse ones for them. So
do those with differential privacy, which does not cover a rate that is chosen by looking at examples.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np

from thinwire.core.key import Key
from thinwire.data.partition import Assignment, offsets_of
from thinwire.errors import Diverged
from thinwire.federation.federation import Federation
from thinwire.federation.job import Job, RunState
from thinwire.federation.settings import Settings
from thinwire.federation.simulated import SimulatedClients
from thinwire.federation.simulation import make_simulation
from thinwire.protocol.method import Method
from thinwire.runs.config import to_table, update
from thinwire.training.evaluation import evaluate

TRIALS = 8  # at most
NEARLY = 0.1  # share of the best rate's gain that a larger rate may miss: so much is noise of a trial
DEAD = 0.1  # share of the loss that a network gains that answers the same to every input
MEASURED = 1000  # examples on which the loss is measured, at most
CLIENTS = 8  # of a trial, at most
CLIENT_RATE = "method.client_opt.lr"


def rate_key(settings: Settings) -> str:
    """The learning rate that decides how far a round moves: the clients', or the server's where that alone does.

    Adam, Yogi and Adagrad normalize the mean update of the clients, and a sketch (EvoFed) sends ranks: there the
    clients' rate hardly changes the length of the server's step. The posterior of FedPM has no rate to search.

    >>> from thinwire.runs.config import resolve
    >>> rate_key(resolve("fedavg")), rate_key(resolve("fedavgm")), rate_key(resolve("fedadam"))
    ('method.client_opt.lr', 'method.client_opt.lr', 'method.server_opt.lr')
    """
    normalized = to_table(settings)["method"]["server_opt"]["kind"] not in ("sgd", "beta-posterior")
    return f"method.{'server' if normalized or not settings.method.sketch.is_identity else 'client'}_opt.lr"


def with_rate(settings: Settings, job: Job) -> tuple[Settings, Job]:
    """Settings and job with the rate that trials find; as they are without `auto_lr`.

    Args:
        settings: the settings.
        job: their job, whose training examples are used.
    """
    if not settings.auto_lr:
        return settings, job
    settings = replace(settings, auto_lr=False)
    # a trainer of one's own may have a rate of its own; privacy does not cover what trials learn from the examples
    if job.local.trainer or job.method.privacy.active or rate_key(settings) != CLIENT_RATE:
        return settings, job
    with warnings.catch_warnings(action="ignore"):  # the run warns
        make_simulation(settings.engine, job)  # refuses what the run would refuse, with the numbers of its clients
    stated = settings.method.client_opt.lr
    engine = replace(settings.engine, backend="loop", chunk=0)  # for few clients it is the fastest
    tried: dict[float, float] = {}  # loss by power of 2
    before = math.inf

    def lowers(power: float) -> bool:
        nonlocal before
        if power not in tried:
            job_of_trial, rounds = _small(job, 2**power)
            federation = Federation(engine, job_of_trial, SimulatedClients)
            state = federation.start()
            before = min(before, _loss(federation, state))
            tried[power] = _trained(federation, state, rounds)
        return tried[power] < before

    step = 2.0 if lowers(0.0) else -2.0
    power = step
    while len(tried) < TRIALS - 2 and lowers(power) == (step > 0):
        power += step
    limit = max((one for one, loss in tried.items() if loss < before), default=None)
    if limit is None:
        return settings, job
    for finer in (1.0, 0.5):
        limit += finer if lowers(limit + finer) else 0.0
    if tried[_best(tried, before)] > (1 - DEAD) * before:
        lowers(min(tried) - 2)
    while (best := _best(tried, before)) == min(tried) and len(tried) < TRIALS:
        lowers(best - 2)
    least = -2.0 if tried[0.0] < 2 * before else -math.inf
    lr = float(f"{stated * 2 ** max(least, min(limit - 2, best + 1)):.3g}")
    trials = tuple((float(f"{stated * 2**one:.3g}"), round(tried[one], 4)) for one in sorted(tried))
    settings = update(settings, {"method": {"client_opt": {"lr": lr}}, "lr_trials": trials})
    return settings, replace(job, method=settings.method)


def _best(tried: dict[float, float], before: float) -> float:
    """The largest of the rates that lower the loss by nearly as much as the best one."""
    least = min(tried.values())
    return max(one for one, loss in tried.items() if loss <= least + NEARLY * (before - least))


def _small(job: Job, factor: float) -> tuple[Job, int]:
    """The job of a trial with a few clients, without what needs many, at a factor of the rate; and its rounds."""
    clients = min(max(1, job.cohort // 4), CLIENTS)
    rounds = max(1, min(3, job.cohort // (2 * clients)))
    usual, task = Method(), job.task
    without = ("lr_schedule", "aggregator", "privacy", "budget", "asynchronous", "next_stage", "evaluate")
    method = job.method.replace(
        **{name: getattr(usual, name) for name in without},
        client_opt=job.method.client_opt.scaled(factor),
        secure_aggregation=False,
    )
    own = [task.clients.client(i) for i in Key(job.seed).fold("probe").choice(len(task.clients), clients)]
    some = Assignment(np.concatenate(own), offsets_of(np.array([len(one) for one in own])))
    task = replace(task, clients=some, test=None, client_tests=None, client_names=())
    small = replace(job, task=task, method=method, rounds=rounds, cohort=clients, attack=None, objective="")
    return small, rounds


def _trained(federation: Federation, state: RunState, rounds: int) -> float:
    """The training loss after some rounds; inf if it is not finite."""
    try:
        for _ in range(rounds):
            state, record = federation.round(state)
            if record.refused:
                return math.inf
    except Diverged:
        return math.inf
    loss = _loss(federation, state)
    return loss if math.isfinite(loss) else math.inf


def _loss(federation: Federation, state: RunState) -> float:
    """The training loss of the clients."""
    public, order = state.server.public, federation.job.task.clients.order
    index = order[:: -(-len(order) // MEASURED)]
    weights, buffers = federation.weights(public), dict(public.buffers)
    with federation.compute():
        return evaluate(federation.model, weights, buffers, federation.train, index).loss
