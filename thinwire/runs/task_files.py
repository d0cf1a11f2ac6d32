"""Files that settings name: absolute paths where they are read, and names without folders for readers and digests.

A reference `FILE.py:NAME` (`core/reference.py`) may be the value of any setting. `[task]` may also name a file or a
folder of data in the options `PATH_OPTIONS`, and `import` lists Python files.

>>> anchored({"task": {"kind": "my.py:task", "rows": 3}}, Path("/home/me"))
{'task': {'kind': '/home/me/my.py:task', 'rows': 3}}
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.core.reference import (
    PATH_OPTIONS,
    in_folder,
    is_file,
    is_reference,
    own_kind,
    short_name,
)
from thinwire.runs.toml import Table


def anchored(table: Table, folder: Path, kind: str = "") -> Table:
    """A table of settings in which relative paths are relative to the folder, as absolute paths.

    Args:
        table: the table.
        folder: the folder.
        kind: the kind of its task, if it does not state it.
    """
    return _changed(
        table,
        kind,
        lambda text: in_folder(text, folder),
        lambda text: str((folder / Path(text).expanduser()).absolute()),
    )


def portable(table: Table) -> Table:
    """A table of settings in which files have no folders: for digests that do not depend on where a project lies."""
    return _changed(table, "", short_name, lambda text: Path(text).name)


def folder_name(label: str) -> str:
    """The name of a task as a part of the name of a run directory.

    >>> folder_name("my_task.py:task"), folder_name("digits")
    ('my_task-task', 'digits')
    """
    return re.sub(r"[^\w.+-]+", "-", label.replace(".py:", ":"))


def _changed(table: Table, kind: str, reference: Callable[[str], str], path: Callable[[str], str]) -> Table:
    """The table with other references and paths."""

    def change(value: Any) -> Any:
        if isinstance(value, str):
            return reference(value) if is_reference(value) else value
        if isinstance(value, dict):
            return type(value)({key: change(one) for key, one in value.items()})
        return [change(one) for one in value] if isinstance(value, list) else value

    out: Table = change(table)
    if isinstance(modules := out.get("import"), list):
        out["import"] = [reference(one) if isinstance(one, str) and is_file(one) else one for one in modules]
    task = out.get("task")
    if isinstance(task, dict) and not own_kind(str(task.get("kind", kind))):
        task.update({key: path(task[key]) for key in PATH_OPTIONS if isinstance(task.get(key), str)})
    return out
