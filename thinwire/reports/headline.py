"""The main result of a page in one sentence: bytes to reach a target, against FedAvg with its best settings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from thinwire.core.units import human_bytes
from thinwire.reports.objectives import objective_name, target_text
from thinwire.reports.seed_groups import SeedGroup
from thinwire.reports.targets import Costs
from thinwire.reports.yardstick import METHOD, Saving, best_group


def headline(groups: Sequence[SeedGroup], baseline: SeedGroup, costs: Costs) -> str:
    """Who reaches the best target that the baseline also reaches with the fewest bytes; else bytes at the end."""
    place = groups.index(baseline)
    for target in sorted(costs, reverse=baseline.objective.higher_is_better):
        theirs = costs[target][place]
        able = [
            (cost.bytes.mean, group)
            for group, cost in zip(groups, costs[target], strict=True)
            if cost and cost.seeds == len(group.runs) and not group.failed  # a collapsed run lost what it had reached
        ]
        if theirs is None or len(able) < 2:
            continue
        least, best = min(able, key=lambda pair: pair[0])
        goal = target_text(baseline.objective, target)
        start = f"Fewest bytes to reach {goal}: {best.label}, {human_bytes(least)} in total"
        if best is baseline:
            return f"{start}."
        sooner = [(sent, one.label) for sent, one in able if one.runs[0].name == METHOD and one is not best]
        sent, label = min(sooner, default=(theirs.bytes.mean, ""))
        also = f" {label} reached it with {human_bytes(sent)}." if sent < theirs.bytes.mean else ""
        return f"{start}, {_times_fewer(best, baseline, target)}.{also}"
    return _at_the_end(groups, baseline)


def _at_the_end(groups: Sequence[SeedGroup], baseline: SeedGroup) -> str:
    """Bytes of all rounds of the best other method, for pages without a common target."""
    others = [one for one in groups if one is not baseline and not one.failed and one.best]
    others = [one for one in others if one.runs[0].name != METHOD]
    if not others or baseline.best is None or baseline.failed:
        return ""
    best = best_group(others)
    assert best.best
    text, sent = baseline.objective.text, statistics.fmean(best.bytes_by_seed(None).values())
    return (
        f"{best.label} and {baseline.label} reached no target together. At the end {best.label} has sent "
        f"{human_bytes(sent)}, {_times_fewer(best, baseline, None)}; best {objective_name(baseline.objective)} "
        f"{text(best.best.mean)} against {text(baseline.best.mean)}."
    )


def _times_fewer(group: SeedGroup, baseline: SeedGroup, target: float | None) -> str:
    """How many times fewer bytes than the baseline, or more, with its interval."""
    ours, theirs = group.bytes_by_seed(target), baseline.bytes_by_seed(target)
    saving, word = Saving.of(theirs, ours), "fewer"
    if saving and saving.factor < 1:
        saving, word = Saving.of(ours, theirs), "more"
    total = human_bytes(statistics.fmean(theirs.values()))
    if saving is None:
        return f"compared with {total} of {baseline.label}"
    factor = f"{saving.factor:.3g} times {word} than" if f"{saving.factor:.3g}" != "1" else "as many as"
    return f"{factor} {baseline.label} ({total}; {saving.text})"
