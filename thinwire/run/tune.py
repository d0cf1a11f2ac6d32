"""Which rank and density FLASC should have, found by a few runs: FLASC-S.

    stage 1   for d in densities:  stop when FLASC(r2, d) beats FLASC(r1, min(1, d r2 / r1)), which costs the same
    stage 2   FLASC(r, d) for all other ranks r

Paper: FLASC, 2024 (its text; the printed algorithm takes the number of the density for that of a rank).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from thinwire.codecs.sparse import TopK
from thinwire.errors import ConfigError
from thinwire.run.build import build_job
from thinwire.run.config import Experiment
from thinwire.spaces.lora import LoRA

N = TypeVar("N", int, float)


class Tried(NamedTuple):
    """One run of the search."""

    rank: int
    density: float
    accuracy: float
    bytes: int
    clipped: bool = False  # d r2 / r1 was above 1: the two runs that were compared did not cost the same


class Found(NamedTuple):
    """The best of the runs with the density that was found, and all runs."""

    rank: int
    density: float
    tried: tuple[Tried, ...]

    @property
    def bytes(self) -> int:
        """What the search cost: the traffic of all runs."""
        return sum(one.bytes for one in self.tried)


Measure = Callable[[int, float], tuple[float, int]]  # rank, density -> accuracy, bytes


def numbers(text: str, kind: Callable[[str], N], what: str) -> tuple[N, ...]:
    """Numbers between commas.

    >>> numbers("1,4", int, "ranks")
    (1, 4)
    """
    try:
        return tuple(kind(one) for one in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{what} must be numbers between commas, such as 1,4, not {text!r}") from error


def search(measure: Measure, ranks: Sequence[int], densities: Sequence[float]) -> Found:
    """The search over anything that can be measured; no rank and density is measured twice.

    Args:
        measure: gives the accuracy and the bytes of a rank and a density.
        ranks: two or more, ascending.
        densities: ascending; 1 is added at the end where it is missing.

    >>> found = search(lambda r, d: (min(r * d, 2.0) + r / 100, int(100 * r * d)), (1, 2, 4), (0.25, 0.5, 1.0))
    >>> found.rank, found.density, found.bytes, len(found.tried)
    (4, 0.25, 200, 3)
    """
    if len(ranks) < 2 or list(ranks) != sorted(set(ranks)) or ranks[0] < 1:
        raise ConfigError(f"ranks must be two or more, ascending, not {list(ranks)}; write for example 1, 4, 16")
    if not densities or list(densities) != sorted(set(densities)) or not 0 < densities[0] <= densities[-1] <= 1:
        raise ConfigError(f"densities must ascend from above 0 to 1, not {list(densities)}")
    tried: dict[tuple[int, float], Tried] = {}

    def run(rank: int, density: float, clipped: bool = False) -> float:
        if (rank, density) not in tried:
            tried[rank, density] = Tried(rank, density, *measure(rank, density), clipped)
        elif clipped:
            tried[rank, density] = tried[rank, density]._replace(clipped=True)
        return tried[rank, density].accuracy

    small, large = ranks[:2]
    density = 1.0
    for d in (*densities, *(() if densities[-1] == 1 else (1.0,))):
        equal = d * large / small
        low = run(small, min(1.0, equal), equal > 1)
        if run(large, d) > low:
            density = d
            break
    best = max(ranks[1:], key=lambda rank: run(rank, density))
    return Found(best, density, tuple(tried.values()))


def tune(
    experiment: Experiment, ranks: Sequence[int], densities: Sequence[float], data_dir: Path | None = None
) -> Found:
    """The search on an experiment such as `resolve("flasc", "digits")`; alpha / rank stays what it is.

    Args:
        experiment: a method with LoRA and `topk` both ways.
        ranks: two or more, ascending.
        densities: of both links, ascending.
        data_dir: the folder of data sets.
    """
    method = experiment.method
    space, up, down = method.space, method.up, method.down
    if not (isinstance(space, LoRA) and isinstance(up, TopK) and isinstance(down, TopK)):
        raise ConfigError("the search changes the rank of lora and the density of topk up and down; start from flasc")

    def measure(rank: int, density: float) -> tuple[float, int]:
        masked = replace(
            method,
            space=replace(space, rank=rank, alpha=space.alpha * rank / space.rank),
            up=replace(up, density=density),
            down=replace(down, density=density),
        )
        records = list(experiment.engine.run(build_job(replace(experiment, method=masked), data_dir)))
        if records[-1].accuracy is None:
            raise ConfigError("the search compares accuracies, but this task has no test examples")
        return records[-1].accuracy, sum(one.bytes_up + one.bytes_down + one.bytes_catchup for one in records)

    return search(measure, ranks, densities)
