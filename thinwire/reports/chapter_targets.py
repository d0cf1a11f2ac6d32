"""Chapters about reaching a target: bytes, and time over slow links."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core.units import human_bytes, human_joules, human_seconds
from thinwire.experiments.link_time import LINKS
from thinwire.reports.charts import Bar, DotRow, PlotArea, bars, dots
from thinwire.reports.formatting import NARROW, byte_interval, ident
from thinwire.reports.objectives import target_text
from thinwire.reports.page import Chapter, Figure, Piece, Table
from thinwire.reports.seed_groups import SeedGroup, TargetCost
from thinwire.reports.svg import shade, swatch
from thinwire.reports.targets import Costs
from thinwire.reports.timing import busy_note

_LEGEND = ((shade(1.0), "up"), (shade(0.55), "down"), (shade(0.0), "catch-up"))
_HEADS = ("method", "total", "ratio", "rounds", "95 % interval", "ideal", "energy", "seeds")


def bytes_chapter(task: str, groups: Sequence[SeedGroup], baseline: SeedGroup, costs: Costs) -> Chapter:
    """Bytes to each target: a bar chart and a table."""
    side = "above" if baseline.objective.higher_is_better else "below"
    pieces: list[Piece] = [
        f"A target is reached in the first evaluated round at or {side} it, for each seed separately. Catch-up is what "
        "clients downloaded because they had missed rounds; the ideal total leaves it out."
    ]
    for target, reached in costs.items():
        title = f"Bytes to reach {target_text(baseline.objective, target)}, {task}"
        if any(reached):
            name = f"{ident(task)}-cost-{target:g}".replace(".", "-")
            pieces.append(_bytes_figure(title, name, groups, reached))
        theirs = reached[groups.index(baseline)]
        rows = [_bytes_row(group, cost, theirs) for group, cost in zip(groups, reached, strict=True)]
        caption = (
            f"{title} (means over the seeds that reached it), and ratio: bytes of {baseline.label} divided by these, "
            "if all seeds reached it"
        )
        pieces.append(Table(caption, _HEADS, rows))
    return Chapter("Bytes to a target", pieces)


def _bytes_figure(title: str, name: str, groups: Sequence[SeedGroup], reached: Sequence[TargetCost | None]) -> Figure:
    drawn = []
    for i, (group, cost) in enumerate(zip(groups, reached, strict=True)):
        if cost is not None:
            some = "" if cost.seeds == len(group.runs) else f" ({cost.seeds} of {len(group.runs)} seeds)"
            segments = [
                (cost.by_direction[way], opacity) for way, opacity in (("up", 1.0), ("down", 0.55), ("catchup", 0.0))
            ]
            drawn.append(Bar(f"{group.label}{some}", human_bytes(cost.bytes.mean), i, segments, cost.spread))
    description = "; ".join(f"{bar.label}: {bar.value}" for bar in drawn) + "."
    area = PlotArea(title, description, "bytes", ident=name)
    several = any(len(group.runs) > 1 for group in groups)
    whisker = " Mean over seeds; the thin line spans the lowest to the highest seed." if several else ""
    note = f"All messages of all clients.{whisker}{_missing(groups, reached)}"
    return Figure(title, note, bars(drawn, area), bars(drawn, area._replace(width=NARROW)), _LEGEND)


def _missing(groups: Sequence[SeedGroup], reached: Sequence[TargetCost | None]) -> str:
    """Which methods are not drawn, as the end of a note."""
    never = [group.label for group, cost in zip(groups, reached, strict=True) if cost is None]
    return f" Never reached by {', '.join(never)}." if never else ""


def _bytes_row(group: SeedGroup, cost: TargetCost | None, baseline: TargetCost | None) -> list[str]:
    seeds = len(group.runs)
    if cost is None:
        return [group.label, "not reached", *["-"] * 5, f"0 of {seeds}"]
    return [
        group.label,
        human_bytes(cost.bytes.mean),
        f"{baseline.bytes.mean / cost.bytes.mean:.3g}x" if baseline and cost.seeds == seeds else "-",
        f"{cost.rounds.mean:.1f}",
        byte_interval(cost.bytes),
        human_bytes(cost.ideal),
        human_joules(cost.joules),
        f"{cost.seeds} of {seeds}",
    ]


def time_chapter(task: str, groups: Sequence[SeedGroup], costs: Costs, compute: float | None) -> Chapter:
    """Modeled time to each target by link: dots for the first target, a table for all.

    Args:
        task: name of the task.
        groups: the methods.
        costs: of each target.
        compute: training seconds of a client per round, if given; otherwise they are measured.
    """
    objective = groups[0].objective
    target, reached = next(iter(costs.items()))
    rows = [
        DotRow(
            link.name,
            [
                (i, cost.seconds[link.name], f"{group.label}: {human_seconds(cost.seconds[link.name])}")
                for i, (group, cost) in enumerate(zip(groups, reached, strict=True))
                if cost
            ],
        )
        for link in LINKS
    ]
    title = f"Time to {target_text(objective, target)} by link, {task}"
    description = "; ".join(f"{row.label}: {', '.join(text for _, _, text in row.dots)}" for row in rows)
    area = PlotArea(title, description, "time (log scale)", ident=f"{ident(task)}-time", x_text=human_seconds)
    figure = Figure(
        title,
        f"Every client has this link. Left is better.{_missing(groups, reached)}",
        dots(rows, area),
        dots(rows, area._replace(width=NARROW)),
        [(swatch(i), group.label) for i, (group, cost) in enumerate(zip(groups, reached, strict=True)) if cost],
    )
    cells = [
        [group.label, target_text(objective, goal), *(human_seconds(cost.seconds[link.name]) for link in LINKS)]
        for goal, goal_costs in costs.items()
        for group, cost in zip(groups, goal_costs, strict=True)
        if cost
    ]
    speeds = [f"{link.down / 1e6:g} / {link.up / 1e6:g}" for link in LINKS]
    caption = "Time to a target by speed, Mbps down / up (means over the seeds that reached it)"
    busy: list[Piece] = [note] if compute is None and (note := busy_note(groups)) else []
    return Chapter("Time over slow links", [*busy, figure, Table(caption, ("method", "target", *speeds), cells)])
