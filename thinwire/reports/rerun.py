"""The shortest command that repeats a run."""

from __future__ import annotations

import shlex
from pathlib import Path

from thinwire.core.reference import from_here
from thinwire.errors import ThinwireError
from thinwire.experiments.config import DEFAULT, digest, from_table, parse_overrides, resolve, to_table
from thinwire.experiments.presets import presets
from thinwire.experiments.task_files import OWN, names_new_code
from thinwire.experiments.toml import Table as TomlTable, value_words

_OPTIONS = {
    "rounds": "--rounds",
    "seed": "--seed",
    "task.clients": "--clients",
    "cohort.size": "--cohort",
    "engine.device": "--device",
}


def rerun(table: TomlTable, path: Path) -> str:
    """The command that resolves to a configuration, or else one that reads its file.

    Args:
        table: the contents of `config.toml`.
        path: the run directory.

    >>> table = to_table(resolve("mapo", "digits", {"rounds": 5, "method.space.k": 64}))
    >>> rerun(table, Path("runs/x"))
    'thinwire run mapo --on digits --rounds 5 --set method.space.k=64'
    >>> rerun(to_table(resolve("mapo", "digits", recipe="paper")), Path("runs/x"))
    'thinwire run mapo --on digits --recipe paper'
    """
    if "script" in table:
        return shlex.join(["python", str(table["script"])])
    if str(table.get("task", {}).get("kind", "")).startswith(OWN):
        return "python your_script.py"
    from_file = shlex.join(["thinwire", "run", str(path / "config.toml"), "--out", f"{path}-again"])
    if names_new_code(table):  # a page does not import the files of a run
        return from_file
    try:
        wanted = to_table(from_table(table))
        imports = wanted.pop("import", [])
        wanted.pop("fingerprint", None)
        found = [words for recipe in presets("recipes") if (words := _command(wanted, recipe))]
    except ThinwireError:
        return from_file
    if not found:
        return from_file
    return shlex.join([*min(found, key=len), *(word for module in imports for word in ("--import", module))])


def _command(wanted: TomlTable, recipe: str) -> list[str] | None:
    """The words of a command with a recipe; None where no command resolves to the configuration."""
    name, task = wanted["name"], wanted["task"]["kind"]
    changes = _changes(to_table(resolve(name, task, recipe=recipe)), wanted)
    settings = parse_overrides([f"{key}={value}" for key, value in changes.items()])
    if resolve(name, task, settings, recipe).digest() != digest(wanted):
        return None
    words = ["thinwire", "run", name, "--on", from_here(task), *(("--recipe", recipe) if recipe != DEFAULT else ())]
    for key, value in changes.items():
        words += [_OPTIONS[key], value.strip('"')] if key in _OPTIONS else ["--set", f"{key}={value}"]
    return words


def _changes(base: TomlTable, wanted: TomlTable, under: str = "") -> dict[str, str]:
    """Values to set, as TOML, by dotted path."""
    changes: dict[str, str] = {}
    for key, value in wanted.items():
        before = base.get(key)
        if before == value:
            continue
        if isinstance(value, dict) and isinstance(before, dict) and value.get("kind") == before.get("kind"):
            changes.update(_changes(before, value, f"{under}{key}."))
        else:
            changes[f"{under}{key}"] = value_words(value)
    return changes
