"""The configuration of an experiment: the names that other modules use, gathered from the files that define them.

From a name or a file to an experiment, layer by layer; a later layer wins.

    defaults  <-  recipe  <-  task (`config.py`)  <-  method presets (`mapo+int8`)  <-  file  <-  command line

A file builds on methods by `method = "mapo+int8"`, or by `kind` in `[method]`, whose other keys are then put on top.
Its `recipe = "paper"` names another recipe than the default one (`config.py`).

>>> resolve("fedavg", on="digits", overrides={"rounds": 3}).rounds
3

Recipes: training settings for methods that are named, where nothing else states them.

A recipe is a preset (`presets/recipes`). Its `[method]` lies under all other layers of `config.py`, its `[task]` over
the task preset:

    [method] of the recipe  <-  task preset  <-  [task] of the recipe  <-  method presets  <-  file  <-  command line

In `[method]` a table without a kind holds options for a part of any kind: `client_opt = { clip_norm = 5.0 }` applies to
SGD and Adam alike, and not to an optimizer of a plugin without that option. A table with a kind is used where no part
is stated. A file that states every slot of the recipe (as those of `thinwire show` and of run directories do) is used
as it is: nothing is added.

>>> clipped = {"method": {"client_opt": {"clip_norm": 5.0}}}
>>> under(clipped, {"method": {"client_opt": {"kind": "adam", "lr": 0.01}}})
{'method': {'client_opt': {'clip_norm': 5.0, 'kind': 'adam', 'lr': 0.01}}}

The settings of a task, from what `--on` names.

    digits                        a preset of ours, or a dataset that a plugin registered
    my_task.py:task               a task of one's own (`own_task.py`), with the default settings
    task.toml                     a file with the sections of a preset: [task], [cohort], [local], rounds, ...
    visits.csv, visits.parquet    the dataset `table` with this file;   arrays.npz: `arrays`;   a folder: `image-folder`
    chats.jsonl                   the dataset `causal-lm` with this file

A task file starts from the settings of its `task.kind`. Paths in it are relative to its folder.

Methods joined by `+`: `mapo+int8` is MAPO with 8-bit uploads.

A method fills the slots that differ from `Method()`. Methods that fill different slots are combined; the same value
twice is no conflict. Where two methods fill one slot with different values:

    method.up, method.down     codecs are chained in the order of the names: topk+int8 quantizes the largest values
    method.client_opt          the first method that fills it wins: a learning rate is tuned for one method
    any other slot             is refused, in one line that names the slot and both methods

The values that a method has on a task (`thinwire.methods.on`) are used before the methods are joined.

>>> join(named("scaffold+int8"))["method"]["correction"], join(named("topk+int8"))["method"]["up"]["kind"]
({'kind': 'scaffold'}, 'chain')
>>> join(named("mapo+fedpara"))
Traceback (most recent call last):
thinwire.errors.IncompatibleParts: mapo+fedpara: 'mapo' and 'fedpara' both fill method.space; keep one of them
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.reference import in_folder, is_file
from thinwire.core.registry import SLOTS as SLOTS, entries, lookup
from thinwire.errors import ConfigError, IncompatibleParts, UnknownName
from thinwire.protocol.method import Method
from thinwire.runs.experiment import (
    Checkpointing as Checkpointing,
    Cohort as Cohort,
    Evaluation as Evaluation,
    Experiment as Experiment,
    ModelChoice as ModelChoice,
    TaskChoice as TaskChoice,
    digest as digest,
    method_table as method_table,
    to_table as to_table,
)
from thinwire.runs.load import DEFAULT_TASK, from_table as from_table, method_from as method_from, section
from thinwire.runs.parts import build, coerce, describe
from thinwire.runs.plugins import loaded, read_imports
from thinwire.runs.presets import Preset, layer, names, preset
from thinwire.runs.task_files import PATH_OPTIONS, anchored, own_kind
from thinwire.runs.toml import Table, parse_overrides as parse_overrides, put as put, read_toml

DEFAULT = "default"  # the recipe


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
        on: the name of a task, a task of one's own (`my_task.py:task`), or a file (`config.py`); with an
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
    on_kind = kind if Path(task).suffix in (".toml", ".jsonl") else task
    for above in (join(named(methods), on_kind) if methods else {}, own, on_task):
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
    return label, under(chosen, layer(join(named(methods)) if methods else {}, own), own)


def under(recipe: Table, stated: Table, file: Table | None = None) -> Table:
    """A table with the method settings of a recipe where it has none.

    Args:
        recipe: the table of the recipe.
        stated: the settings of all other layers.
        file: those of the experiment file alone.
    """
    slots: Table = recipe.get("method", {})
    own = (file or {}).get("method", {})
    if slots and all(slot in own and not _is_options(own[slot]) for slot in slots):
        return stated
    method = stated.get("method", {})
    filled = {slot: _fill(slot, value, method.get(slot)) for slot, value in slots.items()}
    return {**stated, "method": {**method, **filled}} if filled else stated


def keep(recipe: Table, before: Table, after: Table) -> None:
    """Restore options of a recipe in a part that an override replaced without stating them.

    >>> recipe = {"method": {"client_opt": {"clip_norm": 5.0}}}
    >>> before = {"method": {"client_opt": {"kind": "sgd", "lr": 0.1, "clip_norm": 5.0}}}
    >>> after = {"method": {"client_opt": {"kind": "adam"}}}
    >>> keep(recipe, before, after); after
    {'method': {'client_opt': {'clip_norm': 5.0, 'kind': 'adam'}}}
    """
    method = after["method"]
    for slot, options in recipe.get("method", {}).items() if isinstance(method, dict) else ():
        old = before["method"][slot]
        if "kind" not in options and all(old.get(key) == value for key, value in options.items()):
            method[slot] = _fill(slot, options, method.get(slot))


def _is_options(value: Any) -> bool:
    """Whether a table has options for a part that another table names."""
    return isinstance(value, dict) and "kind" not in value


def _fill(slot: str, recipe: Table, stated: Any) -> Any:
    """The table of a part: as stated, over the value of the recipe."""
    kind = SLOTS[slot]
    if "kind" in recipe:
        return recipe if stated is None else layer(recipe, stated) if _is_options(stated) else stated
    if stated is None:
        stated = describe(kind, getattr(Method, slot))
    table = {"kind": stated} if isinstance(stated, str) else stated
    if not isinstance(table, dict):
        return stated  # not a part: `load.py` refuses it
    entry = entries(kind).get(str(table.get("kind")))
    known = inspect.signature(entry.make).parameters if entry else recipe
    return layer({key: value for key, value in recipe.items() if key in known}, table)


DATASET_OF = {
    ".csv": "table",
    ".parquet": "table",
    ".npz": "arrays",
    ".jsonl": "causal-lm",
}  # suffix of a file -> dataset that reads it
FOLDER_DATASET = "image-folder"


def task_settings(on: str) -> Table:
    """The settings of a task, as the table of an experiment file without a method's part.

    >>> task_settings("my_task.py:task")["cohort"]
    {'size': 0}
    """
    if own_kind(on):
        return {"task": {"kind": in_folder(on, Path.cwd())}, "cohort": {"size": 0}}  # 10 or all clients
    suffix = Path(on).suffix.lower()
    if is_file(on):
        raise ConfigError(f"{on} is a Python file; add the name of a Task or function in it, such as {on}:task")
    if suffix == ".toml":
        return _of_file(Path(on))
    if suffix in DATASET_OF:
        if not Path(on).is_file():
            raise ConfigError(f"there is no file {on}; write the name of a task (`thinwire list tasks`) or of a file")
        return _with_data(DATASET_OF[suffix], on)
    if on and on not in names("tasks") and on not in entries("dataset") and Path(on).is_dir():
        return _with_data(FOLDER_DATASET, on)
    return _by_name(on)


def _by_name(task: str) -> Table:
    """A preset of ours, or the `preset` with which a plugin registered its dataset."""
    try:
        return preset("tasks", task).table
    except UnknownName:
        entry = entries("dataset").get(task)
        if entry is None:
            raise
        cohort = {} if "clients" in entry.preset.get("task", {}) else {"cohort": {"size": 0}}
        return layer({"task": {"kind": task}, **cohort}, dict(entry.preset))


def _of_file(file: Path) -> Table:
    """A task file, on top of the settings of its kind."""
    table = anchored(read_toml(file), file.parent)
    task = table.get("task")
    if not isinstance(task, dict) or not isinstance(task.get("kind"), str):
        raise ConfigError(
            f'{file} is no task file: it lacks kind in [task]; write for example kind = "my_task.py:task"'
        )
    about = {key: value for key, value in table.items() if key not in ("about", "paper")}
    return layer(task_settings(task["kind"]), about)


def _with_data(dataset: str, path: str) -> Table:
    """A dataset that reads a file or a folder."""
    parameters = inspect.signature(lookup("dataset", dataset).make).parameters
    option = next((name for name in PATH_OPTIONS if name in parameters), PATH_OPTIONS[0])
    return layer(_by_name(dataset), {"task": {option: str(Path(path).expanduser().absolute())}})


_CHAINED = ("method.up", "method.down")
_FIRST_WINS = ("method.client_opt",)


def named(expression: str) -> list[Preset]:
    """The presets of an expression, for example `mapo+int8`, in its order."""
    names = [name.strip() for name in expression.split("+")]
    if len(names) > 1 and not all(names):
        raise ConfigError(f"{expression!r} has a + with no method on one side; write for example mapo+int8")
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ConfigError(f"{expression!r} names {name!r} twice; once is enough")
    return [preset("methods", name) for name in names]


def join(methods: Sequence[Preset], task: str | None = None) -> Table:
    """One table from several presets.

    Args:
        methods: the presets.
        task: the task on which they are used.

    Raises:
        IncompatibleParts: two methods fill the same slot.
    """
    expression = "+".join(method.name for method in methods)
    out: Table = {}
    owners: dict[str, list[str]] = {}  # the methods that filled a slot
    for method in methods:
        for slot, value in _slots(method.on_task(task)):
            before = owners.setdefault(slot, [])
            if not before or _get(out, slot) == value:
                _put(out, slot, value)
            elif slot in _CHAINED:
                _put(out, slot, _chain(expression, slot, [*before, method.name], _get(out, slot), value))
            elif slot in _FIRST_WINS or _same_server_optimizer(slot, _get(out, slot), value):
                continue
            else:
                raise IncompatibleParts(
                    f"{expression}: {before[0]!r} and {method.name!r} both fill {slot}; keep one of them"
                )
            before.append(method.name)
    return out


def _same_server_optimizer(slot: str, first: Any, second: Any) -> bool:
    """Whether two methods have one kind of server optimizer, with other settings: those of the first are used."""
    return slot == "method.server_opt" and isinstance(first, dict) and first.get("kind") == second.get("kind")


def _slots(table: Table) -> list[tuple[str, Any]]:
    """Every value by its path, two levels deep: `rounds`, `method.space`, `local.batch`."""
    out = []
    for key, value in table.items():
        if isinstance(value, dict):
            out += [(f"{key}.{name}", inner) for name, inner in value.items()]
        else:
            out.append((key, value))
    return out


def _get(table: Table, path: str) -> Any:
    section, _, key = path.rpartition(".")
    return (table[section] if section else table)[key]


def _put(table: Table, path: str, value: Any) -> None:
    section, _, key = path.rpartition(".")
    (table.setdefault(section, {}) if section else table)[key] = value


def _chain(expression: str, slot: str, names: Sequence[str], first: Any, second: Any) -> Table:
    """Two codecs in sequence, or an error that names the order in which they can be chained."""

    def chained(*codecs: Any) -> Table:
        parts: list[Any] = []
        for codec in codecs:
            nested = isinstance(codec, dict) and codec.get("kind") == "chain"
            parts += codec["parts"] if nested else [codec]
        return {"kind": "chain", "parts": parts}

    def refusal(table: Table) -> ConfigError | None:
        try:
            build("codec", table, slot)
        except ConfigError as error:
            return error
        return None

    wanted = chained(first, second)
    if error := refusal(wanted):
        earlier, name = " and ".join(map(repr, names[:-1])), names[-1]
        others = [known for known in expression.split("+") if known not in (*names[:-1], name)]
        reason = f"do not chain: {error}"
        if not refusal(chained(second, first)):
            reason = f"do not chain in this order; write {'+'.join([*others, name, *names[:-1]])}"
        raise IncompatibleParts(f"{expression}: {earlier} and {name!r} both fill {slot} and {reason}") from error
    return wanted
