"""Arguments that several verbs share, and how functions become verbs.

`documented` makes the flags of a verb from its parameters, with the help that is in its docstring under `Options:`;
`verb` also gives it the options of a run, as `tw.run` takes them.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import typer

from thinwire.runs.options import OPTIONS, PYTHON_ONLY

Verb = TypeVar("Verb", bound=Callable[..., Any])


def import_modules(modules: Sequence[str] | None) -> None:
    """Import packages that register parts, so that their names are known to the verb."""
    if modules:
        from thinwire.runs.plugins import load_plugins

        load_plugins(modules)


Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE|FILE.py",
        callback=import_modules,
        is_eager=True,
        help="Import a Python module or file that registers methods, codecs or other parts; may be repeated.",
    ),
]
Method = Annotated[
    str,
    typer.Argument(
        metavar="METHOD_OR_FILE", help="A method (`thinwire list`), several methods joined by +, or a .toml file."
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="TASK",
        help="The task (`thinwire list tasks`), or your own: my_task.py:task, task.toml, data.csv.",
    ),
]
RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", envvar="THINWIRE_DATA", help="Folder that holds the datasets.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")]
Log = Annotated[
    str | None,
    typer.Option("--log", metavar="TRACKER", help=OPTIONS["log"][1].help),
]
Jobs = Annotated[
    int, typer.Option("--jobs", min=1, help="Number of runs at a time, each in a process with a GPU of its own if any.")
]
Targets = Annotated[
    list[float] | None,
    typer.Option(
        "--target",
        metavar="VALUE",
        help="Compare the cost of reaching this value of the objective, such as an accuracy of 0.8; may be repeated.",
    ),
]


def _flag(name: str) -> Any:
    """The flag of an option of a run."""
    hint, at = OPTIONS[name]
    if name == "data_dir":
        return DataDir
    flag = at.flag or f"--{name.replace('_', '-')}"
    if name in ("set", "metrics"):  # they may be repeated
        metavar = "KEY=VALUE" if name == "set" else "NAME"
        return Annotated[list[str] | None, typer.Option(flag, metavar=metavar, help=at.help)]
    kind = get_args(hint)[0] if get_origin(hint) in (Union, types.UnionType) else hint
    return Annotated[kind | None, typer.Option(flag, help=at.help)]


def documented(function: Verb) -> Verb:
    """Make flags of the parameters that have a line under `Options:` in the docstring, and arguments without a default.

    >>> @documented
    ... def start(folder: Path, nodes: int = 4):
    ...     '''Start.
    ...
    ...     Options:
    ...         folder: A new folder.
    ...         nodes: Number of nodes.
    ...     '''
    >>> start.__doc__.strip(), inspect.signature(start).parameters["nodes"].annotation.__metadata__[0].help
    ('Start.', 'Number of nodes.')
    """
    function.__doc__, _, lines = (function.__doc__ or "").partition("Options:\n")
    helps = dict(re.findall(r"^ +(\w+): (.+(?:\n {12}.+)*)", lines, re.MULTILINE))
    own = []
    for one in inspect.signature(function, eval_str=True).parameters.values():
        if (text := " ".join(helps.get(one.name, "").split())) and one.default is one.empty:
            one = one.replace(annotation=Annotated[one.annotation, typer.Argument(metavar=one.name.upper(), help=text)])
        elif text:
            option = typer.Option(f"--{one.name.replace('_', '-')}", help=text)
            one = one.replace(annotation=Annotated[one.annotation, option])
        own.append(one)
    return _signed(function, own)


def verb(*without: str) -> Callable[[Verb], Verb]:
    """Give a verb with `**options` a flag for each option of a run; one that is not given is None.

    Args:
        *without: options that the verb does not have.
    """
    flags = {name: _flag(name) for name, (_, at) in OPTIONS.items() if at.flag != PYTHON_ONLY and name not in without}
    flags["imports"] = Imports

    def decorate(function: Verb) -> Verb:
        *own, _ = inspect.signature(documented(function)).parameters.values()
        known = {one.name for one in own}
        keyword = inspect.Parameter.KEYWORD_ONLY
        new = (inspect.Parameter(name, keyword, default=None, annotation=flags[name]) for name in flags)
        return _signed(function, [*own, *(one for one in new if one.name not in known)])

    return decorate


def _signed(function: Verb, parameters: Sequence[inspect.Parameter]) -> Verb:
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {one.name: one.annotation for one in parameters}
    return function
