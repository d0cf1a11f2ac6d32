"""An experiment as one value, and as one file.

    defaults  <-  task preset  <-  method presets (`mapo+int8`: see `plus`)  <-  file  <-  command line

A file names the methods that it builds on by `method = "mapo+int8"`, or by `kind` in `[method]`, whose other keys then
come on top.

The resolved experiment is written to the run directory; reading that file gives an equal experiment.

>>> experiment = resolve("fedavg", on="digits", overrides={"rounds": 3})
>>> experiment.rounds, from_table(to_table(experiment)) == experiment
(3, True)
"""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from thinwire.core.registry import lookup
from thinwire.core.text import unfit_for_a_name, visible
from thinwire.data.partitions.base import Partition
from thinwire.errors import ConfigError, UnknownName
from thinwire.experiments.combine import join
from thinwire.experiments.combine import named as named_methods
from thinwire.experiments.parts import arguments, build, coerce, describe, named, plain
from thinwire.experiments.presets import layer, preset
from thinwire.experiments.records import Accounting
from thinwire.experiments.toml import Table, dumps, parse_value, read_toml
from thinwire.masks import NoMask
from thinwire.protocol.budget import Budget
from thinwire.protocol.method import Method
from thinwire.protocol.stage import Stage
from thinwire.simulation.engine import LocalEngine
from thinwire.training.batches import Local

DEFAULT_TASK = "digits"
LONGEST_NAME = 120  # bytes: the name of a run directory begins with it
MOST_ROUNDS = 10**9

Scale = Literal["unit", "standard"]
Augment = Literal["none", "shift-flip"]

# The slots of a method that hold parts, and the kind of part that each holds.
SLOTS = {
    "space": "space",
    "sketch": "sketch",
    "schedule": "schedule",
    "up": "codec",
    "down": "codec",
    "merge_codec": "codec",
    "client_weight": "client_weight",
    "aggregator": "aggregator",
    "client_opt": "optimizer",
    "server_opt": "optimizer",
    "lr_schedule": "lr_schedule",
    "server_lr_schedule": "lr_schedule",
    "correction": "correction",
    "penalty": "penalty",
    "privacy": "privacy",
    "mask": "mask",
}


@dataclass(frozen=True)
class ModelChoice:
    """A registered model and the options to build it with."""

    kind: str
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class TaskChoice:
    """Which data, cut into how many clients by which split, learnt by which model.

    `validation_fraction` is the share of each client's own examples on which its own model is tested (0 for none), `participating_clients` how many
    of the clients take part (0 for all): the data of the others is not used. For pictures, `scale` is `unit` (from 0 to
    1) or `standard` (mean 0 and deviation 1 over the training pictures, channel by channel), and `augment` is `none` or
    `shift-flip` (each time a picture is trained on, it is moved by up to 4 pixels and mirrored at random). `options`
    are what the loader of the data takes besides, such as the `checkpoint` of `text-classification`.
    """

    kind: str
    clients: int
    partition: Partition
    model: ModelChoice
    validation_fraction: float = 0.0
    participating_clients: int = 0
    scale: Scale = "unit"
    augment: Augment = "none"
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name, given, known in (("scale", self.scale, Scale), ("augment", self.augment, Augment)):
            if given not in get_args(known):
                raise ConfigError(f"task.{name} must be one of {', '.join(get_args(known))}, not {given!r}")
        if self.clients < 0:
            raise ConfigError(f"task.clients must be 1 or more, not {self.clients}")
        if not 0 <= self.participating_clients <= self.clients:
            raise ConfigError(
                f"task.participating_clients must be 0 (all) or at most the {self.clients} clients, not {self.participating_clients}"
            )


@dataclass(frozen=True)
class Cohort:
    """How many clients take part in a round."""

    size: int = 10


@dataclass(frozen=True)
class Evaluation:
    """How many rounds lie between two evaluations, and an accuracy at which a run ends before its last round."""

    every: int = 1
    target_accuracy: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.target_accuracy <= 1:
            raise ConfigError(
                f"eval.target_accuracy must be an accuracy above 0 and at most 1, not {self.target_accuracy}; write 0.8"
            )


@dataclass(frozen=True)
class Checkpointing:
    """How many rounds lie between two checkpoints."""

    every: int = 10

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"checkpoint.every must be 1 or more, not {self.every}")


@dataclass(frozen=True)
class Experiment:
    """Everything that decides the numbers of a run; `name` is what tables call its method.

    `accounting` says which bytes count in the total: all that were sent (`honest`), or, as in many papers, not those
    with which returning clients catch up (`ideal`). It changes no run, only how one is summed up.
    """

    name: str
    task: TaskChoice
    method: Method = field(default_factory=Method)
    cohort: Cohort = field(default_factory=Cohort)
    local: Local = field(default_factory=Local)
    engine: LocalEngine = field(default_factory=LocalEngine)
    eval: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    seed: int = 0
    rounds: int = 10
    accounting: Accounting = "honest"

    def __post_init__(self) -> None:
        if self.accounting not in get_args(Accounting):
            raise ConfigError(f"accounting must be one of {', '.join(get_args(Accounting))}, not {self.accounting!r}")
        if why := unfit_for_a_name(self.name, LONGEST_NAME):
            raise ConfigError(f"name {visible(repr(self.name), 80)} cannot be used: {why}; write a name such as my-run")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed must be from 0 to 2**64 - 1, not {self.seed}")
        if self.rounds > MOST_ROUNDS:
            raise ConfigError(f"rounds must be at most {MOST_ROUNDS:,}, not {self.rounds:,}")

    def digest(self) -> str:
        """A short name of the configuration: two experiments with one digest are the same run."""
        return digest(to_table(self))


def digest(table: Table) -> str:
    """A short name of a resolved configuration; how bytes are added up is no part of it."""
    kept = {key: value for key, value in table.items() if key != "accounting"}
    return hashlib.sha256(dumps(kept).encode()).hexdigest()[:12]


_SECTIONS: dict[str, Any] = {
    "cohort": Cohort,
    "local": Local,
    "engine": LocalEngine,
    "eval": Evaluation,
    "checkpoint": Checkpointing,
}
_TOP = ("name", "seed", "rounds", "accounting")


def resolve(what: str, on: str | None = None, overrides: Table | None = None) -> Experiment:
    """The experiment that a method's name, or a file, and some overrides describe.

    Args:
        what: the name of a method preset, several joined by `+`, or the path of an experiment file ending in `.toml`.
        on: the name of a task preset; with a file, it replaces the file's task.
        overrides: values by dotted path, for example `{"method.client_opt.lr": 0.05}`.
    """
    own: Table = {}
    methods, name = what, what
    if what.endswith(".toml"):
        path = Path(what)
        if not path.is_file():
            raise ConfigError(f"no such experiment file: {what}")
        own, name = read_toml(path), path.stem
        methods, own = _builds_on(own)
    elif not what:
        raise ConfigError("the name of the method is empty; write for example fedavg")
    task = on if on is not None else coerce(_section(own, "task").get("kind", DEFAULT_TASK), str, "task.kind")
    if on is not None:
        own = {key: value for key, value in own.items() if key != "task"}
    tuned = _section(_section(own, "on"), task, "on.")  # what the file wants to be different on this task
    own = {key: value for key, value in own.items() if key != "on"}
    table = preset("tasks", task).table
    for above in (join(named_methods(methods), task) if methods else {}, own, tuned):
        table = layer(table, above)
    table.setdefault("name", name.replace(" ", ""))
    experiment = from_table(table)
    if overrides:
        table = to_table(experiment)  # with every default written out, so that any key can be set
        for key, value in overrides.items():
            put(table, key, value)
        experiment = from_table(table)
    return experiment


def _builds_on(table: Table) -> tuple[str, Table]:
    """The methods that a file builds on ("" for none), and the file without their names."""
    section = table.get("method", {})
    section = {"kind": section} if isinstance(section, str) else _section(table, "method")
    methods = coerce(section.get("kind", ""), str, "method.kind")
    return methods, {**table, "method": {key: value for key, value in section.items() if key != "kind"}}


def put(table: Table, path: str, value: Any) -> None:
    """Set a value by its dotted path; a part that was only named becomes a table.

    >>> table = {"method": {"client_opt": "sgd"}}
    >>> put(table, "method.client_opt.lr", 0.5); table
    {'method': {'client_opt': {'kind': 'sgd', 'lr': 0.5}}}
    """
    *parents, last = path.split(".")
    here = table
    for key in parents:
        below = here.get(key)
        if isinstance(below, str):
            below = {"kind": below}
        here[key] = dict(below) if isinstance(below, dict) else {}
        here = here[key]
    if last == "kind" and here.get("kind") != value:
        here.clear()  # options of one kind mean nothing to another
    here[last] = value


def parse_overrides(words: list[str]) -> Table:
    """`key=value` words of a command line as overrides.

    >>> parse_overrides(["rounds=5", "engine.device=cuda"])
    {'rounds': 5, 'engine.device': 'cuda'}
    """
    out = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not key:
            raise ConfigError(f"--set takes key=value, for example --set method.client_opt.lr=0.05, not {word!r}")
        out[key] = parse_value(value)
    return out


def from_table(table: Table) -> Experiment:
    """An experiment from the contents of a file; every key is checked."""
    known = [*_TOP, "task", "method", *_SECTIONS]
    for key in table:
        if key not in known:
            raise UnknownName("key", key, known)
    parts: Table = {key: table[key] for key in _TOP if key in table}
    for key, make in _SECTIONS.items():
        parts[key] = make(**arguments(make, _section(table, key), key))
    return Experiment(
        **arguments(Experiment, parts, "the experiment"),
        task=_task(_section(table, "task")),
        method=method_from(_section(table, "method")),
    )


def method_from(table: Table) -> Method:
    """A method from its table."""
    plain_types: dict[str, Any] = {
        "download": str,
        "upload": str,
        "drift_check": bool,
        "budget": Budget,
        "evaluate": str,
    }
    plain_types |= {"secure_aggregation": bool, "next_stage": Stage}
    known = [*SLOTS, *plain_types]
    given: Table = {}
    for key, value in table.items():
        if key not in known:
            raise UnknownName("key in method", key, known)
        where = f"method.{key}"
        given[key] = build(SLOTS[key], value, where) if key in SLOTS else coerce(value, plain_types[key], where)
    return Method(**given)


def to_table(experiment: Experiment) -> Table:
    """The whole experiment as plain values, every default written out."""
    task, method = experiment.task, experiment.method
    sections = {key: plain(getattr(experiment, key)) for key in _SECTIONS}
    if not experiment.engine.workers:
        del sections["engine"]["workers"]  # seldom set, and experiments from before it keep their names
    return {
        **{key: getattr(experiment, key) for key in _TOP},
        "task": {
            "kind": task.kind,
            "clients": task.clients,
            "partition": describe("partition", task.partition),
            "model": {"kind": task.model.kind, **dict(task.model.options)},
            "validation_fraction": task.validation_fraction,
            "participating_clients": task.participating_clients,
            "scale": task.scale,
            "augment": task.augment,
            **dict(task.options),
        },
        **sections,
        "method": method_table(method),
    }


def method_table(method: Method, strict: bool = True) -> Table:
    """A method as plain values; unless strict, a part that is not registered is written as Python shows it."""

    def written(kind: str, part: Any) -> Table:
        try:
            return describe(kind, part)
        except ConfigError:
            if strict:
                raise
            return {"kind": repr(part)}

    slots = {slot: written(kind, getattr(method, slot)) for slot, kind in SLOTS.items()}
    if isinstance(method.mask, NoMask):
        del slots["mask"]  # seldom set, and experiments from before it keep their names
    rare = {"budget": plain(method.budget)} if method.budget.tiers else {}
    rare |= {"secure_aggregation": True} if method.secure_aggregation else {}
    rare |= {"next_stage": plain(method.next_stage)} if method.next_stage else {}
    rare |= {"evaluate": method.evaluate} if method.evaluate != "server" else {}
    return {**slots, "download": method.download, "upload": method.upload, "drift_check": method.drift_check, **rare}


def _task(table: Table) -> TaskChoice:
    known = [
        "kind",
        "clients",
        "partition",
        "model",
        "validation_fraction",
        "participating_clients",
        "scale",
        "augment",
    ]
    kind = coerce(table.get("kind", DEFAULT_TASK), str, "task.kind")
    load = lookup("task", kind).make
    own = [name for name in inspect.signature(load).parameters if name != "data_dir"]
    for key in table:
        if key not in (*known, *own):
            raise UnknownName("key in task", key, (*known, *own))
    loading = arguments(load, {key: table[key] for key in own if key in table}, "task")
    for key in known[1:4]:
        if key not in table:
            raise ConfigError(f"task.{key} is missing; `thinwire show fedavg` prints a complete experiment")
    model, options = named(table["model"], "task.model")
    checked = arguments(lookup("model", model).make, options, "task.model")
    return TaskChoice(
        kind,
        coerce(table["clients"], int, "task.clients"),
        build("partition", table["partition"], "task.partition"),
        ModelChoice(model, tuple(checked.items())),
        coerce(table.get("validation_fraction", 0.0), float, "task.validation_fraction"),
        coerce(table.get("participating_clients", 0), int, "task.participating_clients"),
        coerce(table.get("scale", "unit"), str, "task.scale"),
        coerce(table.get("augment", "none"), str, "task.augment"),
        tuple(loading.items()),
    )


def _section(table: Table, key: str, under: str = "") -> Table:
    section = table.get(key, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{under}{key} must be a table, [{under}{key}], not {section!r}")
    return section
