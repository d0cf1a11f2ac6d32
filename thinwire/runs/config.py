"""The settings of a run, from presets, files and options, and as tables of a file.

`update` is the only way to change settings: nested tables, applied to frozen dataclasses. `resolve` updates the
defaults by layers, of which a later one wins:

    [method] of the recipe  <-  task preset  <-  [task] of the recipe  <-  methods (`mapo+int8`)  <-  file  <-  options

>>> resolve("fedavg", on="digits", overrides={"rounds": 3}).rounds
3
>>> resolve("mapo", overrides={"method.space.k": 64}).method.space.k
64

A file builds on methods by `method = "mapo+int8"`, or by `kind` in `[method]`, whose other keys are then put on top.
Its `recipe = "paper"` names another recipe than the default one.

A recipe (`presets/recipes`) has training settings for methods that are named, where nothing else states them. In its
`[method]`, a table with a kind is used where no part is stated. One without a kind holds options for a part of any
kind: `client_opt = { clip_norm = 5.0 }` applies to SGD and Adam alike, and not to an optimizer without that option. A
file that states every slot of the recipe (as those of `thinwire show` and of run directories do) is used as it is.

A task is one of

    digits                        a preset, or a dataset that a plugin registered
    my_task.py:task               a task by reference (`build.py`), with the default settings
    task.toml                     a file with the sections of a preset: [task], [cohort], [local], rounds, ...
    visits.csv, visits.parquet    the dataset `table` with this file;   arrays.npz: `arrays`;   a folder: `image-folder`
    chats.jsonl                   the dataset `causal-lm` with this file

A task file starts from the settings of its `task.kind`. Paths in it are relative to its folder.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from torch import nn

from thinwire.core.reference import OWN, PATH_OPTIONS, in_folder, is_file, own_kind
from thinwire.core.registry import SLOTS, entries, lookup
from thinwire.errors import ConfigError, UnknownName
from thinwire.federation.settings import ModelSettings, Settings, TaskSettings
from thinwire.federation.speed import Speed
from thinwire.protocol.method import Method
from thinwire.runs.build import task_options
from thinwire.runs.files import type_hints
from thinwire.runs.parts import arguments, coerce, describe, named, part_kind, plain
from thinwire.runs.plugins import loaded, read_imports
from thinwire.runs.presets import filled, join, method_name, named_methods, names, preset
from thinwire.runs.task_files import anchored, portable
from thinwire.runs.toml import DEEPEST, Table, dumps, read_toml

DEFAULT_TASK = "digits"
DEFAULT_RECIPE = "default"
T = TypeVar("T")


# -- changes ---------------------------------------------------------------------------------------------------------


class Whole(dict[str, Any]):
    """A table that replaces the value before it, where any other table changes it."""


def nested(overrides: Mapping[str, Any]) -> Table:
    """Values by dotted path as one nested table.

    >>> nested({"method.client_opt.lr": 0.05, "rounds": 3})
    {'method': {'client_opt': {'lr': 0.05}}, 'rounds': 3}
    """
    out: Table = {}
    for path, value in overrides.items():
        *parents, last = path.split(".", DEEPEST)
        here = out
        for key in parents:
            below = here.get(key, {})
            here[key] = below if isinstance(below, dict) else Whole(kind=below)
            here = here[key]
        here[last] = Whole(value) if isinstance(value, dict) else value
    return out


def update(settings: T, *changes: Mapping[str, Any], where: str = "") -> T:
    """A copy of a frozen dataclass with nested changes; a later one wins.

    A table of the same kind changes a part, one of another kind makes a new part; a digit selects from a list.

    Args:
        settings: the settings, or a section or part of them.
        *changes: nested tables; values may also be objects.
        where: the path of `settings`, for errors.

    >>> update(Method(), {"space": "mapo"}, {"space": {"k": 8}, "download": "full"}).space.k
    8
    """
    hints: dict[str, Any] = type_hints(type(settings))  # type: ignore[arg-type]
    known = ["import" if one.name == "imports" else one.name for one in fields(settings) if one.init]  # type: ignore[arg-type]
    given: dict[str, list[Any]] = {}
    for table in changes:
        for key, value in table.items():
            if key not in known:
                raise UnknownName(f"key in {where}" if where else "key", key, known)
            given.setdefault(key, []).append(value)
    new: Table = {}
    if modules := given.pop("import", None):  # first: other keys may name parts of these modules
        new["imports"] = read_imports(modules[-1])
    for key, values in given.items():
        old, path = getattr(settings, key), f"{where}.{key}" if where else key
        is_section = is_dataclass(old) and path != "task" and part_kind(hints[key]) is None
        if is_section and all(type(value) is dict for value in values):  # made once, from all changes
            new[key] = update(old, *values, where=path)  # type: ignore[type-var]
            continue
        for value in values:
            old = _changed(old, value, hints[key], path)
        new[key] = old
    return replace(settings, **new)  # type: ignore[type-var]


def _changed(old: Any, value: Any, hint: Any, where: str) -> Any:
    """A value after a change."""
    if where == "task":
        return _task(old, _table(value, where))
    if where == "task.model" and isinstance(value, dict | str):
        return _model(old, value)
    kind = part_kind(hint)
    if kind is None and is_dataclass(old):  # a section
        if isinstance(value, type(old)):
            return value
        return update(type(old)() if isinstance(value, Whole) else old, dict(_table(value, where)), where=where)  # type: ignore[type-var, misc]
    changes = kind is not None and old is not None and type(value) is dict
    if kind and changes and ("kind" not in value or lookup(kind, named(value, where)[0]).make is type(old)):
        return update(old, {key: one for key, one in value.items() if key != "kind"}, where=where)
    if isinstance(old, tuple) and isinstance(value, dict):
        return _places(old, value, hint, where)
    return coerce(value, hint, where)


def _places(old: tuple[Any, ...], value: Table, hint: Any, where: str) -> tuple[Any, ...]:
    """A list of parts with changes by place: `method.up.parts.0.density`."""
    out = list(old)
    for place, one in value.items():
        if not place.isdigit() or int(place) >= len(out) or not isinstance(one, dict):
            raise ConfigError(
                f"{place!r} names no part of the {len(out)} of {where}; write its place from 0, such as 0.density"
            )
        out[int(place)] = _changed(out[int(place)], one, get_args(hint)[0], f"{where}.{place}")
    return tuple(out)


def _task(old: TaskSettings, value: Table) -> TaskSettings:
    """A task after a change; keys that are no setting of tasks are arguments of the dataset's loader.

    A function of the user may have parameters with the name of a setting: `task.clients` is then its argument.
    """
    kind = coerce(value.get("kind", DEFAULT_TASK if isinstance(value, Whole) else old.kind), str, "task.kind")
    if isinstance(value, Whole) or kind != old.kind:
        old = TaskSettings(kind)
    make, options = task_options(kind)
    hints = {name: hint for name, hint in type_hints(TaskSettings).items() if name != "options"}
    for key in value:
        if key not in hints and key not in options:
            raise UnknownName("key in task", key, (*hints, *options))
    # the default of a parameter `clients` of a function of the user is stated, for readers of the configuration
    stated = {"clients": options.get("clients")} if own_kind(kind) and isinstance(options.get("clients"), int) else {}
    given = {**stated, **dict(old.options), **value}
    loading = arguments(make, {key: given[key] for key in options if key in given}, "task")
    own = {
        key: _changed(getattr(old, key), one, hints[key], f"task.{key}")
        for key, one in value.items()
        if key in hints and key != "kind" and not (own_kind(kind) and key in options)
    }
    return replace(old, options=tuple(loading.items()), **own)


def _model(old: ModelSettings | None, value: Any) -> ModelSettings:
    """A model after a change: other options of the same one, or another one."""
    if old is not None and type(value) is dict and value.get("kind", old.kind) == old.kind:
        value = {"kind": old.kind, **dict(old.options), **value}
    kind, options = named(value, "task.model")
    make = lookup("model", kind).make
    if isinstance(make, nn.Module) and options:
        raise ConfigError(f"task.model = {kind!r} is a module that is already built; write its class to set options")
    return ModelSettings(kind, tuple(arguments(make, options, "task.model").items()))


def _table(value: Any, where: str) -> Table:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be a table, [{where}], not {value!r}")
    return value


def section(table: Mapping[str, Any], key: str) -> Table:
    """A table within a table, empty where there is none."""
    return _table(table.get(key, {}), key)


# -- tables ----------------------------------------------------------------------------------------------------------

_NOT_IN_DIGEST = ("accounting", "import", "fingerprint", "lr_trials")
_ALWAYS = ("download", "upload", "drift_check")
# fields of a method that are written where they differ from its defaults, so that older digests stay the same
_RARE = (
    *("budget", "secure_aggregation", "next_stage", "norm_bound", "evaluate", "opt_lifetime", "opt_owner"),
    *("asynchronous", "ema_decay"),
)


def from_table(table: Table) -> Settings:
    """Settings from the contents of a file that states name and task."""
    if "name" not in table:
        raise ConfigError('name is missing; write for example name = "my-run"')
    if "task" not in table:
        raise ConfigError("[task] is missing; `thinwire show fedavg` prints a complete experiment")
    kind = coerce(section(table, "task").get("kind", DEFAULT_TASK), str, "task.kind")
    return update(Settings("run", TaskSettings(kind)), table)


def to_table(settings: Settings) -> Table:
    """All settings as plain values, every default included, but for those that are rarely set."""
    task = settings.task
    own = {
        "kind": task.kind,
        "clients": task.clients or None,
        "partition": task.partition and describe("partition", task.partition),
        "model": task.model and {"kind": task.model.kind, **dict(task.model.options)},
        **{key: getattr(task, key) for key in ("validation_fraction", "participating_clients", "scale", "augment")},
    }
    return _given(
        {
            **{key: getattr(settings, key) for key in ("name", "seed", "rounds")},
            "import": list(settings.imports),
            "fingerprint": settings.fingerprint,
            "auto_lr": settings.auto_lr or None,
            "lr_trials": [list(one) for one in settings.lr_trials],
            "extended": list(settings.extended),
            "task": {**_given(own), **dict(task.options)},
            **{key: plain(getattr(settings, key)) for key in ("cohort", "local", "engine", "eval", "checkpoint")},
            "speed": None if settings.speed == Speed() else plain(settings.speed),
            "attack": settings.attack and describe("attack", settings.attack),
            "method": method_table(settings.method, strict=not task.kind.startswith(OWN)),
        }
    )


def _given(table: Table) -> Table:
    """The values that are not None, and no empty text or list."""
    return {key: value for key, value in table.items() if value not in (None, "", [])}


def method_table(method: Method, strict: bool = True) -> Table:
    """A method as plain values.

    Args:
        method: the method.
        strict: whether a part that is not registered is an error; otherwise its `repr` is its kind.
    """
    hints, default, table = type_hints(Method), Method(), dict[str, Any]()
    for name in (*SLOTS, *_ALWAYS, *_RARE):
        value = getattr(method, name)
        if name in ("mask", *_RARE) and value == getattr(default, name):
            continue
        try:
            table[name] = plain(value, hints[name])
        except ConfigError:
            if strict or name not in SLOTS:
                raise
            table[name] = {"kind": repr(value)}
    return table


def digest(settings: Settings | Table) -> str:
    """A short hash of settings: two runs with one digest, and of the same data, are equal.

    The fingerprint of the user's data is checked apart (`execute.py`), so that the error says what differs.
    """
    if isinstance(settings, Settings):  # stored with the settings: a page of a grid asks for it a thousand times
        known = vars(settings)
        if "_digest" not in known:
            known["_digest"] = digest(to_table(settings))
        return str(known["_digest"])
    kept = portable({key: value for key, value in settings.items() if key not in _NOT_IN_DIGEST})
    return hashlib.sha256(dumps(kept).encode()).hexdigest()[:12]


# -- layers ----------------------------------------------------------------------------------------------------------


def resolve(
    what: str | Method,
    on: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    recipe: str | None = None,
) -> Settings:
    """The settings of a method or a file on a task, with overrides.

    Args:
        what: the name of a method, several joined by `+`, the path of a file ending in `.toml`, or a Method.
        on: the name of a task, a reference (`my_task.py:task`), or a file; it replaces the task of an experiment file.
        overrides: values by dotted path, for example `{"method.client_opt.lr": 0.05}`.
        recipe: the name of a recipe; by default that of the file, or `default`.
    """
    name, methods, file, of_file = _source(what)
    chosen = preset("recipes", of_file if recipe is None else recipe).table
    task = on if on is not None else coerce(section(file, "task").get("kind", DEFAULT_TASK), str, "task.kind")
    if on is not None:
        file.pop("task", None)
    of_task = task_layers(task)
    kind = of_task[-1]["task"]["kind"]
    # a task in a file of its own has the methods' settings of its kind
    on_kind = kind if Path(task).suffix in (".toml", ".jsonl") else task
    modules = list(dict.fromkeys([*loaded(), *file.pop("import", [])]))
    objects = {path: value for path, value in (overrides or {}).items() if is_dataclass(value)}
    values = {path: value for path, value in (overrides or {}).items() if path not in objects}
    own_layers = (file, nested(objects), anchored(nested(values), Path.cwd(), kind))
    layers = [
        *of_task,
        {} if own_kind(kind) else {"task": chosen.get("task", {})},
        join(named_methods(methods), on_kind) if methods else {},
        *own_layers,
    ]
    slots: dict[str, Any] = chosen.get("method", {})
    stated = [layer.get("method", {}) for layer in layers]
    own = file.get("method", {})
    complete = isinstance(own, dict) and all(slot in own and _is_part(own[slot]) for slot in slots)
    if complete or any(isinstance(one, Method) for one in stated):
        slots = {}
    tables = {slot: [one[slot] for one in stated if isinstance(one, dict) and slot in one] for slot in slots}
    used = {slot: one for slot, one in slots.items() if "kind" in one and not any(map(_is_part, tables[slot]))}
    start = {"name": name, "import": modules, "method": used}
    auto = False
    for layer in (*of_task, *own_layers):  # a rate that is stated is used
        auto = layer.get("auto_lr", auto and not _has_rate(layer.get("method", {})))
    layers.append({"auto_lr": auto})
    settings = update(Settings("run", TaskSettings(kind)), start, *layers)
    for slot, options in slots.items():
        part = getattr(settings.method, slot)
        if "kind" not in options and is_dataclass(part):
            unset = {one.name for one in fields(part) if getattr(part, one.name) == one.default}
            unset -= {key for table in tables[slot] if isinstance(table, dict) for key in table}
            free = {key: value for key, value in options.items() if key in unset}
            settings = update(settings, {"method": {slot: free}})
    method = settings.method
    return replace(settings, method=method.replace(space=method.space.over(settings.rounds)))


def _has_rate(method: Any) -> bool:
    """Whether a layer states a learning rate, or an optimizer with one."""
    slots = filled(method) if isinstance(method, Method) else method
    stated = [slots[slot] for slot in ("client_opt", "server_opt") if slot in slots]
    return any("lr" in one if isinstance(one, dict) else not isinstance(one, str) for one in stated)


def _is_part(value: Any) -> bool:
    """Whether the value of a slot is a whole part, and not options of one."""
    return not isinstance(value, dict) or "kind" in value


def _source(what: str | Method) -> tuple[str, str, Table, str]:
    """Name, methods, table and recipe that a file states; a name alone states the methods."""
    if isinstance(what, Method):
        return method_name(what), "", {"method": filled(what)}, DEFAULT_RECIPE
    if not isinstance(what, str):
        raise ConfigError(
            f"method must be a Method, the name of one or a file (.toml), not {type(what).__name__}; "
            "write for example 'fedavg'"
        )
    if not what:
        raise ConfigError("the name of the method is empty; write for example fedavg")
    if not what.endswith(".toml"):
        return what.replace(" ", ""), what, {}, DEFAULT_RECIPE
    path = Path(what)
    if not path.is_file():
        raise ConfigError(f"no such experiment file: {what}")
    table = anchored(read_toml(path), path.parent)
    table.pop("fingerprint", None)  # of the run whose configuration it is
    read_imports(table.get("import", []))
    method = table.get("method", {})
    method = {"kind": method} if isinstance(method, str) else dict(section(table, "method"))
    methods = coerce(method.pop("kind", ""), str, "method.kind")
    recipe = coerce(table.pop("recipe", DEFAULT_RECIPE), str, "recipe")
    return path.stem.replace(" ", ""), methods, {**table, "method": method}, recipe


DATASET_OF = {".csv": "table", ".parquet": "table", ".npz": "arrays", ".jsonl": "causal-lm"}  # by suffix of a file
FOLDER_DATASET = "image-folder"
# where neither model nor data is known; cohorts of 10 or all clients
OWN_TASK: Table = {"rounds": 50, "cohort": {"size": 0}, "local": {"epochs": 0, "batch": 16}, "auto_lr": True}


def task_layers(on: str) -> list[Table]:
    """The settings of a task, as tables of an experiment file without a method's part; a later one wins.

    >>> task_layers("my_task.py:task")[0]["rounds"]
    50
    """
    if own_kind(on):
        return [{"task": {"kind": in_folder(on, Path.cwd())}, **OWN_TASK}]
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


def _by_name(task: str) -> list[Table]:
    """A preset, or the `preset` with which a plugin registered its dataset."""
    try:
        return [preset("tasks", task).table]
    except UnknownName:
        entry = entries("dataset").get(task)
        if entry is None:
            raise
        cohort = {} if "clients" in entry.preset.get("task", {}) else {"cohort": {"size": 0}}
        own = {**entry.preset, "task": {"kind": task, **entry.preset.get("task", {})}}
        return [{"task": {"kind": task}, **cohort}, own]


def _of_file(file: Path) -> list[Table]:
    """A task file, on top of the settings of its kind."""
    table = anchored(read_toml(file), file.parent)
    task = table.get("task")
    if not isinstance(task, dict) or not isinstance(task.get("kind"), str):
        raise ConfigError(
            f'{file} is no task file: it lacks kind in [task]; write for example kind = "my_task.py:task"'
        )
    return [*task_layers(task["kind"]), {key: one for key, one in table.items() if key not in ("about", "paper")}]


def _with_data(dataset: str, path: str) -> list[Table]:
    """A dataset that reads a file or a folder."""
    parameters = inspect.signature(lookup("dataset", dataset).make).parameters
    option = next((name for name in PATH_OPTIONS if name in parameters), PATH_OPTIONS[0])
    return [*_by_name(dataset), {"task": {"kind": dataset, option: str(Path(path).expanduser().absolute())}}]
