"""Recipes: training settings for methods that are named, where nothing else states them.

A recipe is a preset (`presets/recipes`). Its `[method]` lies under all other layers of `resolve.py`, its `[task]` on top
of the task preset:

    [method] of the recipe  <-  task preset  <-  [task] of the recipe  <-  method presets  <-  file  <-  command line

In `[method]` a table without a kind holds options for a part of any kind: `client_opt = { clip_norm = 5.0 }` applies to
SGD and Adam alike, and not to an optimizer of a plugin without that option. A table with a kind is used where no part is
stated. A file that states every slot of the recipe (as those of `thinwire show` and of run directories do) is used as it
is: nothing is added.

>>> clipped = {"method": {"client_opt": {"clip_norm": 5.0}}}
>>> under(clipped, {"method": {"client_opt": {"kind": "adam", "lr": 0.01}}})
{'method': {'client_opt': {'clip_norm': 5.0, 'kind': 'adam', 'lr': 0.01}}}
"""

from __future__ import annotations

import inspect
from typing import Any

from thinwire.core.registry import SLOTS, entries
from thinwire.experiments.presets import layer
from thinwire.experiments.toml import Table

DEFAULT = "default"


def under(recipe: Table, stated: Table, file: Table | None = None) -> Table:
    """A table with the method settings of a recipe where it has none.

    Args:
        recipe: the table of the recipe.
        stated: the settings of all other layers.
        file: those of the experiment file alone.
    """
    slots: Table = recipe.get("method", {})
    own = (file or {}).get("method", {})
    if slots and all(_named(own.get(slot)) for slot in slots):
        return stated
    method = stated.get("method", {})
    filled = {slot: _fill(SLOTS[slot], value, method.get(slot)) for slot, value in slots.items()}
    return {**stated, "method": {**method, **filled}} if filled else stated


def keep(recipe: Table, before: Table, after: Table) -> None:
    """Restore options of a recipe in a part that an override replaced without stating them.

    >>> recipe = {"method": {"client_opt": {"clip_norm": 5.0}}}
    >>> before = {"method": {"client_opt": {"kind": "sgd", "lr": 0.1, "clip_norm": 5.0}}}
    >>> after = {"method": {"client_opt": {"kind": "adam"}}}
    >>> keep(recipe, before, after); after
    {'method': {'client_opt': {'clip_norm': 5.0, 'kind': 'adam'}}}
    """
    method = after["method"]
    for slot, options in recipe.get("method", {}).items() if isinstance(method, dict) else ():
        old = before["method"][slot]
        if "kind" not in options and all(old.get(key) == value for key, value in options.items()):
            method[slot] = _fill(SLOTS[slot], options, method.get(slot))


def _named(value: Any) -> bool:
    """Whether a file states a part by its name or kind."""
    return isinstance(value, str) or (isinstance(value, dict) and "kind" in value)


def _fill(kind: str, recipe: Table, stated: Any) -> Any:
    """The table of a part: as stated, over the value of the recipe."""
    if stated is None:
        return recipe
    if "kind" in recipe:
        return stated if _named(stated) or not isinstance(stated, dict) else layer(recipe, stated)
    table = {"kind": stated} if isinstance(stated, str) else stated
    if not isinstance(table, dict):
        return stated  # not a part: `load.py` says so
    entry = entries(kind).get(table.get("kind", ""))
    known = inspect.signature(entry.make).parameters if entry else recipe
    return layer({key: value for key, value in recipe.items() if key in known}, table)
