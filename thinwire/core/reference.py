"""References to Python objects of one's own: `FILE.py:NAME` or `package.module:NAME`.

A setting that takes a registered name also takes a reference: a task, a model, a metric, a codec. The file is imported
when the user names it, once in a process. It may import files beside it, as a script does.

>>> is_reference("my_task.py:task"), is_reference("my_package.tasks:task"), is_reference("digits")
(True, True, False)
>>> short_name("/home/me/my_task.py:task"), in_folder("my_task.py:task", Path("/home/me"))
('my_task.py:task', '/home/me/my_task.py:task')
>>> task_label({"kind": "/home/me/my.py:task"}), task_label({"kind": "table", "file": "/home/me/visits.csv"})
('my.py:task', 'visits.csv')
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from thinwire.core.text import visible
from thinwire.errors import ConfigError, UnknownName

OWN = "own:"  # begins the name of a task that is an object of this process
PATH_OPTIONS = ("file", "folder", "path", "test_file", "test_folder")  # of the loader of a dataset
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")

_files: dict[Path, ModuleType] = {}  # files that were imported, by their absolute path


def is_reference(text: str) -> bool:
    """Whether a setting is a reference, and not a registered name."""
    where, colon, name = text.rpartition(":")
    return bool(colon) and (is_file(where) or bool(_MODULE.fullmatch(where) and _MODULE.fullmatch(name)))


def is_file(text: str) -> bool:
    """Whether a text is the path of a Python file."""
    return text.endswith(".py")


def in_folder(reference: str, folder: Path) -> str:
    """A reference, or the path of a file, with an absolute path; a relative one is relative to the folder."""
    where = _where(reference)
    if not is_file(where):
        return reference
    return f"{_absolute(folder / Path(where).expanduser())}{reference.removeprefix(where)}"


def short_name(reference: str) -> str:
    """A reference without the folder of its file, for readers."""
    where = _where(reference)
    return f"{Path(where).name}{reference.removeprefix(where)}" if is_file(where) else reference


def own_kind(kind: str) -> bool:
    """Whether a task is a reference, or an object of this process, and not a dataset by name."""
    return kind.startswith(OWN) or is_reference(kind)


def task_label(task: Mapping[str, Any]) -> str:
    """The name of a task for readers, from its table: that of its file, without folders.

    >>> task_label({"kind": "own:letters-0123abcd"}), task_label({"kind": "digits"})
    ('letters', 'digits')
    """
    kind = str(task.get("kind", "?"))
    if kind.startswith(OWN):
        return kind.removeprefix(OWN).rpartition("-")[0]
    if is_reference(kind):
        return short_name(kind)
    named = [task[key] for key in PATH_OPTIONS if isinstance(task.get(key), str)]
    return Path(named[0]).name or kind if named else kind


def load_reference(reference: str) -> Any:
    """The object that a reference names; imports its file or module.

    Raises:
        ConfigError: if there is no such file, module or name, or if the import fails, on one line.
    """
    where, _, name = reference.rpartition(":")
    found: Any = load_file(where) if is_file(where) else load_module(where)
    for part in name.split("."):
        if not hasattr(found, part):
            known = [key for key in dir(found) if not key.startswith("_")]
            own = [key for key in known if not isinstance(getattr(found, key, None), ModuleType)]
            raise UnknownName(f"name in {visible(where, 300)}", part, own)
        found = getattr(found, part)
    return found


def load_file(file: str | Path) -> ModuleType:
    """Import a Python file by its path; its folder is put on the path of modules, as Python does for a script.

    Raises:
        ConfigError: if it does not exist, or cannot be imported; names the line.
    """
    path = _absolute(Path(file).expanduser())
    if path in _files:
        return _files[path]
    if not path.is_file():
        raise ConfigError(
            f"there is no file {visible(str(file), 300)}; write the path of a Python file, such as my_task.py"
        )
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = _module_name(path)
    if (known := sys.modules.get(name)) is not None:  # imported by a file beside it
        _files[path] = known
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:  # not for the suffix .py
        raise ConfigError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise failure(error, path) from error
    _files[path] = module
    return module


def failure(error: BaseException, file: Path | str) -> ConfigError:
    """The error of a user's own code as one line, with file and line."""
    if isinstance(error, SyntaxError) and error.filename:
        return ConfigError(f"{visible(error.filename)}, line {error.lineno}: SyntaxError: {visible(str(error.msg))}")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == Path(file)] or frames[-1:]
    at = f"{own[-1].filename}, line {own[-1].lineno}" if own else str(file)
    text = " ".join(str(error).split())
    if isinstance(error, SystemExit):
        why = "it ends Python (sys.exit); write what a script does under `if __name__ == '__main__':`"
    elif isinstance(error, ModuleNotFoundError) and error.name:
        why = f"it needs the module {error.name!r}, which is not installed"
    elif isinstance(error, ConfigError):
        why = text
    else:
        why = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return ConfigError(visible(f"{at}: {why}", 1000))


def source_file(thing: Any) -> str:
    """The file of a function or class, for error messages; "" if it has none."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    code = getattr(thing, "__code__", None)
    return str(getattr(code, "co_filename", None) or getattr(module, "__file__", None) or "")


def _absolute(path: Path) -> Path:
    """The absolute path, without links above the file: one path for one file."""
    return path.absolute().parent.resolve() / path.name


def _where(reference: str) -> str:
    """The file or module of a reference, or the path of a file itself."""
    return reference if is_file(reference) else reference.rpartition(":")[0]


def load_module(name: str) -> ModuleType:
    """Import a module by its name.

    Raises:
        ConfigError: if it does not exist, or cannot be imported; names the file and the line.
    """
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"there is no module {visible(error.name, 200)!r}; install its package, add its folder to PYTHONPATH, "
                "or write the path of a file, such as my_task.py:task"
            ) from error
        raise failure(error, _file_of(name)) from error


def _file_of(module: str) -> str:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return module
    return str(spec.origin) if spec and spec.origin else module


def _module_name(path: Path) -> str:
    """The name by which files beside it import it, if no other module has that name; otherwise one of its own."""
    importlib.invalidate_caches()
    known = sys.modules.get(path.stem)
    origin = getattr(known, "__file__", None) if known is not None else _file_of(path.stem)
    if path.stem.isidentifier() and origin and _absolute(Path(origin)) == path:
        return path.stem
    return f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
