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

from thinwire.errors import CheckpointError, ConfigError
from thinwire.federation.job import RoundRecord
from thinwire.runs.build import build_job
from thinwire.runs.cohort_file import COHORTS, CohortLog, RoundCohort
from thinwire.runs.execute import final_model, settled
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
    known = _recorded(path, len(records), experiment.method.asynchronous.active)
    if experiment.method.privacy.active:
        raise ConfigError("the noise of a deployment is drawn from a secret key of each round; replay needs sigma = 0")
    job = settled(experiment, data_dir)[1] if experiment.fingerprint else build_job(experiment, data_dir)
    simulation = experiment.engine.prepare(job)
    if job.method.asynchronous.active:
        based = {number: zip(one.accepted or (), one.based, strict=True) for number, one in known.items()}
        simulation.federation.arrivals = {number: dict(pairs) for number, pairs in based.items()}
    else:
        simulation.federation.recorded = {number: one.accepted or () for number, one in known.items()}
    state, replayed = simulation.start(), list[RoundRecord]()
    for _ in records:
        state, record = simulation.round(state)
        replayed.append(record)
    final, buffers = final_model(simulation, state)
    weights = {**final, **buffers}
    deployed = load_file(path / "model.safetensors")
    differ = tuple(name for name, one in deployed.items() if name not in weights or not one.equal(weights[name]))
    pairs = [(deployed[name], weights[name]) for name in differ if name in weights]
    largest = max((float((a.double() - b.double()).abs().max()) for a, b in pairs if a.shape == b.shape), default=0.0)
    first = next((a.round for a, b in zip(records, replayed, strict=True) if a.test_loss != b.test_loss), None)
    uploads = sum(len(one.accepted or ()) for one in known.values())
    return Replay(len(records), uploads, differ, largest, first)


def _recorded(path: Path, rounds: int, asynchronous: bool) -> dict[int, RoundCohort]:
    """The rounds of a deployment, each with its accepted clients, and with their versions in asynchronous rounds."""
    if not (path / COHORTS).is_file():
        raise CheckpointError(f"{path} has no {COHORTS}: it was simulated")
    known = CohortLog(path).rounds
    for number in range(1, rounds + 1):
        if number not in known or not (accepted := known[number].accepted):
            raise CheckpointError(f"{path / COHORTS} lacks the accepted clients of round {number}")
        based = known[number].based
        if asynchronous and (len(based) != len(accepted) or max(based) >= number):
            raise CheckpointError(f"{path / COHORTS} lacks the versions of the accepted clients of round {number}")
    return {number: known[number] for number in range(1, rounds + 1)}
