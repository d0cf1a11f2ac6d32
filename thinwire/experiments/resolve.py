"""From a name or a file to an experiment, layer by layer; a later layer wins.

    defaults  <-  recipe  <-  task (`task_settings.py`)  <-  method presets (`mapo+int8`)  <-  file  <-  command line

A file builds on methods by `method = "mapo+int8"`, or by `kind` in `[method]`, whose other keys are then put on top.
Its `recipe = "paper"` names another recipe than the default one (`recipe.py`).

>>> resolve("fedavg", on="digits", overrides={"rounds": 3}).rounds
3
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from thinwire.errors import ConfigError
from thinwire.experiments.combine import join, named as named_methods
from thinwire.experiments.experiment import Experiment, to_table
from thinwire.experiments.load import DEFAULT_TASK, from_table, section
from thinwire.experiments.overrides import put
from thinwire.experiments.parts import coerce
from thinwire.experiments.plugins import loaded, read_imports
from thinwire.experiments.presets import layer, preset
from thinwire.experiments.recipe import DEFAULT, keep, under
from thinwire.experiments.task_files import anchored, own_kind
from thinwire.experiments.task_settings import task_settings
from thinwire.experiments.toml import Table, read_toml


class Stated(NamedTuple):
    """What a name or a file states.

    Args:
        name: the name of the methods, or of the file without its suffix.
        methods: the methods it builds on, joined by `+`; "" for none.
        table: the other contents of the file.
        recipe: the recipe that the file names.
    """

    name: str
    methods: str
    table: Table
    recipe: str = DEFAULT


def read_stated(what: str) -> Stated:
    """Read a file that ends in `.toml`, or take a name as the methods; imports the plugins of a file."""
    if not what:
        raise ConfigError("the name of the method is empty; write for example fedavg")
    if not what.endswith(".toml"):
        return Stated(what, what, {})
    path = Path(what)
    if not path.is_file():
        raise ConfigError(f"no such experiment file: {what}")
    table = anchored(read_toml(path), path.parent)
    table.pop("fingerprint", None)  # of the run whose configuration it is
    read_imports(table.get("import", []))
    method = table.get("method", {})
    method = {"kind": method} if isinstance(method, str) else section(table, "method")
    methods = coerce(method.get("kind", ""), str, "method.kind")
    rest = {key: value for key, value in method.items() if key != "kind"}
    recipe = coerce(table.pop("recipe", DEFAULT), str, "recipe")
    return Stated(path.stem, methods, {**table, "method": rest}, recipe)


def resolve(what: str, on: str | None = None, overrides: Table | None = None, recipe: str | None = None) -> Experiment:
    """The experiment of a method or a file, with overrides.

    Args:
        what: the name of a method, several joined by `+`, or the path of an experiment file ending in `.toml`.
        on: the name of a task, a task of one's own (`my_task.py:task`), or a file (`task_settings.py`); with an
            experiment file, it replaces the file's task.
        overrides: values by dotted path, for example `{"method.client_opt.lr": 0.05}`.
        recipe: the name of a recipe; by default that of the file, or `default`.
    """
    name, methods, own, of_file = read_stated(what)
    chosen = preset("recipes", of_file if recipe is None else recipe).table
    task = on if on is not None else coerce(section(own, "task").get("kind", DEFAULT_TASK), str, "task.kind")
    if on is not None:
        own = {key: value for key, value in own.items() if key != "task"}
    on_task = section(section(own, "on"), task, "on.")  # the file's own settings for this task
    own = {key: value for key, value in own.items() if key != "on"}
    settings = task_settings(task)
    kind = settings["task"]["kind"]
    table = layer(settings, {"task": {} if own_kind(kind) else chosen.get("task", {})})
    # a task in a file of its own has the methods' settings of its kind
    named = kind if Path(task).suffix in (".toml", ".jsonl") else task
    for above in (join(named_methods(methods), named) if methods else {}, own, on_task):
        table = layer(table, above)
    table = under(chosen, table, layer(own, on_task))
    table.setdefault("name", name.replace(" ", ""))
    if modules := list(dict.fromkeys([*loaded(), *table.get("import", [])])):
        table["import"] = modules
    experiment = from_table(anchored(table, Path.cwd()))
    if overrides:
        table = to_table(experiment)  # with every default written out, so that any key can be set
        before = to_table(experiment)
        for key, value in overrides.items():
            put(table, key, value)
        keep(chosen, before, table)
        experiment = from_table(anchored(table, Path.cwd()))
    return experiment


def stated_settings(what: str, recipe: str | None = None) -> tuple[str, Table]:
    """The label and the settings of a method or a file, without its task: for models and data of your own."""
    name, methods, own, of_file = read_stated(what)
    chosen = preset("recipes", of_file if recipe is None else recipe).table
    own = {key: value for key, value in own.items() if key not in ("task", "on")}
    label = coerce(own.pop("name", name), str, "name")
    return label, under(chosen, layer(join(named_methods(methods)) if methods else {}, own), own)
