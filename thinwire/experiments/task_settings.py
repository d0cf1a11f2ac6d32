"""The settings of a task, from what `--on` names.

    digits                        a preset of ours, or a dataset that a plugin registered
    my_task.py:task               a task of one's own (`own_task.py`), with the default settings
    task.toml                     a file with the sections of a preset: [task], [cohort], [local], rounds, ...
    visits.csv, visits.parquet    the dataset `table` with this file;   arrays.npz: `arrays`;   a folder: `image-folder`
    chats.jsonl                   the dataset `causal-lm` with this file

A task file starts from the settings of its `task.kind`. Paths in it are relative to its folder.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from thinwire.core.reference import in_folder, is_file
from thinwire.core.registry import entries, lookup
from thinwire.errors import ConfigError, UnknownName
from thinwire.experiments.presets import layer, names, preset
from thinwire.experiments.task_files import PATH_OPTIONS, anchored, own_kind
from thinwire.experiments.toml import Table, read_toml

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
