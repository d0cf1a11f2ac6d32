"""Whether measured seconds can be trusted: the share of a run in which its process had a processor.

    share = processor seconds / seconds on the clock, both of `environment.json`, after the first round

A simulation on the CPU keeps at least one processor busy. A share below 80 % shows that other processes took processor
time, so that its seconds are too long. On a GPU, on workers or in a deployment the process waits for others; there,
and for runs without these values, nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.experiments.records import Recorded
from thinwire.reports.evaluation import numbers_of
from thinwire.reports.seed_groups import SeedGroup

QUIET = 0.8  # share of processor time below which a run counts as disturbed
_LOCAL = ("loop", "vmap", "threads", "chain")  # backends that train in the process itself


def processor_share(run: Recorded) -> float | None:
    """The share of a run; None if it is not known or says nothing."""
    facts = run.environment
    if facts.get("device") != "cpu" or facts.get("clients_trained_by") not in _LOCAL:
        return None
    times = numbers_of(facts)
    wall, used = times.get("wall_seconds", 0.0), times.get("processor_seconds", -1.0)
    return used / wall if wall >= 1 and used >= 0 else None  # shorter times are too coarse


def busy_note(groups: Sequence[SeedGroup]) -> str:
    """A note about runs that were disturbed; empty if none is known to be."""
    shares = [(group, share) for group in groups for run in group.runs if (share := processor_share(run)) is not None]
    low = [(group.label, share) for group, share in shares if share < QUIET]
    if not low:
        return ""
    names = ", ".join(dict.fromkeys(label for label, _ in low))
    return (
        f"Note: the seconds of {names} were measured on a busy machine and are too long: a process had a processor for "
        f"only {100 * min(share for _, share in low):.0f} % of the time. Bytes are not affected."
    )
