"""Plugins of an experiment: `import = ["my_package", "codec.py"]` in a file, `--import codec.py` on the command line.

Modules that are loaded here are recorded in the configuration of every run of this process, so that a resumed run and
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


def load(modules: Sequence[str]) -> None:
    """Import modules that register parts, and record them in the experiments that are resolved from now on.

    Args:
        modules: names of modules, as in an import statement, or paths of Python files.
    """
    modules = _absolute(modules)
    plugins.load(modules)
    _loaded.extend(module for module in modules if module not in _loaded)


load_plugins = load  # the name in the public interface: tw.load_plugins


def loaded() -> tuple[str, ...]:
    """The modules that `load` imported."""
    return tuple(_loaded)


def read_imports(value: Any) -> tuple[str, ...]:
    """The modules and files of the key `import` of a file, imported.

    >>> read_imports("my_package")
    Traceback (most recent call last):
    thinwire.errors.ConfigError: import must be a list of modules, such as ["my_package"], not 'my_package'
    """
    if not isinstance(value, list | tuple) or not all(isinstance(module, str) for module in value):
        raise ConfigError(f'import must be a list of modules, such as ["my_package"], not {value!r}')
    modules = _absolute(value)
    plugins.load(modules)
    return tuple(modules)


def _absolute(modules: Sequence[str]) -> list[str]:
    """Paths of files made absolute: the run directory and the nodes of a deployment have them."""
    return [in_folder(one, Path.cwd()) if is_file(one) else one for one in modules]
