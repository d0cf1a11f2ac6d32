"""Recipes: training settings for methods that are named, where nothing else states them.

A recipe is a preset (`presets/recipes`). Its `[method]` lies under all other layers of `resolve.py`, its `[task]` over
the task preset:

    [method] of the recipe  <-  task preset  <-  [task] of the recipe  <-  method presets  <-  file  <-  command line

In `[method]` a table without a kind holds options for a part of any kind: `client_opt = { clip_norm = 5.0 }` applies to
SGD and Adam alike, and not to an optimizer of a plugin without that option. A table with a kind is used where no part
is stated. A file that states every slot of the recipe (as those of `thinwire show` and of run directories do) is used
as it is: nothing is added.

>>> clipped = {"method": {"client_opt": {"clip_norm": 5.0}}}
>>> under(clipped, {"method": {"client_opt": {"kind": "adam", "lr": 0.01}}})
{'method': {'client_opt': {'clip_norm': 5.0, 'kind': 'adam', 'lr': 0.01}}}
"""

from __future__ import annotations

import inspect
from typing import Any

from thinwire.core.registry import SLOTS, entries
from thinwire.experiments.parts import describe
from thinwire.experiments.presets import layer
from thinwire.experiments.toml import Table
from thinwire.protocol.method import Method

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
    if slots and all(slot in own and not _is_options(own[slot]) for slot in slots):
        return stated
    method = stated.get("method", {})
    filled = {slot: _fill(slot, value, method.get(slot)) for slot, value in slots.items()}
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
            method[slot] = _fill(slot, options, method.get(slot))


def _is_options(value: Any) -> bool:
    """Whether a table has options for a part that is named elsewhere."""
    return isinstance(value, dict) and "kind" not in value


def _fill(slot: str, recipe: Table, stated: Any) -> Any:
    """The table of a part: as stated, over the value of the recipe."""
    kind = SLOTS[slot]
    if "kind" in recipe:
        return recipe if stated is None else layer(recipe, stated) if _is_options(stated) else stated
    if stated is None:
        stated = describe(kind, getattr(Method, slot))
    table = {"kind": stated} if isinstance(stated, str) else stated
    if not isinstance(table, dict):
        return stated  # not a part: `load.py` refuses it
    entry = entries(kind).get(str(table.get("kind")))
    known = inspect.signature(entry.make).parameters if entry else recipe
    return layer({key: value for key, value in recipe.items() if key in known}, table)
