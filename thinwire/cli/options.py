"""Arguments that several verbs share; `verb` gives a verb the options of a run, as `tw.run` takes them."""

from __future__ import annotations

import inspect
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
        from thinwire.runs.plugins import load

        load(list(modules))


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
    typer.Option("--log", metavar="TRACKER", help="Also log every round to a tracker: tensorboard or mlflow."),
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


def verb(*without: str) -> Callable[[Verb], Verb]:
    """Give a verb with `**options` a flag for each option of a run; one that is not given is None.

    Args:
        *without: options that the verb does not have.
    """
    flags = {name: _flag(name) for name, (_, at) in OPTIONS.items() if at.flag != PYTHON_ONLY and name not in without}
    flags["imports"] = Imports

    def decorate(function: Verb) -> Verb:
        own = inspect.signature(function, eval_str=True).parameters.values()
        named = [one for one in own if one.kind is not one.VAR_KEYWORD]
        known = {one.name for one in named}
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
            for name, hint in flags.items()
            if name not in known
        ]
        function.__signature__ = inspect.Signature([*named, *more])  # type: ignore[attr-defined]
        function.__annotations__ = {one.name: one.annotation for one in (*named, *more)}
        return function

    return decorate
