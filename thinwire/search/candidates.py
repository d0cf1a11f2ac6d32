"""Candidates of sweeps and searches: experiments with other settings, `lr=0.1,0.3`, `density=1/4,1`.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

from thinwire.core.text import visible
from thinwire.errors import ConfigError
from thinwire.federation.settings import Settings
from thinwire.protocol.method import Method
from thinwire.runs.config import to_table
from thinwire.runs.run import settings_of
from thinwire.runs.toml import Table, flat, parse_value

# short key -> the paths of settings that it stands for
_SHORT = {
    "lr": r"method\.client_opt\.lr",
    "server_lr": r"method\.server_opt\.lr",
    "k": r"method\.space\..*\bk",
    "rank": r"method\.(space|next_stage)\..*\brank",
    "density": r"method\.(up|down|mask)\..*\bdensity",
    "bits": r"method\.(up|down)\..*\bbits",
    "rounds": "rounds",
    "cohort": r"cohort\.size",
    "clients": r"task\.clients",
    "epochs": r"local\.epochs",
    "steps": r"local\.steps",
    "batch": r"local\.batch",
}
Make = Callable[[Table], Settings]  # the experiment with further settings by dotted path
Point = tuple[tuple[str, Any], ...]  # name and value of each knob; None leaves its settings as they are


def maker(method: str | Method, on: Any = None, **options: Any) -> Make:
    """The settings of a method on a task, as a function of further settings; see `settings_of`.

    >>> maker("mapo", "digits", rounds=5)({"method.space.k": 64}).method.space.k
    64
    """
    return partial(settings_of, method, on, options)


def makers(
    methods: str | Method | Sequence[str] | Mapping[str, str | Method], on: Any, options: Mapping[str, Any]
) -> dict[str, Make]:
    """The makers of one or several methods by name; those of a mapping are called as there."""
    if isinstance(methods, Mapping):
        return {name: maker(one, on, **{**options, "name": name}) for name, one in methods.items()}
    several = [methods] if isinstance(methods, str | Method) else methods
    return {str(one): maker(one, on, **options) for one in several}


class Knob(NamedTuple):
    """A setting, or several that get the same value: its name in tables, and the values to try."""

    name: str
    paths: tuple[str, ...]
    values: tuple[Any, ...]


def parse_over(texts: Sequence[str]) -> dict[str, list[Any]]:
    """The values of every key of `--over`: numbers, fractions, or any values that `--set` takes.

    >>> parse_over(["lr=0.1,1/4", "method.up=raw,{ kind = 'topk', density = 0.1 }"])
    {'lr': [0.1, 0.25], 'method.up': ['raw', {'kind': 'topk', 'density': 0.1}]}
    """
    out: dict[str, list[Any]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        if not key or not values.strip() or key in out:
            raise ConfigError(
                f"--over takes a key once, with all its values, such as --over lr=0.1,0.3,1, not {visible(text, 80)!r}"
            )
        # at commas that are not within brackets or quotes
        words = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"|'[^']*'|[^,])+", values)
        out[key] = [_value(word.strip()) for word in words if word.strip()]
    return out


def _value(word: str) -> Any:
    value = parse_value(word)
    with suppress(ValueError, ZeroDivisionError, OverflowError):
        return float(Fraction(value)) if isinstance(value, str) else value
    return value


def knobs_of(experiment: Settings, over: Mapping[str, Sequence[Any]]) -> tuple[Knob, ...]:
    """The settings that some keys stand for in an experiment, with their values.

    >>> from thinwire.runs.config import resolve
    >>> knobs_of(resolve("flasc", "instructions"), {"lr": [0.1], "density": [0.5]})[1].paths
    ('method.up.density', 'method.down.density')
    """
    if not isinstance(over, Mapping) or not over:
        raise ConfigError(
            'name at least one setting and its values, such as --over lr=0.1,0.3 or over={"lr": [0.1, 0.3]}'
        )
    known = flat(to_table(experiment))
    knobs = []
    for key, values in over.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"over[{key!r}] must be a list of values, such as [0.1, 0.3], not {values!r}")
        paths = (path for part in str(key).split("+") for path in _paths(part, known, experiment.name))
        knobs.append(Knob(str(key), tuple(paths), tuple(values)))
    paths_of_all = [path for knob in knobs for path in knob.paths]
    for name, given in (*((knob.name, knob.values) for knob in knobs), ("--over", paths_of_all)):
        if twice := [one for i, one in enumerate(given) if one in given[:i]]:
            raise ConfigError(f"{name} has {twice[0]} twice; write it once")
    return tuple(knobs)


def _paths(key: str, known: Mapping[str, Any], name: str) -> list[str]:
    """The dotted paths of a key; raises a ConfigError with the keys that there are."""
    if "." in key:
        return [key]
    found = _found(key, known)
    if not found or (key not in _SHORT and len(found) > 1):
        there = [short for short in _SHORT if short != key and _found(short, known)]
        several = f"; it may be {' or '.join(found)}" if found else ""
        raise ConfigError(
            f"{name} has no setting {visible(repr(key), 80)}{several}; write one of {', '.join(there)}, or a dotted "
            "path such as method.client_opt.lr (`thinwire show` prints all)"
        )
    return found


def _found(key: str, known: Mapping[str, Any]) -> list[str]:
    pattern = _SHORT.get(key, rf"method\..*\b{re.escape(key)}")
    return [path for path in known if re.fullmatch(pattern, path)]


def points(knobs: Sequence[Knob]) -> list[Point]:
    """Every combination of the values.

    >>> points([Knob("a", ("x.a",), (1, 2)), Knob("b", ("b",), (3,))])
    [(('a', 1), ('b', 3)), (('a', 2), ('b', 3))]
    """
    return list(itertools.product(*([(knob.name, value) for value in knob.values] for knob in knobs)))


def start_of(experiment: Settings, knobs: Sequence[Knob]) -> Point:
    """The experiment's own values; None where the settings of a knob differ from each other."""
    known = flat(to_table(experiment))
    own = [[known.get(path) for path in knob.paths] for knob in knobs]
    values = [one[0] if one.count(one[0]) == len(one) else None for one in own]
    return tuple((knob.name, value) for knob, value in zip(knobs, values, strict=True))


def changes(experiment: Settings, knobs: Sequence[Knob], point: Point) -> Table:
    """The settings of a point by dotted path, as overrides; alpha / rank of an adapter stays constant.

    >>> from thinwire.runs.config import resolve
    >>> flasc = resolve("flasc")
    >>> changes(flasc, knobs_of(flasc, {"rank": [4]}), (("rank", 4),))
    {'method.space.alpha': 8.0, 'method.space.rank': 4}
    """
    known, out = flat(to_table(experiment)), {}
    for knob, (_, value) in zip(knobs, point, strict=True):
        for path in knob.paths if value is not None else ():
            alpha, before = path.removesuffix("rank") + "alpha", known.get(path)
            if path.endswith(".rank") and isinstance(known.get(alpha), float) and before:
                out[alpha] = known[alpha] * value / before
            out[path] = value
    return out
