"""Plugins: packages that register parts of their own.

    [project.entry-points."thinwire.parts"]        in the pyproject.toml of the plugin
    my_parts = "my_package.parts"                  a module whose import calls thinwire.register

Installed plugins are imported once, when a name is first looked up or listed. A plugin that fails to import is left out
with a warning; its registrations are undone. Modules and files without an entry point: `load`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import metadata

from thinwire.core import registry
from thinwire.core.reference import is_file, load_file, load_module
from thinwire.core.text import visible
from thinwire.errors import ConfigError

GROUP = "thinwire.parts"

_installed = False  # whether installed plugins were imported
_imported: list[str] = []  # modules that `load` imported


def load(modules: Sequence[str]) -> None:
    """Import modules that register parts; a module that was imported before is not imported again.

    Args:
        modules: names of modules, as in an import statement, or paths of Python files.

    Raises:
        ConfigError: if a module cannot be imported, or registers a name that is taken.
    """
    for module in modules:
        if module in _imported:
            continue
        if why := _import(module):
            what = "file" if is_file(module) else "module"
            raise ConfigError(f"{what} {visible(module, 200)!r} cannot be imported as a plugin: {why}")
        _imported.append(module)


def load_installed() -> None:
    """Import every installed plugin, once; a plugin that fails is left out with a warning."""
    global _installed
    if _installed:
        return
    _installed = True  # first: a plugin may look up names while it is imported
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        if why := _import(point.module):
            package = point.dist.name if point.dist else "?"
            warnings.warn(
                visible(f"plugin {point.name!r} of the package {package!r} was not loaded: {why}"), stacklevel=3
            )


def _import(module: str) -> str:
    """Import a module; returns why it failed, on one line, or ""."""
    before = registry.foreign()
    try:
        load_file(module) if is_file(module) else load_module(module)
    except ConfigError as error:
        registry.unregister(registry.foreign() - before)
        return str(error)
    return ""


registry.before_lookup.append(load_installed)
