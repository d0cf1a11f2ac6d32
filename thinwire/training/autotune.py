"""Choice of the fastest training backend for a model on a CPU: a short measurement, whose result is cached.

Backends differ by rounding only, but by ten times and more in speed, and which one is fastest depends on the model:
small perceptrons train fastest in one vectorized program (vmap), convolutional networks with a client on each core
(threads). So each backend trains a few clients for a few steps before the first round, in two heats: two clients, then
more for those that were not far behind. The result is kept in the process and in the cache folder, by everything that
the time depends on, so that the same run uses the same backend again: the first measurement decides for all processes
of this machine, also for those that start at the same moment, which wait for it. If it cannot be stored, nothing is
measured, because the next run might choose differently. THINWIRE_PROBE=off also disables it; clients are then trained
by vmap.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np

from thinwire.data.cache import measured_once
from thinwire.errors import Diverged
from thinwire.training.inputs import Backend, UnsupportedModel

CLIENTS, STEPS = (2, 16), 3  # of a heat
FAR = 4.0  # slower than the fastest by this factor: not measured again
CLEAR = 0.9  # a later one must take less than this fraction of the time to be preferred
SHORT = 0.5  # seconds: shorter measurements are repeated

Run = Callable[["Configuration", int], Any]


class Configuration(NamedTuple):
    """A backend, and whether to use oneDNN."""

    backend: Backend
    onednn: bool


class Choice(NamedTuple):
    """The configuration to use, and the reason."""

    configuration: Configuration
    reason: str


_known: dict[str, Choice] = {}


def is_enabled() -> bool:
    """Whether backends may be measured."""
    return os.environ.get("THINWIRE_PROBE", "").lower() not in ("0", "off")


def choose(
    key: Sequence[object], backends: Sequence[Backend], onednn: Sequence[bool], clients: int, run: Run
) -> Choice:
    """The fastest configuration, from the cache if it was measured before; vmap where it cannot be stored.

    Args:
        key: everything that the time depends on, as values that print alike in every process.
        backends: the backends, the preferred one first.
        onednn: whether to use oneDNN; a second choice is tried with the fastest backend.
        clients: number of clients trained together.
        run: trains this number of clients.
    """
    name = hashlib.blake2b("\n".join(map(str, key)).encode(), digest_size=8).hexdigest()
    if name not in _known:

        def make() -> dict[str, np.ndarray]:
            found = _measure(backends, onednn, clients, run)
            values = (*found.configuration._asdict().items(), ("reason", found.reason))
            return {key: np.array(value) for key, value in values}

        try:
            kept = measured_once(f"backend-{name}", make, _is_valid)
            backend: Any = str(kept["backend"])
            _known[name] = Choice(Configuration(backend, bool(kept["onednn"])), str(kept["reason"]))
        except OSError as error:
            reason = f"not measured, because the result cannot be stored in the cache folder: {first_line(error)}"
            _known[name] = Choice(Configuration("vmap", onednn[0]), reason)
    return _known[name]


def _is_valid(kept: dict[str, np.ndarray]) -> bool:
    right = set(kept) == {"backend", "onednn", "reason"} and all(array.ndim == 0 for array in kept.values())
    return right and str(kept["backend"]) in get_args(Backend) and kept["onednn"].dtype == bool


def _measure(backends: Sequence[Backend], onednn: Sequence[bool], clients: int, run: Run) -> Choice:
    """Two heats, and the fastest once more with the other choice of oneDNN, if there is one."""
    configurations = [Configuration(backend, onednn[0]) for backend in backends]
    failed: list[str] = []
    took: dict[Configuration, float] = {}
    warm: set[Configuration] = set()
    for heat in sorted({min(clients, most) for most in CLIENTS}):
        took = {}
        for one in configurations:
            try:
                if one not in warm:  # what torch loads at the first use does not count
                    run(one, heat)
                    warm.add(one)
                took[one] = _seconds(lambda one=one, heat=heat: run(one, heat))  # type: ignore[misc]
            except Diverged:
                raise
            except Exception as error:
                failed.append(f"{one.backend} failed: {first_line(error)}")
                if isinstance(error, UnsupportedModel) and one.backend == "threads":
                    # with random layers backends differ by more than rounding: speed must not decide
                    return Choice(Configuration("vmap", one.onednn), failed[-1])
        if not took:
            return Choice(Configuration("loop", configurations[0].onednn), "; ".join(failed))
        configurations = [one for one in took if took[one] <= FAR * min(took.values())]
    best = _fastest(took)
    usual = best
    for other in (best._replace(onednn=choice) for choice in onednn[1:]):
        took[other] = _seconds(lambda other=other: run(other, heat))  # type: ignore[misc]
        best = _fastest({usual: took[usual], other: took[other]})
    label = {usual.onednn: "", (not usual.onednn): " with the other oneDNN"}
    times = (f"{one.backend}{label[one.onednn]} {s:.3g} s" for one, s in took.items())
    return Choice(best, "; ".join((*failed, f"fastest of {', '.join(times)}")))


def _fastest(took: dict[Configuration, float]) -> Configuration:
    """The fastest, or one before it that takes hardly longer."""
    return next(one for one, seconds in took.items() if CLEAR * seconds <= min(took.values()))


def _seconds(run: Callable[[], Any]) -> float:
    """The shortest of three times; of one, where it is long."""
    took: list[float] = []
    while len(took) < 3 and (not took or took[-1] < SHORT):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return min(took)


def first_line(error: BaseException) -> str:
    """The first line of an error message."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
