"""Settings to vary, and the values to try: `lr=0.1,0.3`, `method.up.density+method.down.density=1/4,1`.

A short key stands for the settings of that name that an experiment has, in the places below; any other name, such as
`mu`, for the only setting of the method that ends with it. A dotted path names one setting, as in `--set`.

    lr        method.client_opt.lr          rounds    rounds
    server_lr method.server_opt.lr          cohort    cohort.size
    k         method.space.k                clients   task.clients
    rank      method.space, next_stage      epochs    local.epochs
    density   method.up, down, mask         steps     local.steps
    bits      method.up, down               batch     local.batch
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from thinwire.core.text import visible
from thinwire.errors import ConfigError
from thinwire.experiments.experiment import Experiment, to_table
from thinwire.experiments.load import from_table
from thinwire.experiments.overrides import flat, put
from thinwire.experiments.toml import Table, parse_value

Number = int | float
_NUMBER = re.compile(r"[+-]?(\d{1,18}(\.\d{0,18})?|\.\d{1,18})(e[+-]?\d{1,2})?(/\d{1,18})?", re.IGNORECASE)

# short key -> one setting, or the parts of a method in which settings of that name are looked for
_SHORT: dict[str, str | tuple[str, ...]] = {
    "lr": "method.client_opt.lr",
    "server_lr": "method.server_opt.lr",
    "k": ("space",),
    "rank": ("space", "next_stage"),
    "density": ("up", "down", "mask"),
    "bits": ("up", "down"),
    "rounds": "rounds",
    "cohort": "cohort.size",
    "clients": "task.clients",
    "epochs": "local.epochs",
    "steps": "local.steps",
    "batch": "local.batch",
}


class Knob(NamedTuple):
    """A setting, or several that get the same value, the values to try, and its name in tables."""

    paths: tuple[str, ...]
    values: tuple[Any, ...]
    name: str = ""

    @property
    def label(self) -> str:
        """Its name in tables: as given, or the last part of its path."""
        return self.name or self.paths[0].rpartition(".")[2]

    @classmethod
    def parse(cls, text: str) -> Knob:
        """A knob with numbers as values, from the text of a command line.

        >>> Knob.parse("method.up.density+method.down.density=1/4,1").values
        (0.25, 1)
        """
        paths, sign, values = text.partition("=")
        if not sign or not all(paths.split("+")):
            raise ConfigError(f"--knob takes key=value,value,..., such as method.space.rank=1,4,16, not {text!r}")
        return cls(tuple(paths.split("+")), numbers(values, paths))


Knobs = Sequence[Knob]
Point = tuple[Any, ...]  # one value for each knob; None leaves its settings as they are


def numbers(text: str, what: str) -> tuple[Number, ...]:
    """Numbers separated by commas; fractions are allowed.

    >>> numbers("1,4", "ranks"), numbers("1/16,0.25,1", "densities")
    ((1, 4), (0.0625, 0.25, 1))
    """
    try:
        return tuple(_number(one.strip()) for one in text.split(","))
    except (ValueError, ZeroDivisionError) as error:
        given = visible(text, 80)
        raise ConfigError(
            f"{what} must be numbers separated by commas, such as 1,4 or 1/16,1/4, not {given!r}"
        ) from error


def _number(word: str) -> Number:
    if not _NUMBER.fullmatch(word):
        raise ValueError(word)
    exact = Fraction(word)
    return int(exact) if exact.denominator == 1 else float(exact)


def parse_over(texts: Sequence[str]) -> dict[str, list[Any]]:
    """The values of every key of `--over`: numbers, fractions, or any values that `--set` takes.

    >>> parse_over(["lr=0.1,1/4", "method.up=raw,{ kind = 'topk', density = 0.1 }"])
    {'lr': [0.1, 0.25], 'method.up': ['raw', {'kind': 'topk', 'density': 0.1}]}
    """
    out: dict[str, list[Any]] = {}
    for text in texts:
        key, sign, values = text.partition("=")
        if not sign or not key or not values.strip():
            raise ConfigError(
                f"--over takes key=value,value,..., such as --over lr=0.1,0.3,1, not {visible(text, 80)!r}"
            )
        if key in out:
            raise ConfigError(f"--over {key} is given twice; write all its values in one, separated by commas")
        out[key] = [_value(word.strip()) for word in _words(values)]
    return out


def _words(text: str) -> list[str]:
    """The text at commas that are not within brackets or quotes."""
    return [word for word in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"|'[^']*'|[^,])+", text) if word.strip()]


def _value(word: str) -> Any:
    try:
        return _number(word)
    except (ValueError, ZeroDivisionError):
        return parse_value(word)


def knobs_of(experiment: Experiment, over: Mapping[str, Sequence[Any]]) -> tuple[Knob, ...]:
    """The settings that some keys stand for in an experiment, with their values.

    >>> from thinwire.experiments.resolve import resolve
    >>> knobs_of(resolve("flasc"), {"lr": [0.1], "density": [0.5]})[1].paths
    ('method.up.density', 'method.down.density')
    """
    if not isinstance(over, Mapping) or not over:
        raise ConfigError(
            'name at least one setting and its values, such as --over lr=0.1,0.3 or over={"lr": [0.1, 0.3]}'
        )
    table = to_table(experiment)
    known = flat(table)
    knobs = []
    for key, values in over.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"over[{key!r}] must be a list of values, such as [0.1, 0.3], not {values!r}")
        paths = tuple(path for part in str(key).split("+") for path in _paths(part, table, known, experiment.name))
        typed = tuple(_typed(known.get(paths[0]), value, paths[0]) for value in values)
        if twice := [value for i, value in enumerate(typed) if value in typed[:i]]:
            raise ConfigError(f"{key} has the value {twice[0]} twice; write it once")
        knobs.append(Knob(paths, typed, str(key)))
    named = [path for knob in knobs for path in knob.paths]
    if twice := [path for i, path in enumerate(named) if path in named[:i]]:
        raise ConfigError(f"two keys set {twice[0]}; write one of them")
    return tuple(knobs)


def _paths(key: str, table: Table, known: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The dotted paths of a key; raises a ConfigError with the keys that there are."""
    if "." in key:
        setting(table, key)
        return (key,)
    place = _SHORT.get(key)
    if isinstance(place, str):
        found = [place] if place in known else []
    else:
        ends = [path for path in known if path.startswith("method.") and path.rpartition(".")[2] == key]
        found = [path for path in ends if path.split(".")[1] in (place or path.split("."))]
    if not found or (place is None and len(found) > 1):
        there = [short for short in _SHORT if short != key and _has(short, known)]
        several = f"; it may be {' or '.join(found)}" if found else ""
        raise ConfigError(
            f"{name} has no setting {visible(repr(key), 80)}{several}; write one of {', '.join(there)}, or a dotted "
            "path such as method.client_opt.lr (`thinwire show` prints all)"
        )
    return tuple(found)


def _has(key: str, known: Mapping[str, Any]) -> bool:
    place = _SHORT[key]
    if isinstance(place, str):
        return place in known
    return any(path.endswith(f".{key}") and path.split(".")[1] in place for path in known if path.startswith("method."))


def _typed(before: Any, value: Any, path: str) -> Any:
    """A number of the type of the setting: 1 for a setting of 0.3 is 1.0."""
    if isinstance(value, bool) or isinstance(before, bool) or not isinstance(value, int | float):
        return value
    if isinstance(before, int):
        if value != int(value):
            raise ConfigError(f"{path} is a whole number, so {value} cannot be tried; write whole numbers")
        return int(value)
    return float(value) if isinstance(before, float) else value


def points(knobs: Knobs) -> list[Point]:
    """Every combination of the values.

    >>> points([Knob(("a",), (1, 2)), Knob(("b",), (3, 4))])
    [(1, 3), (1, 4), (2, 3), (2, 4)]
    """
    return list(itertools.product(*(knob.values for knob in knobs)))


def start_of(experiment: Experiment, knobs: Knobs) -> Point:
    """The experiment's own values; None where the settings of a knob differ from each other."""
    known = flat(to_table(experiment))
    own = [[known.get(path) for path in knob.paths] for knob in knobs]
    return tuple(values[0] if all(value == values[0] for value in values) else None for values in own)


def changes(experiment: Experiment, knobs: Knobs, point: Point) -> Table:
    """The settings of a point by dotted path, as overrides; alpha / rank of an adapter stays constant.

    >>> from thinwire.experiments.resolve import resolve
    >>> flasc = resolve("flasc")
    >>> changes(flasc, knobs_of(flasc, {"rank": [4]}), (4,))
    {'method.space.alpha': 8.0, 'method.space.rank': 4}
    """
    known, out = flat(to_table(experiment)), {}
    for knob, value in zip(knobs, point, strict=True):
        for path in knob.paths if value is not None else ():
            alpha, before = path.removesuffix("rank") + "alpha", known.get(path)
            if path.endswith(".rank") and isinstance(known.get(alpha), float) and before:
                out[alpha] = known[alpha] * value / before
            out[path] = value
    return out


def set_knob(experiment: Experiment, knob: Knob, value: Number) -> Experiment:
    """The experiment with a knob set to a value."""
    table = to_table(experiment)
    setting_now = setting(table, knob.paths[0])
    for path, now in changes(experiment, [knob], (_typed(setting_now, value, knob.paths[0]),)).items():
        setting(table, path)
        put(table, path, now)
    return from_table(table)


def setting(table: Table, path: str) -> Any:
    """The value of a setting by its dotted path; raises a ConfigError if the experiment has none."""
    here: Any = table
    for part in path.split("."):
        if isinstance(here, list) and part.isdigit() and int(part) < len(here):
            here = here[int(part)]
        elif isinstance(here, dict) and part in here:
            here = here[part]
        else:
            raise ConfigError(
                f"this experiment has no setting {path!r} to search over; `thinwire show` prints them all"
            )
    return here


def point_text(knobs: Knobs, point: Point) -> str:
    """A point for readers.

    >>> point_text([Knob(("method.client_opt.lr",), (), "lr"), Knob(("method.space.k",), ())], (0.3, 64))
    'lr 0.3, k 64'
    """
    return ", ".join(f"{knob.label} {value_text(value)}" for knob, value in zip(knobs, point, strict=True))


def value_text(value: Any) -> str:
    """One value for readers: a number with six digits, the kind of a part, `as it is` for None."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        value = value.get("kind", value)
    return "as it is" if value is None else str(value)
