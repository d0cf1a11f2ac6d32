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
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

from thinwire.core.text import visible
from thinwire.errors import ConfigError
from thinwire.federation.settings import Settings
from thinwire.protocol.method import Method
from thinwire.reports.chapters import setting_text
from thinwire.runs.config import to_table
from thinwire.runs.run import settings_of
from thinwire.runs.toml import Table, flat, parse_value

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
Make = Callable[[Table], Settings]  # the experiment with further settings by dotted path


def maker(method: str | Method, on: Any = None, **options: Any) -> Make:
    """The settings of a method on a task, as a function of further settings; see `settings_of`.

    >>> maker("mapo", "digits", rounds=5)({"method.space.k": 64}).method.space.k
    64
    """
    return partial(settings_of, method, on, options)


class Knob(NamedTuple):
    """A setting, or several that get the same value, the values to try, and its name in tables."""

    paths: tuple[str, ...]
    values: tuple[Any, ...]
    name: str = ""

    @property
    def label(self) -> str:
        """Its name in tables: as given, or the last part of its path."""
        return self.name or self.paths[0].rpartition(".")[2]


Knobs = Sequence[Knob]
Point = tuple[Any, ...]  # one value for each knob; None leaves its settings as they are


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
        # at commas that are not within brackets or quotes
        words = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"|'[^']*'|[^,])+", values)
        out[key] = [_value(word.strip()) for word in words if word.strip()]
    return out


def _value(word: str) -> Any:
    if not _NUMBER.fullmatch(word):
        return parse_value(word)
    try:
        exact = Fraction(word)
    except ZeroDivisionError:
        return parse_value(word)
    return int(exact) if exact.denominator == 1 else float(exact)


def knobs_of(experiment: Settings, over: Mapping[str, Sequence[Any]]) -> tuple[Knob, ...]:
    """The settings that some keys stand for in an experiment, with their values.

    >>> from thinwire.runs.config import resolve
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
    found = _short(key, known)
    if not found or (key not in _SHORT and len(found) > 1):
        there = [short for short in _SHORT if short != key and _short(short, known)]
        several = f"; it may be {' or '.join(found)}" if found else ""
        raise ConfigError(
            f"{name} has no setting {visible(repr(key), 80)}{several}; write one of {', '.join(there)}, or a dotted "
            "path such as method.client_opt.lr (`thinwire show` prints all)"
        )
    return tuple(found)


def _short(key: str, known: Mapping[str, Any]) -> list[str]:
    """The settings that a short key may stand for."""
    place = _SHORT.get(key)
    if isinstance(place, str):
        return [place] if place in known else []
    ends = [path for path in known if path.startswith("method.") and path.endswith(f".{key}")]
    return [path for path in ends if place is None or path.split(".")[1] in place]


def _typed(before: Any, value: Any, path: str) -> Any:
    """A number of the type of the setting: 1 for a setting of 0.3 is 1.0."""
    if isinstance(value, bool) or isinstance(before, bool) or not isinstance(value, int | float):
        return value
    if isinstance(before, int):
        if not float(value).is_integer():
            raise ConfigError(f"{path} is a whole number, so {value} cannot be tried; write whole numbers")
        return int(value)
    return float(value) if isinstance(before, float) else value


def points(knobs: Knobs) -> list[Point]:
    """Every combination of the values.

    >>> points([Knob(("a",), (1, 2)), Knob(("b",), (3, 4))])
    [(1, 3), (1, 4), (2, 3), (2, 4)]
    """
    return list(itertools.product(*(knob.values for knob in knobs)))


def start_of(experiment: Settings, knobs: Knobs) -> Point:
    """The experiment's own values; None where the settings of a knob differ from each other."""
    known = flat(to_table(experiment))
    own = [[known.get(path) for path in knob.paths] for knob in knobs]
    return tuple(values[0] if all(value == values[0] for value in values) else None for values in own)


def changes(experiment: Settings, knobs: Knobs, point: Point) -> Table:
    """The settings of a point by dotted path, as overrides; alpha / rank of an adapter stays constant.

    >>> from thinwire.runs.config import resolve
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


def rate_key(experiment: Settings) -> str:
    """The learning rate that decides how far a round moves: the clients', or the server's where that alone does.

    Adam, Yogi and Adagrad normalize the mean update of the clients, and a sketch (EvoFed) sends ranks: there the
    clients' rate hardly changes the length of the server's step. The posterior of FedPM has no rate to search.

    >>> from thinwire.runs.config import resolve
    >>> rate_key(resolve("fedavg")), rate_key(resolve("fedavgm")), rate_key(resolve("fedadam"))
    ('method.client_opt.lr', 'method.client_opt.lr', 'method.server_opt.lr')
    """
    normalized = to_table(experiment)["method"]["server_opt"]["kind"] not in ("sgd", "beta-posterior")
    return f"method.{'server' if normalized or not experiment.method.sketch.is_identity else 'client'}_opt.lr"


def as_point(value: Any) -> Point:
    """A candidate as one value for each knob: a rate is the only one."""
    return value if isinstance(value, tuple) else (value,)


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
    """A point as text.

    >>> point_text([Knob(("method.client_opt.lr",), (), "lr"), Knob(("method.space.k",), ())], (0.3, 64))
    'lr 0.3, k 64'
    """
    return ", ".join(f"{knob.label} {value_text(value)}" for knob, value in zip(knobs, point, strict=True))


def value_text(value: Any) -> str:
    """One value as text: the kind of a part, `as it is` for None."""
    return "as it is" if value is None else setting_text(value.get("kind", value) if isinstance(value, dict) else value)
