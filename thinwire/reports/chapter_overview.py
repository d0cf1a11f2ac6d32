"""First chapter of a page: the main result, curves, and a table of all rounds."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core.units import human_bytes
from thinwire.experiments.collapse import count_broken
from thinwire.reports.curve_figure import curve_figure
from thinwire.reports.evaluation import CLIENT_QUANTILES, WORST_CLIENTS
from thinwire.reports.finals import FAILED_RUNS
from thinwire.reports.formatting import accuracy_interval, accuracy_text, metric_text, percent_text, retry_text
from thinwire.reports.page import Chapter, Figure, Lead, Piece, Table
from thinwire.reports.seed_groups import DIRECTIONS, SeedGroup, TargetCost
from thinwire.reports.settings import differing

Costs = dict[float, list[TargetCost | None]]  # by target, for each group


def overview_chapter(task: str, groups: Sequence[SeedGroup], baseline: SeedGroup, costs: Costs) -> Chapter:
    """Accuracy and bytes of all methods on a task."""
    pieces: list[Piece] = []
    if headline := _headline(groups, baseline, costs):
        pieces.append(Lead(headline))
    pieces.append(_setup(groups))
    pieces += _notes(groups)
    pieces += _figures(task, groups, tuple(costs))
    pieces.append(_totals_table(groups, baseline))
    if any(group.final_client_quantile("worst_10") for group in groups):
        pieces.append(_clients_table(groups))
    return Chapter("Accuracy and bytes", pieces)


def _headline(groups: Sequence[SeedGroup], baseline: SeedGroup, costs: Costs) -> str:
    """Which method reaches the highest target that the baseline also reaches with the fewest bytes."""
    place = groups.index(baseline)
    for target in sorted(costs, reverse=True):
        theirs = costs[target][place]
        candidates = [
            (cost.bytes.mean, group)
            for group, cost in zip(groups, costs[target], strict=True)
            if cost and cost.seeds == len(group.runs) and not group.failed  # a collapsed run lost what it had reached
        ]
        if theirs is None or len(candidates) < 2:
            continue
        least, best = min(candidates, key=lambda pair: pair[0])
        start = f"Fewest bytes to reach {percent_text(target)}: {best.label}, {human_bytes(least)} in total"
        if best is baseline:
            return f"{start}."
        ratio = f"{theirs.bytes.mean / least:.3g} times fewer than {baseline.label}"
        return f"{start}, {ratio} ({human_bytes(theirs.bytes.mean)})."
    return ""


def _setup(groups: Sequence[SeedGroup]) -> str:
    """Clients, partition, model, number of methods and of seeds, as one sentence."""
    run = groups[0].runs[0]
    task, cohort = run.table.get("task", {}), run.table.get("cohort", {})
    partition, model = task.get("partition", {}), task.get("model", {})
    parts = [f"{task.get('clients', '?')} clients, {cohort.get('size', '?')} sampled per round"]
    if partition:
        alpha = f" (alpha {partition['alpha']:g})" if "alpha" in partition else ""
        parts.append(f"partition {partition.get('kind')}{alpha}")
    parameters = (run.summary or {}).get("parameters")
    parts.append(f"model {model.get('kind', '?')}" + (f" with {parameters:,} parameters" if parameters else ""))
    seeds = max(len(group.runs) for group in groups)
    parts.append(f"{len(groups)} methods" if len(groups) > 1 else "1 method")
    parts.append(f"{seeds} seeds" if seeds > 1 else "1 seed, so no standard deviation")
    return "; ".join(parts) + "."


def _notes(groups: Sequence[SeedGroup]) -> list[Piece]:
    """Caveats: different tasks or cohorts, unfinished runs, failed runs, runs that went back."""
    notes: list[Piece] = []
    paths = differing([group.config for group in groups])
    if mixed := [path for path in paths if path.split(".")[0] in ("task", "cohort")]:
        notes.append(f"Note: the methods differ in {', '.join(mixed)}, so their clients and data are not the same.")
    if unfinished := [group.label for group in groups if group.unfinished]:
        notes.append(f"Note: unfinished: {', '.join(unfinished)}. Totals cover the rounds recorded so far.")
    notes += [
        f"Note: {group.label}, seed {run.table.get('seed', 0)}, {run.verdict.status}: {run.verdict.why}."
        for group in groups
        for run in group.failed
    ]
    return notes + [
        f"Note: {group.label}, seed {run.table.get('seed', 0)}, {retry_text(one)}."
        for group in groups
        for run in group.runs
        for one in run.retries
    ]


def _figures(task: str, groups: Sequence[SeedGroup], targets: tuple[float, ...]) -> list[Figure]:
    """Accuracy (or loss) against bytes and rounds, then client accuracy and each metric against bytes."""
    main = "accuracy" if any(group.curve("accuracy") for group in groups) else "loss"
    figures = [curve_figure(task, groups, main, targets, against) for against in ("bytes", "rounds")]
    others = ["client_accuracy", *(f"metrics.{name}" for name in _metric_names(groups))]
    figures += [
        curve_figure(task, groups, metric, (), "bytes")
        for metric in others
        if any(group.curve(metric) for group in groups)
    ]
    return figures


def _metric_names(groups: Sequence[SeedGroup]) -> list[str]:
    return list(dict.fromkeys(name for group in groups for name in group.metric_names))


def _totals_table(groups: Sequence[SeedGroup], baseline: SeedGroup) -> Table:
    """Accuracy and bytes of all rounds; the most important columns first, since a phone shows three or four."""
    metrics = _metric_names(groups)
    worst = any(group.final_client_quantile("worst_10") for group in groups)
    base, lost = baseline.total("bytes_total"), any(run.retries for group in groups for run in group.runs)
    rows = []
    for group in groups:
        total = group.total("bytes_total")
        by_direction = [group.total(f"bytes_{way}") for way in DIRECTIONS]
        assert total
        assert base
        ideal, abandoned = group.total("bytes_total_ideal"), group.total("bytes_abandoned")
        assert ideal
        assert abandoned
        rows.append(
            [
                group.label,
                accuracy_text(group.total("final_accuracy")),
                accuracy_text(group.total("best_accuracy")),
                *(metric_text(group.final_metric(name)) for name in metrics),
                *([accuracy_text(group.final_client_quantile("worst_10"))] if worst else []),
                human_bytes(total.mean),
                f"{base.mean / total.mean:.3g}x" if total.mean else "-",
                accuracy_interval(group.total("final_accuracy")),
                *(human_bytes(way.mean) if way else "-" for way in by_direction),
                *([human_bytes(abandoned.mean)] if lost else []),
                human_bytes(ideal.mean),
                f"{min(len(run.records) for run in group.runs):,}",
                f"{len(group.runs)}{' (unfinished)' if group.unfinished else ''}",
                count_broken(run.verdict.status for run in group.runs),
            ]
        )
    heads = ["method", "final %", "best %", *metrics, *([f"{WORST_CLIENTS}, %"] if worst else []), "total", "ratio"]
    heads += [
        "95 % interval",
        "up",
        "down",
        "catch-up",
        *(["abandoned"] if lost else []),
        "ideal",
        "rounds",
        "seeds",
        FAILED_RUNS,
    ]
    also = ", final metrics" if metrics else ""
    caption = (
        f"All rounds: accuracy (mean ± standard deviation over seeds; the interval is of final accuracy){also}, bytes "
        f"of all messages of all clients, and ratio: bytes of {baseline.label} divided by these"
    )
    return Table(caption, heads, rows)


def _clients_table(groups: Sequence[SeedGroup]) -> Table:
    """The distribution of final accuracy over clients."""
    rows = [
        [group.label, *(accuracy_text(group.final_client_quantile(key)) for key in CLIENT_QUANTILES)]
        for group in groups
    ]
    caption = "Final accuracy over clients, in percent (mean ± standard deviation over seeds; p10 is a percentile)"
    return Table(caption, ["method", *CLIENT_QUANTILES.values()], rows)
