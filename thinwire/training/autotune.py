"""Which way of training clients is the fastest for this model on this CPU: a short race, whose outcome is kept.

Ways differ by rounding only, but by ten times and more in speed, and which one wins depends on the model: a small
perceptron wants all clients in one program (vmap), convolutions want a client on each core (threads). So each way
trains a few clients for a few steps before the first round, in two heats: two clients, then, for those that were not
far behind, more. The outcome is kept in the process and in the cache folder, by what the time depends on, so that the
same run goes the same way again: the first race decides for all processes of this machine, also for those that start at
the same moment, which wait for it. Where it cannot be kept there is no race, because the next run might go another way.
THINWIRE_PROBE=off leaves the race out, too; clients are then trained by vmap.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np

from thinwire.data.cache import agree_on
from thinwire.errors import Diverged
from thinwire.training.local import Backend, UnsupportedModel

CLIENTS, STEPS = (2, 16), 3  # of a heat
FAR = 4.0  # whoever takes so many times as long as the first is not asked again
CLEAR = 0.9  # a later way must take less than this share of the time to be preferred
SHORT = 0.5  # seconds: what is shorter is measured again

Run = Callable[["Way", int], Any]


class Way(NamedTuple):
    """How to train clients, and whether to use oneDNN."""

    how: Backend
    onednn: bool


class Choice(NamedTuple):
    """The way to go, and why."""

    way: Way
    why: str


_known: dict[str, Choice] = {}


def wanted() -> bool:
    """Whether ways may be measured."""
    return os.environ.get("THINWIRE_PROBE", "").lower() not in ("0", "off")


def choose(what: Sequence[object], hows: Sequence[Backend], onednn: bool, clients: int, run: Run) -> Choice:
    """The fastest way, from memory if it was found before; vmap where it could not be remembered.

    Args:
        what: all that the time depends on, as values that print alike in every process.
        hows: the ways, the one that is preferred among equals first.
        onednn: whether to use oneDNN unless the other is faster.
        clients: how many clients are trained together.
        run: trains so many of them.
    """
    name = hashlib.blake2b("\n".join(map(str, what)).encode(), digest_size=8).hexdigest()
    if name not in _known:

        def make() -> dict[str, np.ndarray]:
            found = _race([Way(how, onednn) for how in hows], clients, run)
            return {key: np.array(value) for key, value in (*found.way._asdict().items(), ("why", found.why))}

        try:
            kept = agree_on(f"way2-{name}", make, _fits)
            _known[name] = Choice(Way(str(kept["how"]), bool(kept["onednn"])), str(kept["why"]))  # type: ignore[arg-type]
        except OSError as error:
            why = f"no race, since its outcome cannot be kept in the cache folder: {first_line(error)}"
            _known[name] = Choice(Way("vmap", onednn), why)
    return _known[name]


def _fits(kept: dict[str, np.ndarray]) -> bool:
    right = set(kept) == {"how", "onednn", "why"} and all(array.ndim == 0 for array in kept.values())
    return right and str(kept["how"]) in get_args(Backend) and kept["onednn"].dtype == bool


def _race(ways: list[Way], clients: int, run: Run) -> Choice:
    """Two heats, and the winner once more with oneDNN the other way round."""
    said: list[str] = []
    took: dict[Way, float] = {}
    warm: set[Way] = set()
    for heat in sorted({min(clients, most) for most in CLIENTS}):
        took = {}
        for way in ways:
            try:
                if way not in warm:  # what torch loads and starts when it first goes this way does not count
                    run(way, heat)
                    warm.add(way)
                took[way] = _seconds(lambda way=way, heat=heat: run(way, heat))  # type: ignore[misc]
            except Diverged:
                raise
            except Exception as error:
                said.append(f"{way.how} failed: {first_line(error)}")
                if isinstance(error, UnsupportedModel) and way.how == "threads":
                    # ways that draw random numbers differ by more than rounding: no race may decide between them
                    return Choice(Way("vmap", way.onednn), said[-1])
        if not took:
            return Choice(Way("loop", ways[0].onednn), "; ".join(said))
        ways = [way for way in took if took[way] <= FAR * min(took.values())]
    best = _first(took)
    other = best._replace(onednn=not best.onednn)
    took[other] = _seconds(lambda: run(other, heat))
    best = _first({best: took[best], other: took[other]})
    times = (f"{way.how}{' with the other oneDNN' if way == other else ''} {s:.3g} s" for way, s in took.items())
    return Choice(best, "; ".join((*said, f"fastest of {', '.join(times)}")))


def _first(took: dict[Way, float]) -> Way:
    """The fastest, or one before it that takes hardly longer."""
    return next(way for way, seconds in took.items() if CLEAR * seconds <= min(took.values()))


def _seconds(run: Callable[[], Any]) -> float:
    """The shortest of three times; of one, where it is long."""
    took: list[float] = []
    while len(took) < 3 and (not took or took[-1] < SHORT):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return min(took)


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
