"""Values to tables: an experiment or a method as plain values, for files and digests. The inverse of `load.py`."""

from __future__ import annotations

import hashlib
from typing import Any

from thinwire.core.registry import SLOTS
from thinwire.errors import ConfigError
from thinwire.experiments.experiment import SECTIONS, TOP, Experiment
from thinwire.experiments.parts import describe, plain
from thinwire.experiments.toml import Table, dumps
from thinwire.masks import NoMask
from thinwire.protocol.method import Method

_NOT_IN_DIGEST = ("accounting", "import")  # neither changes a run


def digest(table: Table) -> str:
    """A short hash of a resolved configuration; two runs with one digest are equal."""
    kept = {key: value for key, value in table.items() if key not in _NOT_IN_DIGEST}
    return hashlib.sha256(dumps(kept).encode()).hexdigest()[:12]


def to_table(experiment: Experiment) -> Table:
    """The whole experiment as plain values, every default included."""
    task = experiment.task
    sections = {key: plain(getattr(experiment, key)) for key in SECTIONS}
    if not experiment.engine.workers:
        del sections["engine"]["workers"]  # rarely set; without it, digests of older experiments stay the same
    return {
        **{key: getattr(experiment, key) for key in TOP},
        **({"import": list(experiment.imports)} if experiment.imports else {}),
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
        "method": method_table(experiment.method),
    }


def method_table(method: Method, strict: bool = True) -> Table:
    """A method as plain values.

    Args:
        method: the method.
        strict: whether a part that is not registered is an error; otherwise its `repr` is its kind.
    """

    def part_table(kind: str, part: Any) -> Table:
        try:
            return describe(kind, part)
        except ConfigError:
            if strict:
                raise
            return {"kind": repr(part)}

    slots = {slot: part_table(kind, getattr(method, slot)) for slot, kind in SLOTS.items()}
    if isinstance(method.mask, NoMask):
        del slots["mask"]  # rarely set; without it, digests of older experiments stay the same
    rare = {"budget": plain(method.budget)} if method.budget.tiers else {}
    rare |= {"secure_aggregation": True} if method.secure_aggregation else {}
    rare |= {"next_stage": plain(method.next_stage)} if method.next_stage else {}
    rare |= {"evaluate": method.evaluate} if method.evaluate != "server" else {}
    return {**slots, "download": method.download, "upload": method.upload, "drift_check": method.drift_check, **rare}
