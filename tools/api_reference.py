"""The API reference as Markdown pages, from the docstrings of the public names of `thinwire`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import thinwire
from tools.docstrings import escaped, first_sentence, to_markdown

TOP = "thinwire"  # the page of names that belong to no public module


def api_pages() -> dict[str, str]:
    """The Markdown of each page by its path below `docs`."""
    modules = {name: getattr(thinwire, name) for name in thinwire.__all__ if inspect.ismodule(getattr(thinwire, name))}
    pages = {f"api/{name}.md": _module_page(f"thinwire.{name}", module) for name, module in modules.items()}
    own = {name: value for name, value in _top_names().items() if _home(name, modules) == TOP}
    pages[f"api/{TOP}.md"] = _page("thinwire", "Names of the package that belong to none of the modules below.", own)
    pages["api/index.md"] = _index(modules)
    return pages


def _top_names() -> dict[str, Any]:
    """Every public name of the package that is not a module."""
    names = {name: getattr(thinwire, name) for name in thinwire.__all__}
    return {name: value for name, value in names.items() if not inspect.ismodule(value) and not name.startswith("_")}


def _home(name: str, modules: dict[str, ModuleType]) -> str:
    """The page that describes a public name: the module that exports the same object, or the page of the package."""
    value = getattr(thinwire, name)
    return next((page for page, module in modules.items() if dict(_members(module)).get(name) is value), TOP)


def _members(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The documented classes and functions that a module exports."""
    for name in getattr(module, "__all__", None) or sorted(vars(module), key=str.lower):
        value = getattr(module, name)
        ours = getattr(value, "__module__", "").startswith("thinwire.")
        if not name.startswith("_") and ours and (inspect.isclass(value) or inspect.isfunction(value)):
            yield name, value


def _index(modules: dict[str, ModuleType]) -> str:
    """The package docstring and a table of all public names."""
    rows = ["| name | |", "|---|---|"]
    rows += [f"| [`{name}`]({name}.md) | {first_sentence(module.__doc__)} |" for name, module in modules.items()]
    for name, value in _top_names().items():
        page = _home(name, modules)
        rows.append(f"| [`{name}`]({page}.md#{_anchor(page, name)}) | {_summary(value)} |")
    return f"# Python API\n\n{to_markdown(thinwire.__doc__)}\n\n" + "\n".join(rows) + "\n"


def _summary(value: Any) -> str:
    return first_sentence(value.__doc__) if inspect.isclass(value) or inspect.isfunction(value) else f"`{value}`"


def _anchor(page: str, name: str) -> str:
    return f"thinwire.{name}" if page == TOP else f"thinwire.{page}.{name}"


def _module_page(title: str, module: ModuleType) -> str:
    return _page(title, to_markdown(module.__doc__), dict(_members(module)))


def _page(title: str, text: str, names: dict[str, Any]) -> str:
    """A page with one section for each name."""
    parts = [f"# {title}", text]
    for name, value in names.items():
        parts += [f"## {escaped(name)} {{#{title}.{name}}}", *_described(name, value)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _described(name: str, value: Any) -> list[str]:
    """Signature and docstring of an object; of a class also those of its own public methods."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return [f"```python\n{name} = {value}\n```"]
    parts = [_code(signature(name, value)), to_markdown(value.__doc__)]
    for key, member in vars(value).items() if inspect.isclass(value) else ():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if key.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        head = key if isinstance(member, property) else signature(key, function)
        parts += [f"### {escaped(name)}.{escaped(key)}", _code(head), to_markdown(function.__doc__)]
    return parts


def signature(name: str, value: Any, width: int = 100) -> str:
    """The call of a function or class with its defaults, on several lines if it is long.

    >>> signature("f", lambda x, y=1: x)
    'f(x, y=1)'
    """
    try:
        found = inspect.signature(value)
    except ValueError:  # a class without a signature of its own
        return name
    shown = [p for p in found.parameters.values() if p.name not in ("self", "cls") and not p.name.startswith("_")]
    given = [re.sub(r": '(.*?)'(?= = |$)", r": \1", str(p)) for p in shown]  # annotations are strings
    kinds = [p.kind for p in shown]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        given.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    line = f"{name}({', '.join(given)})"
    return line if len(line) <= width else f"{name}(\n    " + ",\n    ".join(given) + ",\n)"


def _code(text: str) -> str:
    return f"```python\n{text}\n```"
