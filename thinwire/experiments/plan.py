"""A run before it is executed: what decides its results, and what its directory is called.

`Plan.of` makes one from an experiment (command line, `tw.run_task`), `simulate.py` from a model and data of one's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinwire.core import plugins
from thinwire.errors import ConfigError
from thinwire.experiments.build import build_job
from thinwire.experiments.experiment import Checkpointing, Evaluation, Experiment, to_table
from thinwire.experiments.loop import Stop
from thinwire.experiments.records import Accounting
from thinwire.experiments.retry import check_retry
from thinwire.experiments.toml import Table
from thinwire.experiments.watchers import StopFunction
from thinwire.protocol.method import Method
from thinwire.runtime.runner import Runner
from thinwire.simulation.engine import LocalEngine


@dataclass(frozen=True, eq=False)
class Plan:
    """A run that is to be executed.

    Args:
        name: the label of its method.
        task: the label of its task.
        table: its configuration, the contents of `config.toml`.
        method: the federated method.
        engine: the simulation: device, backend, precision.
        eval: when the model is evaluated, and when the run ends early.
        checkpoint: when the state is saved, what happens when training fails, whether the best model is kept.
        rounds: number of rounds.
        prepare: reads the data and makes what runs the rounds; raises if something does not fit.
        accounting: which bytes count in totals.
    """

    name: str
    task: str
    table: Table
    method: Method
    engine: LocalEngine
    eval: Evaluation
    checkpoint: Checkpointing
    rounds: int
    prepare: Callable[[], Runner]
    accounting: Accounting = "honest"

    @classmethod
    def of(
        cls, experiment: Experiment, data_dir: Path | None = None, prepare: Callable[[], Runner] | None = None
    ) -> Plan:
        """The plan of an experiment.

        Args:
            experiment: the experiment.
            data_dir: the folder of datasets.
            prepare: makes what runs the rounds, if not the experiment's engine.
        """
        plugins.load(experiment.imports)  # in a worker process they are not imported yet
        if prepare and experiment.checkpoint.on_divergence == "retry":
            raise ConfigError("on_divergence = 'retry' is for simulations; write on_divergence = 'stop'")
        return cls(
            experiment.name,
            experiment.task.kind,
            to_table(experiment),
            experiment.method,
            experiment.engine,
            experiment.eval,
            experiment.checkpoint,
            experiment.rounds,
            prepare or (lambda: experiment.engine.prepare(build_job(experiment, data_dir))),
            experiment.accounting,
        )

    def __post_init__(self) -> None:
        if self.retries:
            check_retry(self.method, self.engine)

    @property
    def retries(self) -> bool:
        """Whether the run goes back when training fails."""
        return self.checkpoint.on_divergence == "retry"

    def stop(self, when: StopFunction | None = None) -> Stop:
        """When the run ends, with a function of the caller."""
        return Stop(self.rounds, self.eval.target_accuracy, self.eval.patience, when)
