"""What a call from Python asks for, as experiments: a method by name, by file or as a value, a task, and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.experiments.experiment import Experiment, to_table
from thinwire.experiments.load import from_table
from thinwire.experiments.overrides import put
from thinwire.experiments.resolve import resolve
from thinwire.experiments.toml import Table
from thinwire.protocol.method import Method

Make = Callable[[Table], Experiment]  # the experiment with further settings by dotted path


def maker(
    method: str | Method,
    on: Any = None,
    *,
    name: str = "",
    recipe: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    **options: Any,
) -> Make:
    """The experiments of a method on a task, as a function of further settings.

    Args:
        method: names joined by `+`, the path of an experiment file, or a Method, which is used as it is.
        on: the name of a task, a reference, a Task, or a function of a seed that returns one.
        name: the label in tables; by default that of the method or file, `method` for a Method.
        recipe: the name of a recipe, for a method by name or file.
        overrides: settings by dotted path.
        **options: `rounds`, `clients`, `cohort`, `device`, as on the command line; None leaves one as it is.

    >>> maker("mapo", "digits", rounds=5)({"method.space.k": 64}).method.space.k
    64
    """
    task = task_of(on)
    paths = {"rounds": "rounds", "clients": "task.clients", "cohort": "cohort.size", "device": "engine.device"}
    given = {paths[key]: value for key, value in options.items() if value is not None}
    base = {**given, **dict(overrides or {}), **({"name": name} if name else {})}
    if isinstance(method, Method):
        return lambda changes: _with_method(method, task, {"name": "method", **base, **changes})
    if not isinstance(method, str):
        raise ConfigError(
            f"method must be the name of a method, a file (.toml) or a Method, not {type(method).__name__}; "
            "write for example 'mapo'"
        )
    return lambda changes: resolve(method, task, {**base, **changes}, recipe)


def _with_method(method: Method, task: str | None, settings: Table) -> Experiment:
    """An experiment with a method as it is, and settings on top."""
    table = to_table(replace(resolve("fedavg", task), method=method))
    for key, value in settings.items():
        put(table, key, value)
    return from_table(table)


def task_of(on: Any) -> str | None:
    """The name of a task; a Task or a function gets one for this process (`own_task.py`)."""
    if on is None or isinstance(on, str):
        return on
    if isinstance(on, Path):
        return str(on)
    from thinwire.experiments.own_task import task_name

    return str(task_name(on))
