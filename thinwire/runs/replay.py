"""`thinwire check --replay`: simulate a deployed run with its recorded cohorts, and compare the weights bit for bit.

A deployment accepts uploads of some of the clients that it asked. Batches, bases and initial weights depend on the seed
alone, so a simulation whose cohorts are the accepted clients gives the same weights, on machines of one kind and with
the data of all clients. They differ if a client sent something else than its method says, lost a state that its method
needs (error feedback, SCAFFOLD), or computes on another kind of machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file

from thinwire.core.tree import to_device
from thinwire.errors import CheckpointError, ConfigError
from thinwire.federation.simulation import make_simulation
from thinwire.runs.build import build_job
from thinwire.runs.deployment_records import COHORTS, CohortLog, RoundCohort
from thinwire.runs.execute import settled
from thinwire.runs.run_directory import RunFolder


class Replay(NamedTuple):
    """The comparison of a deployed run with its simulation.

    Args:
        rounds: the number of rounds.
        uploads: the number of accepted uploads in all rounds.
        differ: names of the blocks that are not equal bit for bit; empty if the runs are identical.
        largest: the largest difference of two values.
        first: the first evaluated round whose loss on the test set differs; None if there is none.
    """

    rounds: int
    uploads: int
    differ: tuple[str, ...]
    largest: float = 0.0
    first: int | None = None

    @property
    def identical(self) -> bool:
        """Whether all weights are equal bit for bit."""
        return not self.differ


def replay(path: Path, data_dir: Path | None = None) -> Replay:
    """Simulate a finished deployment with the clients that it accepted.

    Args:
        path: its run directory; nothing is written there.
        data_dir: the folder of datasets.
    """
    folder = RunFolder.open(path)
    experiment, records = folder.experiment, folder.history()
    if folder.summary() is None:
        raise CheckpointError(f"{path} is not finished; replay it when it is")
    if not (path / COHORTS).is_file():
        raise CheckpointError(f"{path} has no {COHORTS}: it was simulated")
    if experiment.method.privacy.active:
        raise ConfigError("the noise of a deployment is drawn from a secret key of each round; replay needs sigma = 0")
    known, asynchronous = CohortLog(path).rounds, experiment.method.asynchronous.active
    for number in range(1, len(records) + 1):
        one = known.get(number, RoundCohort((), ()))
        if not one.accepted or (asynchronous and (len(one.based) != len(one.accepted) or max(one.based) >= number)):
            what = "the versions of the accepted clients" if one.accepted else "the accepted clients"
            raise CheckpointError(f"{path / COHORTS} lacks {what} of round {number}")
    job = settled(experiment, data_dir)[1] if experiment.fingerprint else build_job(experiment, data_dir)
    simulation = make_simulation(experiment.engine, job)
    accepted = {number: one.accepted or () for number, one in known.items()}
    if asynchronous:
        simulation.arrivals = {n: dict(zip(accepted[n], one.based, strict=True)) for n, one in known.items()}
    else:
        simulation.recorded = accepted
    state, first = simulation.start(), None
    for record in records:
        state, again = simulation.round(state)
        first = record.round if first is None and record.test_loss != again.test_loss else first
    final, buffers = simulation.final(state)
    weights, deployed = to_device({**final, **buffers}, "cpu"), load_file(path / "model.safetensors")
    differ = [name for name, one in deployed.items() if name not in weights or not one.equal(weights[name])]
    pairs = [(deployed[name], weights[name]) for name in differ if name in weights]
    largest = max((float((a.double() - b.double()).abs().max()) for a, b in pairs if a.shape == b.shape), default=0.0)
    return Replay(len(records), sum(map(len, accepted.values())), tuple(differ), largest, first)
