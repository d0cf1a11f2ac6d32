"""Plugins of an experiment: `import = ["my_package", "codec.py"]` in a file, `--import codec.py` on the command line.

Modules that `load_plugins` imports are recorded in the configuration of every run of this process: a resumed run and
the Flower app import them too. Installed plugins (entry point `thinwire.parts`) need no record.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.core import plugins
from thinwire.core.reference import in_folder, is_file
from thinwire.errors import ConfigError

_loaded: list[str] = []


def load_plugins(modules: Sequence[str]) -> None:
    """Import modules that register parts, and record them in the experiments that are resolved from now on.

    Args:
        modules: names of modules, as in an import statement, or paths of Python files.
    """
    _loaded.extend(module for module in read_imports(modules) if module not in _loaded)


def loaded() -> tuple[str, ...]:
    """The modules that `load_plugins` imported."""
    return tuple(_loaded)


def read_imports(value: Any) -> tuple[str, ...]:
    """The modules and files of the key `import` of a file, imported.

    >>> read_imports("my_package")
    Traceback (most recent call last):
    thinwire.errors.ConfigError: import must be a list of modules, such as ["my_package"], not 'my_package'
    """
    if not isinstance(value, list | tuple) or not all(isinstance(module, str) for module in value):
        raise ConfigError(f'import must be a list of modules, such as ["my_package"], not {value!r}')
    # the run directory and the nodes of a deployment have absolute paths
    modules = tuple(in_folder(one, Path.cwd()) if is_file(one) else one for one in value)
    plugins.load(modules)
    return modules
