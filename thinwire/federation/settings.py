"""The settings of a run: one frozen value with everything that decides its results.

`thinwire.runs.config` makes one from presets, a file and options, and writes one as the tables of `config.toml`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from thinwire.core.reference import own_kind, task_label
from thinwire.core.text import NonNegativeInt, PositiveInt, Share, check_settings, unfit_for_a_name, visible
from thinwire.data.partition import Partition
from thinwire.errors import ConfigError
from thinwire.federation.attacks import Attack
from thinwire.federation.engine import Engine
from thinwire.federation.speed import Speed
from thinwire.protocol.method import Method
from thinwire.training.batches import Local

KEEP = 2  # checkpoints, the newest
LONGEST_NAME = 120  # bytes: the name of a run directory begins with it
MOST_ROUNDS = 10**9

Scale = Literal["unit", "standard"]
Augment = Literal["none", "shift-flip"]


@dataclass(frozen=True)
class ModelSettings:
    """A registered model, or a reference to a class or function, and the options to build it with."""

    kind: str
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class TaskSettings:
    """A dataset, its partition into clients, and the model.

    Args:
        kind: the name of the dataset, or a reference to a task (`my_task.py:task`).
        clients: number of clients; 0 for those that the task has, for one per user, or for 10.
        partition: assigns examples to clients; None for the clients of the task, for natural, or for iid.
        model: the network; None for that of the task.
        validation_fraction: fraction of each client's examples that is kept from training and used to measure the
            client accuracy; 0 for none.
        participating_clients: only the first so many clients take part, the examples of the others are not used; 0
            for all.
        scale: of images: `unit` (values from 0 to 1) or `standard` (mean 0 and standard deviation 1 over the training
            images, channel by channel, by constants of the dataset).
        augment: of images: `none` or `shift-flip` (in each training step an image is shifted by up to 4 pixels and
            mirrored at random).
        options: further arguments of the dataset's loader, such as the `checkpoint` of `text-classification`.
    """

    kind: str
    clients: NonNegativeInt = 0
    partition: Partition | None = None
    model: ModelSettings | None = None
    validation_fraction: float = 0.0
    participating_clients: NonNegativeInt = 0
    scale: Scale = "unit"
    augment: Augment = "none"
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        check_settings(self, "task.")
        if self.participating_clients > (self.clients or self.participating_clients):
            raise ConfigError(
                f"task.participating_clients must be 0 (all) or at most the {self.clients} clients, "
                f"not {self.participating_clients}"
            )

    @property
    def label(self) -> str:
        """The name for readers; of a reference or a file, without folders."""
        return task_label({"kind": self.kind, **dict(self.options)})

    @property
    def is_own(self) -> bool:
        """Whether the data or the model come from files or code of the user, so that the name does not define them."""
        named = own_kind(self.kind) or (self.model is not None and own_kind(self.model.kind))
        return named or self.label != self.kind or not self.clients


@dataclass(frozen=True)
class Cohort:
    """Number of clients that take part in a round; 0 for 10 or all, whichever is less."""

    size: int = 10


@dataclass(frozen=True)
class Evaluation:
    """When and how the model is evaluated on the test set.

    Args:
        every: rounds between two evaluations.
        target_accuracy: an accuracy at which the run ends early.
        metrics: names of metrics to compute besides loss and accuracy (`thinwire list metrics`).
        objective: what rounds and runs are ranked by: `accuracy`, `loss` or one of the metrics; "" for the task's.
        patience: the run ends early after so many evaluations without a new best one; 0 for never. With validation
            examples it is measured on these, not on the test set (`best.py`).
    """

    every: PositiveInt = 1
    target_accuracy: Share = 1.0
    metrics: tuple[str, ...] = ()
    objective: str = field(default="", metadata={"rare": True})
    patience: NonNegativeInt = field(default=0, metadata={"rare": True})

    def __post_init__(self) -> None:
        check_settings(self, "eval.")


@dataclass(frozen=True)
class Checkpointing:
    """When the state is saved.

    Args:
        every: rounds between two checkpoints; a round that ends a minute after the last one writes one, too.
        best: whether the model of the best round is kept, in `best.safetensors`.
        keep: number of checkpoints that are kept, the newest; `thinwire resume --from` goes back to one of them.
    """

    every: PositiveInt = 10
    best: bool = field(default=False, metadata={"rare": True})
    keep: Annotated[int, "[2, inf)"] = field(default=KEEP, metadata={"rare": True})  # a run goes back to the one before

    def __post_init__(self) -> None:
        check_settings(self, "checkpoint.")


@dataclass(frozen=True)
class Settings:
    """Everything that decides the results of a run.

    Args:
        name: the label of its method in tables.
        task: dataset, partition and model.
        method: the federated method.
        cohort: clients of a round.
        local: local training of a client in a round.
        engine: the simulation: device, backend, precision.
        eval: how often the model is evaluated.
        checkpoint: how often the state is saved.
        seed: the root of all randomness.
        rounds: number of rounds.
        imports: modules and files to import before the names of parts are looked up (plugins).
        fingerprint: of the data and the model of the user, when the run starts; "" before that.
        attack: what malicious clients do, in a simulation; None if there are none.
        speed: how long simulated clients take.
        auto_lr: whether the learning rate is found by trials before the first round (`runs/probe.py`).
        lr_trials: what they tried: rates, and the training loss after each.
        extended: numbers of rounds that the run had before it was given more.
    """

    name: str
    task: TaskSettings
    method: Method = field(default_factory=Method)
    cohort: Cohort = field(default_factory=Cohort)
    local: Local = field(default_factory=Local)
    engine: Engine = field(default_factory=Engine)
    eval: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    seed: int = 0
    rounds: PositiveInt = 10
    imports: tuple[str, ...] = ()
    fingerprint: str = ""
    attack: Attack | None = None
    speed: Speed = field(default_factory=Speed)
    auto_lr: bool = False
    lr_trials: tuple[tuple[float, float], ...] = ()
    extended: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_settings(self)
        if self.rounds > MOST_ROUNDS:
            raise ConfigError(f"rounds must be at most {MOST_ROUNDS:,}, not {self.rounds:,}")
        if why := unfit_for_a_name(self.name, LONGEST_NAME):
            raise ConfigError(f"name {visible(repr(self.name), 80)} cannot be used: {why}; write a name such as my-run")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed must be from 0 to 2**64 - 1, not {self.seed}")
