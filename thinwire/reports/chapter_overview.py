"""First chapter of a page: the main result, curves, and a table of all rounds."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core.text import visible
from thinwire.core.units import human_bytes
from thinwire.experiments.collapse import FAILED_RUNS, count_broken
from thinwire.reports.curve_figure import curve_figure
from thinwire.reports.evaluation import CLIENT_QUANTILES, WORST_CLIENTS
from thinwire.reports.formatting import accuracy_text, metric_text, retry_text, value_interval, value_text
from thinwire.reports.headline import headline
from thinwire.reports.objectives import ACCURACY, objective_key, objective_name
from thinwire.reports.page import LONG_NAME, Chapter, Figure, Lead, Piece, Table
from thinwire.reports.seed_groups import SeedGroup
from thinwire.reports.settings import differing
from thinwire.reports.targets import Costs
from thinwire.reports.yardstick import untuned

_WIDEST, _DIGIT, _PADDING = 1058, 8.9, 14  # pixels of a table at 1280, of a digit in a wide font, around a cell


def overview_chapter(task: str, groups: Sequence[SeedGroup], baseline: SeedGroup, costs: Costs) -> Chapter:
    """The objective and the bytes of all methods on a task."""
    pieces: list[Piece] = []
    if text := headline(groups, baseline, costs):
        pieces.append(Lead(text))
    if text := untuned(groups, baseline):
        pieces.append(text)
    pieces.append(_setup(groups))
    pieces += _notes(groups)
    pieces += _figures(task, groups, tuple(costs))
    pieces += _totals_tables(groups, baseline)
    if any(group.final_client_quantile("worst_10") for group in groups):
        pieces.append(_clients_table(groups))
    name = objective_name(baseline.objective).removeprefix("test ")
    return Chapter(f"{name[:1].upper()}{name[1:]} and bytes", pieces)


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
    """The objective (or training loss) against bytes and rounds, then other metrics against bytes."""
    ranked = objective_key(groups[0].objective)
    main = ranked if any(group.curve(ranked) for group in groups) else "loss"
    figures = [curve_figure(task, groups, main, targets, against) for against in ("bytes", "rounds")]
    others = ["accuracy", "client_accuracy", *(f"metrics.{name}" for name in _metric_names(groups))]
    figures += [
        curve_figure(task, groups, metric, (), "bytes")
        for metric in others
        if metric != ranked and any(group.curve(metric) for group in groups)
    ]
    return figures


def _metric_names(groups: Sequence[SeedGroup]) -> list[str]:
    """The metrics beside the objective."""
    names = dict.fromkeys(name for group in groups for name in group.metric_names)
    return [name for name in names if name != groups[0].objective.name]


def _totals_tables(groups: Sequence[SeedGroup], baseline: SeedGroup) -> list[Table]:
    """Results and bytes of all rounds, as one table, or two if it were too wide; the important columns first."""
    objective = baseline.objective
    name = objective_name(objective)
    results, total, interval, bytes_, counts = _columns(groups, baseline)
    also = ", final metrics" if len(results) > 2 else ""
    words = "accuracy" if objective == ACCURACY else name
    scored = f"{words} (mean ± standard deviation over seeds; the interval is of final {words}){also}"
    sent = f"bytes of all messages of all clients, and ratio: bytes of {baseline.label} divided by these"
    together = results + total + interval + bytes_ + counts
    if len(_packed(groups, together)) == 1:
        return [_table(f"All rounds: {scored}, {sent}", groups, together)]
    first, second = _packed(groups, results + interval + counts), _packed(groups, total + bytes_)
    captions = [scored, *["results, continued"] * (len(first) - 1), sent, *["bytes, continued"] * (len(second) - 1)]
    return [
        _table(f"All rounds: {caption}", groups, columns)
        for caption, columns in zip(captions, first + second, strict=True)
    ]


Columns = list[tuple[str, list[str]]]  # a head, and a cell for each group


def _packed(groups: Sequence[SeedGroup], columns: Columns) -> list[Columns]:
    """The columns in as few tables as fit at 1280 pixels, each beside the names of the methods."""
    names = min(max(_width(group.label) for group in groups), LONG_NAME * 13.0) + _PADDING
    found: list[Columns] = []
    room = 0.0
    for head, cells in columns:
        width = max(map(_width, [*cells, *head.split()])) + _PADDING  # heads wrap
        if width > room:
            found.append([])
            room = _WIDEST - names
        room -= width
        found[-1].append((head, cells))
    return found


def _width(text: str) -> float:
    """The width of a text in pixels; spaces, points and some letters are half as wide as digits."""
    return sum(_DIGIT / 2 if character in " .,:-ijlt" else _DIGIT for character in text)


def _table(caption: str, groups: Sequence[SeedGroup], columns: Columns) -> Table:
    rows = zip((group.label for group in groups), *(cells for _, cells in columns), strict=True)
    return Table(caption, ["method", *(head for head, _ in columns)], list(rows))


def _columns(groups: Sequence[SeedGroup], baseline: SeedGroup) -> tuple[Columns, Columns, Columns, Columns, Columns]:
    """The columns of the totals: results, total bytes, the interval, bytes by direction, and counts of runs."""
    objective = baseline.objective
    unit = "%" if objective == ACCURACY else objective_name(objective)
    results = [
        (f"final {unit}", [value_text(objective, group.final) for group in groups]),
        (f"best {unit}", [value_text(objective, group.best) for group in groups]),
    ]
    if objective != ACCURACY and any(group.total("final_accuracy") for group in groups):
        results.append(("final accuracy %", [accuracy_text(group.total("final_accuracy")) for group in groups]))
    for name in _metric_names(groups):
        results.append((visible(name, 60), [metric_text(group.final_metric(name)) for group in groups]))
    if any(group.final_client_quantile("worst_10") for group in groups):
        worst = [accuracy_text(group.final_client_quantile("worst_10")) for group in groups]
        results.append((f"{WORST_CLIENTS}, %", worst))
    base, means = _mean(baseline, "bytes_total"), [_mean(group, "bytes_total") for group in groups]
    total = [
        ("total", [human_bytes(mean) for mean in means]),
        ("ratio", [f"{base / mean:.3g}x" if mean else "-" for mean in means]),
    ]
    interval = [("95 % interval", [value_interval(objective, group.final) for group in groups])]
    ways = {"up": "bytes_up", "down": "bytes_down", "catch-up": "bytes_catchup"}
    if any(run.retries for group in groups for run in group.runs):
        ways["abandoned"] = "bytes_abandoned"
    ways["ideal"] = "bytes_total_ideal"
    bytes_ = [(head, [human_bytes(_mean(group, key)) for group in groups]) for head, key in ways.items()]
    seeds = [f"{len(group.runs)}{' (unfinished)' if group.unfinished else ''}" for group in groups]
    counts = [
        ("rounds", [f"{min(len(run.records) for run in group.runs):,}" for group in groups]),
        ("seeds", seeds),
        (FAILED_RUNS, [count_broken(run.verdict.status for run in group.runs) for group in groups]),
    ]
    return results, total, interval, bytes_, counts


def _mean(group: SeedGroup, key: str) -> float:
    found = group.total(key)
    assert found
    return found.mean


def _clients_table(groups: Sequence[SeedGroup]) -> Table:
    """The distribution of final accuracy over clients."""
    rows = [
        [group.label, *(accuracy_text(group.final_client_quantile(key)) for key in CLIENT_QUANTILES)]
        for group in groups
    ]
    caption = "Final accuracy over clients, in percent (mean ± standard deviation over seeds; p10 is a percentile)"
    return Table(caption, ["method", *CLIENT_QUANTILES.values()], rows)
