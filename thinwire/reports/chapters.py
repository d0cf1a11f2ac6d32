"""The chapters of a page: functions of a section, a task with its rows, that return what is shown, or nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from thinwire.core.text import human_bytes, human_seconds, visible
from thinwire.metrics.objective import Objective
from thinwire.reports import figures
from thinwire.reports.page import Cells, Chapter, Drawing, Headline, Piece
from thinwire.reports.rows import (
    ACCURACY,
    BASELINE,
    MeanInterval,
    Row,
    byte_columns,
    differing,
    metric_value,
    number_text,
    objective_key,
    objective_name,
    percent_text,
    result_columns,
)
from thinwire.reports.targets import SLOW, Costs, TargetCost, headline, target_text
from thinwire.runs.collapse import FAILED_RUNS
from thinwire.runs.records import ROLLED_BACK
from thinwire.runs.search_record import SearchRecord
from thinwire.runs.toml import flat

MAX_LAYERS = 16
BAND = "Mean over seeds; the band spans the lowest to the highest seed."
SPREAD = "mean ± standard deviation over seeds"
_NAMES = {"accuracy": "test accuracy", "client_accuracy": "client accuracy", "loss": "training loss"}


class Section(NamedTuple):
    """The rows of one task and one objective, and what they are compared by.

    Args:
        name: of the task.
        rows: the runs by method and settings.
        baseline: one of the rows.
        costs: of reaching each target, for each row.
        notes: first on the page.
    """

    name: str
    rows: Sequence[Row]
    baseline: Row
    costs: Costs
    notes: Sequence[str] = ()

    @property
    def objective(self) -> Objective:
        """What its runs are ranked by."""
        return self.baseline.objective


def chapters_of(section: Section, prefix: str = "") -> list[Chapter]:
    """The chapters for which its runs have data."""
    name = capital(objective_name(section.objective).removeprefix("test "))
    found = {
        f"{name} and bytes": _overview(section),
        "Sweep": _sweeps(section),
        "Bytes to a target": _targets(section),
        "Layers": _layers(section),
        "Searched settings": _searches(section),
        "Settings": _settings(section),
    }
    return [Chapter(prefix + heading, pieces) for heading, pieces in found.items() if pieces]


def _overview(section: Section) -> list[Piece]:
    """The main result, curves, and tables of all rounds."""
    rows, baseline, ranked = section.rows, section.baseline, objective_key(section.objective)
    metrics = dict.fromkeys(f"metrics.{name}" for row in rows for name in row.metrics)
    others = [one for one in ("accuracy", "client_accuracy", *metrics) if one != ranked]
    main = ranked if any(row.curve(ranked) for row in rows) else "loss"
    drawn = [
        curve_drawing(section.name, rows, main, section.costs),
        curve_drawing(section.name, rows, main, by_bytes=False),
        *(curve_drawing(section.name, rows, one) for one in others if any(row.curve(one) for row in rows)),
    ]
    lead = headline(rows, baseline, section.costs)
    words = objective_name(section.objective).removeprefix("test ")
    labels, sent, least = {"method": [row.label for row in rows]}, byte_columns(rows), baseline.total("bytes_total")
    totals = [row.total("bytes_total") for row in rows]
    first = {"total": sent["total"], "ratio": [f"{least / total:.3g}x" if total else "-" for total in totals]}
    rounds = {"rounds": [f"{min(len(run.records) for run in row.runs):,}" for row in rows]}
    return [
        *section.notes,
        *([Headline(lead)] if lead else []),
        *_untuned(rows, baseline),
        _setup(rows),
        *_notes(rows),
        *drawn,
        Cells.of(
            f"All rounds: {words} ({SPREAD}; the interval is of final {words})",
            labels | result_columns(rows, interval=True) | rounds | _counts(rows),
        ),
        Cells.of(
            f"All rounds: bytes of all messages, and ratio: bytes of {baseline.label} divided by these",
            labels | first | sent,
        ),
    ]


def curve_drawing(
    task: str, rows: Sequence[Row], metric: str, targets: Sequence[float] | Costs = (), by_bytes: bool = True
) -> Drawing:
    """A metric against bytes, with targets marked, or against rounds."""
    objective = rows[0].objective
    ranked, percent = metric == objective_key(objective), metric in ("accuracy", "client_accuracy")
    name = objective_name(objective) if ranked else _NAMES.get(metric) or metric.partition(".")[2]
    notes = [BAND] if any(len(row.runs) > 1 for row in rows) else []
    if by_bytes and (percent or ranked):
        notes.append(f"{'Up' if percent or objective.higher_is_better else 'Down'} and left is better.")
    return _drawing(
        f"{capital(name)} against {'bytes' if by_bytes else 'rounds'}, {task}",
        [_curve(row, metric, by_bytes) for row in rows],
        percent,
        notes,
        x="total bytes (log scale)" if by_bytes else "rounds",
        y=name,
        log_x=by_bytes,
        integer_x=not by_bytes,
        x_text=human_bytes if by_bytes else "{:g}".format,
        marks={f"target {target_text(objective, one)}": one for one in targets},
    )


def _drawing(title: str, lines: Sequence[figures.Curve], percent: bool, notes: Sequence[str], **axes: Any) -> Drawing:
    """Curves; unless in percent, with limits that leave out what would flatten the others."""
    limits = None if percent else figures.scale_limits(lines)
    low, high = limits or (-math.inf, math.inf)
    outside = [line.label for line in lines if any(not low <= y <= high for _, y, _, _ in line.points)]
    texts = [f"Values outside the scale are drawn at its edge: {', '.join(outside)}."] if outside else []
    y_text = percent_text if percent else partial(number_text, digits=3)
    return Drawing(
        title, " ".join([*notes, *texts]), partial(figures.curves, lines, y_text=y_text, limits=limits, **axes)
    )


def _curve(row: Row, metric: str, by_bytes: bool) -> figures.Curve:
    """The curve of a row, over its seeds that did not fail; if all failed, it is marked."""
    broken, runs, label = row.broken, row.runs, row.label
    if broken and len(broken) < len(runs):
        row = row._replace(runs=[run for run in runs if run not in broken])
        label = f"{label} ({len(row.runs)} of {len(runs)} seeds; the others failed)"
    elif broken:
        label = f"{label} ({' or '.join(dict.fromkeys(run.verdict.status for run in broken))})"
    return figures.Curve(label, row.curve(metric, by_bytes), len(broken) == len(runs))


def _untuned(rows: Sequence[Row], baseline: Row) -> list[Piece]:
    """One sentence if FedAvg has one setting only and no record of a search."""
    found = [row for row in rows if row.runs[0].name == BASELINE]
    if len(rows) < 2 or len(found) != 1 or baseline.search:
        return []
    why = f"so a tuned {BASELINE} may need fewer bytes"
    return [f"{baseline.label} ran with one setting only and without a search, {why}."]


def _setup(rows: Sequence[Row]) -> str:
    """Clients, partition, model, number of methods and of seeds, as one sentence."""
    run, seeds = rows[0].runs[0], max(len(row.runs) for row in rows)
    config = flat(run.table)
    alpha = f" (alpha {config['task.partition.alpha']:g})" if "task.partition.alpha" in config else ""
    parameters = (run.summary or {}).get("parameters")
    return (
        f"{config.get('task.clients', '?')} clients, {config.get('cohort.size', '?')} sampled per round; "
        f"partition {config.get('task.partition.kind', '?')}{alpha}; model {config.get('task.model.kind', '?')}"
        + (f" with {parameters:,} parameters" if parameters else "")
        + f"; {len(rows)} method{'s' * (len(rows) > 1)}; "
        + (f"{seeds} seeds." if seeds > 1 else "1 seed, so no standard deviation.")
    )


def _notes(rows: Sequence[Row]) -> list[str]:
    """Caveats: different tasks or cohorts, unfinished runs, failed runs, runs that went back."""
    notes = []
    paths = differing([row.config for row in rows])
    if mixed := [path for path in paths if path.split(".")[0] in ("task", "cohort")]:
        notes.append(f"Note: the methods differ in {', '.join(mixed)}, so their clients and data are not the same.")
    if unfinished := [row.label for row in rows if row.unfinished]:
        notes.append(f"Note: unfinished: {', '.join(unfinished)}. Totals cover the rounds recorded so far.")
    for row in rows:
        for run in row.runs:
            which = f"Note: {row.label}, seed {run.table.get('seed', 0)}"
            notes += [f"{which}, {run.verdict.status}: {run.verdict.why}."] if run in row.broken else []
            notes += [f"{which}, {retry_text(one)}." for one in run.retries]
    return notes


def _counts(rows: Sequence[Row]) -> dict[str, list[str]]:
    seeds = [f"{len(row.runs)}{' (unfinished)' if row.unfinished else ''}" for row in rows]
    return {"seeds": seeds, FAILED_RUNS: [row.failed for row in rows]}


# -- sweeps ------------------------------------------------------------------------------------------------------------


class Sweep(NamedTuple):
    """The rows of one method that differ in a setting `x`, and perhaps in a setting `line`."""

    method: str
    rows: list[Row]
    x: str
    line: str = ""


def sweeps(rows: Sequence[Row]) -> list[Sweep]:
    """Methods whose rows differ in one or two settings, one of them a number; `x` is that with the most values."""
    found = []
    for name in dict.fromkeys(row.runs[0].name for row in rows):
        same = [row for row in rows if row.runs[0].name == name]
        paths = [path for path in differing([row.config for row in same]) if path != "name"]
        values = {path: [flat(row.config).get(path) for row in same] for path in paths}
        numeric = [path for path in paths if all(map(_is_number, values[path]))]
        if len(same) > 1 and len(paths) <= 2 and numeric:
            x = max(numeric, key=lambda path: len(set(values[path])))
            found.append(Sweep(name, same, x, next((path for path in paths if path != x), "")))
    return found


def _sweeps(section: Section) -> list[Piece]:
    """The best value of the objective against a setting, with a line for each value of a second one."""
    objective, pieces = section.objective, list[Piece]()
    for method, rows, x, line in sweeps(section.rows):
        configs = {row.label: flat(row.config) for row in rows}
        ordered = sorted(rows, key=lambda row: float(configs[row.label][x]))
        points: dict[str, list[figures.Point]] = {}
        for row in ordered:
            values = [row.best_of(run) for run in row.runs if run not in row.broken]
            if known := [value for value in values if value is not None]:
                config = configs[row.label]
                label = f"{line.rpartition('.')[2]} {setting_text(config.get(line))}" if line else method
                point = (float(config[x]), sum(known) / len(known), min(known), max(known))
                points.setdefault(label, []).append(point)
        if points:
            xs = [point[0] for own in points.values() for point in own]
            log, name = min(xs) > 0 and max(xs) / min(xs) >= 8, objective_name(objective)
            notes = [BAND, f"{'Up' if objective.higher_is_better else 'Down'} is better."]
            if lost := [row.label for row in ordered if len(row.broken) == len(row.runs)]:
                notes.append(f"Not drawn, because all runs failed: {', '.join(lost)}.")
            title = f"{method}: best {name} against {x}, {section.name}"
            axes = {"x": f"{x} (log scale)" if log else x, "y": f"best {name}", "log_x": log}
            curves = [figures.Curve(*pair) for pair in points.items()]
            pieces.append(_drawing(title, curves, objective == ACCURACY, notes, **axes))
        paths = [path for path in (x, line) if path]
        settings = {
            path.rpartition(".")[2]: [setting_text(configs[row.label].get(path)) for row in ordered] for path in paths
        }
        results = result_columns(ordered) | {"total": byte_columns(ordered)["total"]} | _counts(ordered)
        pieces.append(Cells.of(f"{method} by {' and '.join(paths)} ({SPREAD})", settings | results))
    return pieces


# -- targets -----------------------------------------------------------------------------------------------------------


def _targets(section: Section) -> list[Piece]:
    """Bytes to each target: bars and a table."""
    rows, objective, baseline = section.rows, section.objective, section.baseline
    side, pieces = "above" if objective.higher_is_better else "below", list[Piece]()
    if section.costs:
        pieces.append(
            f"A target is reached in the first evaluated round at or {side} it, for each seed separately. Catch-up is "
            "what clients downloaded because they had missed rounds; the ideal total leaves it out."
        )
    for target, reached in section.costs.items():
        title = f"Bytes to reach {target_text(objective, target)}, {section.name}"
        pairs = list(zip(rows, reached, strict=True))
        bars = []
        for i, (row, cost) in enumerate(pairs):
            if cost is not None:
                sent, count = cost.by_seed.values(), f"{len(cost.by_seed)} of {len(row.runs)}"
                label = row.label if len(sent) == len(row.runs) else f"{row.label} ({count} seeds)"
                bars.append(figures.Bar(label, human_bytes(cost.bytes), cost.by_direction, (min(sent), max(sent)), i))
        note = "All messages of all clients: up (solid), down (pale), catch-up (outline)."
        if any(len(row.runs) > 1 for row in rows):
            note += " Mean over seeds; the thin line spans the lowest to the highest seed."
        if never := [row.label for row, cost in pairs if cost is None]:
            note += f" Never reached by {', '.join(never)}."
        if bars:
            pieces.append(Drawing(title, note, partial(figures.bars, bars)))
        theirs = next(cost for row, cost in pairs if row is baseline)
        heads = ("method", "total", "ratio", "rounds", "95 % interval", "ideal", f"at {SLOW}", "seeds")
        means = f"means over the seeds that reached it), and ratio: bytes of {baseline.label} divided by these"
        cells = [_target_cells(row, cost, theirs) for row, cost in pairs]
        pieces.append(Cells(f"{title} ({means}, if all seeds reached it", heads, cells))
    return pieces


def _target_cells(row: Row, cost: TargetCost | None, baseline: TargetCost | None) -> list[str]:
    seeds = len(row.runs)
    if cost is None:
        return [row.label, "not reached", *["-"] * 5, f"0 of {seeds}"]
    mean, half = cost.bytes, (MeanInterval.of(cost.by_seed.values()) or cost).half  # type: ignore[union-attr]
    return [
        row.label,
        human_bytes(mean),
        f"{baseline.bytes / mean:.3g}x" if baseline and len(cost.by_seed) == seeds else "-",
        f"{cost.rounds:.1f}",
        "-" if half is None else f"{human_bytes(max(0.0, mean - half))} to {human_bytes(mean + half)}",
        human_bytes(sum(cost.by_direction[:2])),
        human_seconds(cost.seconds),
        f"{len(cost.by_seed)} of {seeds}",
    ]


# -- layers, searches, settings ----------------------------------------------------------------------------------------


def _layers(section: Section) -> list[Piece]:
    """Bytes by layer of the methods whose runs recorded them, on one scale."""
    charts: list[tuple[Row, str, list[figures.Bar]]] = []
    for i, row in enumerate(section.rows):
        summary = row.runs[0].summary or {}
        layers = [
            one for one in summary.get("layers") or [] if isinstance(one, dict) and one.get("bytes_up") is not None
        ]
        what, bars = figures.layer_bars(layers, summary.get("rounds"), i)
        if len(bars) > MAX_LAYERS:
            what += f", the {MAX_LAYERS} largest of {len(bars)}"
            largest = sorted(bars, key=lambda bar: -bar.segments[0])[:MAX_LAYERS]
            bars = [bar for bar in bars if bar in largest]
        charts += [(row, what, bars)] if bars else []
    longest = max((figures.longest_bar(bars) for _, _, bars in charts), default=0)
    notes = "In parentheses: rounds in which the layer was synchronized. All methods have the same scale."
    return [
        Drawing(
            f"{row.label}: {what}, {section.name}",
            f"Seed {row.seeds[0]}. {notes}",
            partial(figures.bars, bars, longest=longest),
        )
        for row, what, bars in charts
    ]


def _searches(section: Section) -> list[Piece]:
    """What was searched, on which seed, by what, and what the search cost."""
    table, texts = search_table(section.rows, "Search of each method, and its cost")
    if not table.rows:
        return []
    if without := [row.label for row in section.rows if not row.search]:
        texts.append(f"Not searched, or not recorded: {', '.join(without)}.")
    return [*texts, table]


def search_table(rows: Sequence[Row], caption: str) -> tuple[Cells, list[str]]:
    """The recorded searches, one in a row of the table, and how they were searched, in sentences."""
    found = {row.label: search for row in rows if (search := row.search)}
    texts = []
    for seed, by in dict.fromkeys((one.seed, one.chosen_by) for one in found.values()):
        halving = "successive halving (each rung keeps the better half and doubles the rounds)"
        texts.append(f"Searched by {halving} on seed {seed}, by {by}.")
    if len({one.rungs[0] for one in found.values() if one.rungs}) > 1:  # later rungs lack the runs that failed
        texts.append("Note: the methods were not searched with equal numbers of runs and rounds.")
    texts += ["Runs: number of runs x rounds of each rung. The bytes of a search are those of all its runs."] * bool(
        found
    )
    heads = ("method", "searched", "found", "tried", "runs", "rounds of the search", "bytes of the search")
    return Cells(caption, heads, [_search_cells(*pair) for pair in found.items()], left=2), texts


def _search_cells(method: str, record: SearchRecord) -> list[str]:
    """One row: a value at an end of what was tried has a mark."""
    return [
        method,
        record.setting,
        f"{record.value:g}{' (at an end)' if record.at_end else ''}",
        f"{min(record.tried):g} to {max(record.tried):g}",
        " + ".join(f"{count} x {rounds}" for count, rounds in record.rungs),
        f"{record.rounds:,}",
        human_bytes(record.bytes),
    ]


def _settings(section: Section) -> list[Piece]:
    """Settings that differ, and settings that are shared."""
    configs = {row.label: flat(row.config) for row in section.rows}
    paths = [path for path in differing([row.config for row in section.rows]) if path != "name"]
    own = [
        (label, "; ".join(f"{path} = {setting_text(config[path])}" for path in paths if path in config))
        for label, config in configs.items()
    ]
    first = next(iter(configs.values()))
    shared = [(path, setting_text(value)) for path, value in first.items() if path not in (*paths, "name")]
    pieces: list[Piece] = [Cells("Settings that differ", ("method", "settings"), own)] if paths else []
    return [*pieces, Cells("Shared settings", ("key", "value"), shared, folded=True)]


def definitions(compute: float | None) -> Chapter:
    """Definitions of bytes, intervals and time: the last chapter of a page.

    Args:
        compute: training seconds of a client per round, if given.
    """
    seconds = (
        "the measured seconds of the round divided by its number of clients, since one machine simulates all of them"
        if compute is None
        else f"{compute:g} s per round, as given"
    )
    return Chapter(
        "Definitions",
        [
            "Bytes are lengths of encoded messages: uploads (up), downloads to clients that took part in the previous "
            "round (down), and what clients downloaded in addition because they had missed rounds (catch-up). Total is "
            "the sum of all three and of rounds that were abandoned when a run went back (abandoned); ideal leaves out "
            "catch-up and abandoned rounds.",
            "Curves and totals are means over runs that differ only in their seed. The 95 % interval is that of the "
            "mean over seeds by Student's t; with few seeds it is wide.",
            "Time of a round = compute + 8 × bytes up of a client / upload speed + 8 × bytes down and catch-up of a "
            "client / download speed. Clients work in parallel on equal links, and the bytes of a client are those of "
            f"the round divided by its number of clients. Compute is {seconds}. Latency and stragglers are not "
            "modeled. FedPara's Tables 7 and 8 use this formula.",
        ],
    )


# -- text --------------------------------------------------------------------------------------------------------------


def capital(text: str) -> str:
    """A text with a capital letter first, and all else as it is."""
    return f"{text[:1].upper()}{text[1:]}"


def setting_text(value: Any) -> str:
    """The value of a setting."""
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def retry_text(retry: Mapping[str, Any]) -> str:
    """One time that a run went back, in a sentence; the values may come from a damaged file.

    >>> found = {"round": 3, "status": "diverged", "from_round": 0, "lr": 0.5, "bytes_abandoned": 2000}
    >>> retry_text(found)
    'round 3 diverged: back to the start with learning rate 0.5, 2 kB abandoned'
    """
    number, back, lr, lost = (metric_value(retry, key) or 0 for key in ("round", "from_round", "lr", "bytes_abandoned"))
    where = f"round {back:g}" if back else "the start"
    status = visible(str(retry.get("status")), 40)
    out = [f"{one}" for one in retry.get("left_out") or () if isinstance(one, int)]
    without = f" without clients {', '.join(out[:20])}" if out else ""
    how = without if status == ROLLED_BACK else f" with learning rate {lr:.4g}"
    return f"round {number:g} {status}: back to {where}{how}, {human_bytes(lost)} abandoned"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
