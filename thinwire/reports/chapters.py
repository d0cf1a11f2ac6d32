"""The chapters of a page: functions of a section, a task with its groups of runs, that return a chapter or None."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from thinwire.core.text import human_bytes, human_seconds, visible
from thinwire.metrics.objective import Objective
from thinwire.reports import figures
from thinwire.reports.page import Cells, Chapter, Drawing, Headline, Piece
from thinwire.reports.seed_groups import (
    ACCURACY,
    SLOW,
    Costs,
    SeedGroup,
    TargetCost,
    byte_columns,
    differing,
    headline,
    metric_value,
    number_text,
    objective_key,
    objective_name,
    percent_text,
    result_columns,
    target_text,
    untuned,
)
from thinwire.runs.collapse import FAILED_RUNS, count_broken
from thinwire.runs.records import ROLLED_BACK
from thinwire.runs.search_record import SearchRecord, read_search
from thinwire.runs.toml import flat

MAX_LAYERS = 16
BAND = "Mean over seeds; the band spans the lowest to the highest seed."
_NAMES = {"accuracy": "test accuracy", "client_accuracy": "client accuracy", "loss": "training loss"}
_TARGET_HEADS = ("method", "total", "ratio", "rounds", "95 % interval", "ideal", f"at {SLOW}", "seeds")
SEARCH_HEADS = ("method", "searched", "found", "tried", "runs", "rounds of the search", "bytes of the search")


class Section(NamedTuple):
    """The groups of runs of one task and one objective, and what they are compared by.

    Args:
        name: of the task.
        groups: the runs by method and settings.
        baseline: one of the groups.
        costs: of reaching each target, for each group.
        notes: first on the page.
    """

    name: str
    groups: Sequence[SeedGroup]
    baseline: SeedGroup
    costs: Costs
    notes: Sequence[str] = ()

    @property
    def objective(self) -> Objective:
        """What its runs are ranked by."""
        return self.baseline.objective


def overview(section: Section) -> Chapter:
    """The main result, curves, and tables of all rounds."""
    groups, objective = section.groups, section.objective
    ranked, name = objective_key(objective), objective_name(objective)
    main = ranked if any(group.curve(ranked) for group in groups) else "loss"
    drawn = [curve_drawing(section.name, groups, main, section.costs), curve_drawing(section.name, groups, main, None)]
    metrics = dict.fromkeys(f"metrics.{name}" for group in groups for name in group.metrics)
    for metric in ("accuracy", "client_accuracy", *metrics):
        if metric != ranked and any(group.curve(metric) for group in groups):
            drawn.append(curve_drawing(section.name, groups, metric))
    lead, tuned = headline(groups, section.baseline, section.costs), untuned(groups, section.baseline)
    pieces: list[Piece] = [*section.notes, *([Headline(lead)] if lead else []), *([tuned] if tuned else [])]
    pieces += [_setup(groups), *_notes(groups), *drawn, *_totals(section)]
    name = name.removeprefix("test ")
    return Chapter(f"{name[:1].upper()}{name[1:]} and bytes", pieces)


def curve_drawing(
    task: str, groups: Sequence[SeedGroup], metric: str, targets: Sequence[float] | Costs | None = ()
) -> Drawing:
    """A metric against bytes, with targets marked; without targets (None) against rounds."""
    objective, by_bytes = groups[0].objective, targets is not None
    ranked, percent = metric == objective_key(objective), metric in ("accuracy", "client_accuracy")
    name = objective_name(objective) if ranked else _NAMES.get(metric) or metric.partition(".")[2]
    notes = [BAND] if any(len(group.runs) > 1 for group in groups) else []
    if by_bytes and (percent or ranked):
        notes.append(f"{'Up' if percent or objective.higher_is_better else 'Down'} and left is better.")
    return _drawing(
        f"{name[:1].upper()}{name[1:]} against {'bytes' if by_bytes else 'rounds'}, {task}",
        [_curve(group, metric, by_bytes) for group in groups],
        percent,
        notes,
        x="total bytes (log scale)" if by_bytes else "rounds",
        y=name,
        log_x=by_bytes,
        integer_x=not by_bytes,
        x_text=human_bytes if by_bytes else "{:g}".format,
        marks={f"target {target_text(objective, one)}": one for one in targets or ()},
    )


def _drawing(title: str, lines: Sequence[figures.Curve], percent: bool, notes: Sequence[str], **axes: Any) -> Drawing:
    """Curves; unless in percent, with limits that leave out what would flatten the others."""
    low, high = limits = (None if percent else figures.scale_limits(lines)) or (-math.inf, math.inf)
    outside = [line.label for line in lines if any(not low <= y <= high for _, y, _, _ in line.points)]
    texts = [f"Values outside the scale are drawn at its edge: {', '.join(outside)}."] if outside else []
    axes["y_text"] = percent_text if percent else partial(number_text, digits=3)
    axes["limits"] = limits if low > -math.inf else None
    return Drawing(title, " ".join([*notes, *texts]), partial(figures.curves, lines, **axes))


def _curve(group: SeedGroup, metric: str, by_bytes: bool) -> figures.Curve:
    """The curve of a group, over its seeds that did not fail; if all failed, it is marked."""
    failed, runs, label = group.failed, group.runs, group.label
    if failed and len(failed) < len(runs):
        group = group._replace(runs=[run for run in runs if run not in failed])
        label = f"{label} ({len(group.runs)} of {len(runs)} seeds; the others failed)"
    elif failed:
        label = f"{label} ({' or '.join(dict.fromkeys(run.verdict.status for run in failed))})"
    return figures.Curve(label, group.curve(metric, by_bytes), len(failed) == len(runs))


def _setup(groups: Sequence[SeedGroup]) -> str:
    """Clients, partition, model, number of methods and of seeds, as one sentence."""
    run, seeds = groups[0].runs[0], max(len(group.runs) for group in groups)
    config = flat(run.table)
    alpha = f" (alpha {config['task.partition.alpha']:g})" if "task.partition.alpha" in config else ""
    parameters = (run.summary or {}).get("parameters")
    return (
        f"{config.get('task.clients', '?')} clients, {config.get('cohort.size', '?')} sampled per round; "
        f"partition {config.get('task.partition.kind', '?')}{alpha}; model {config.get('task.model.kind', '?')}"
        + (f" with {parameters:,} parameters" if parameters else "")
        + (f"; {len(groups)} methods; " if len(groups) > 1 else "; 1 method; ")
        + (f"{seeds} seeds." if seeds > 1 else "1 seed, so no standard deviation.")
    )


def _notes(groups: Sequence[SeedGroup]) -> list[str]:
    """Caveats: different tasks or cohorts, unfinished runs, failed runs, runs that went back."""
    notes = []
    paths = differing([group.config for group in groups])
    if mixed := [path for path in paths if path.split(".")[0] in ("task", "cohort")]:
        notes.append(f"Note: the methods differ in {', '.join(mixed)}, so their clients and data are not the same.")
    if unfinished := [group.label for group in groups if group.unfinished]:
        notes.append(f"Note: unfinished: {', '.join(unfinished)}. Totals cover the rounds recorded so far.")
    for group in groups:
        for run in group.runs:
            which = f"Note: {group.label}, seed {run.table.get('seed', 0)}"
            notes += [f"{which}, {run.verdict.status}: {run.verdict.why}."] if run in group.failed else []
            notes += [f"{which}, {retry_text(one)}." for one in run.retries]
    return notes


def _totals(section: Section) -> list[Cells]:
    """Results and bytes of all rounds; the important columns first."""
    groups, baseline = section.groups, section.baseline
    words = objective_name(section.objective).removeprefix("test ")
    rounds = {"rounds": [f"{min(len(run.records) for run in group.runs):,}" for group in groups]}
    sent, least = byte_columns(groups), baseline.total("bytes_total")
    totals = [group.total("bytes_total") for group in groups]
    ratio = [f"{least / total:.3g}x" if total else "-" for total in totals]
    labels, spread = {"method": [group.label for group in groups]}, "mean ± standard deviation over seeds"
    return [
        Cells.of(
            f"All rounds: {words} ({spread}; the interval is of final {words})",
            labels | result_columns(groups, interval=True) | rounds | _counts(groups),
        ),
        Cells.of(
            f"All rounds: bytes of all messages, and ratio: bytes of {baseline.label} divided by these",
            labels | {"total": sent["total"], "ratio": ratio} | sent,
        ),
    ]


def _counts(groups: Sequence[SeedGroup]) -> dict[str, list[str]]:
    return {
        "seeds": [f"{len(group.runs)}{' (unfinished)' if group.unfinished else ''}" for group in groups],
        FAILED_RUNS: [count_broken(run.verdict.status for run in group.runs) for group in groups],
    }


class Sweep(NamedTuple):
    """The groups of one method that differ in a setting `x`, and perhaps in a setting `line`."""

    method: str
    groups: list[SeedGroup]
    x: str
    line: str = ""


def sweeps(groups: Sequence[SeedGroup]) -> list[Sweep]:
    """Methods whose groups differ in one or two settings, one of them a number; `x` is that with the most values."""
    found = []
    for name in dict.fromkeys(group.runs[0].name for group in groups):
        same = [group for group in groups if group.runs[0].name == name]
        paths = [path for path in differing([group.config for group in same]) if path != "name"]
        values = {path: [flat(group.config).get(path) for group in same] for path in paths}
        numeric = [path for path in paths if all(_is_number(value) for value in values[path])]
        if len(same) > 1 and len(paths) <= 2 and numeric:
            x = max(numeric, key=lambda path: len(set(values[path])))
            found.append(Sweep(name, same, x, next((path for path in paths if path != x), "")))
    return found


def sweep_chapter(section: Section) -> Chapter | None:
    """The best value of the objective against a setting, with a line for each value of a second one."""
    objective, pieces = section.objective, list[Piece]()
    for method, groups, x, line in sweeps(section.groups):
        ordered = sorted(groups, key=lambda group: float(flat(group.config)[x]))
        points: dict[Any, list[figures.Point]] = {}
        lost = []
        for group in ordered:
            config = flat(group.config)
            values = [group.best_of(run) for run in group.runs if run not in group.failed]
            if known := [value for value in values if value is not None]:
                point = (float(config[x]), sum(known) / len(known), min(known), max(known))
                points.setdefault(config.get(line), []).append(point)
            else:
                lost.append(group.label)
        keys = sorted(points) if all(map(_is_number, points)) else list(points)
        label = line.rsplit(".", 1)[-1]
        lines = [figures.Curve(f"{label} {setting_text(key)}" if line else method, points[key]) for key in keys]
        name, xs = objective_name(objective), [point[0] for own in points.values() for point in own]
        if lines:
            log = min(xs) > 0 and max(xs) / min(xs) >= 8
            notes = [BAND, f"{'Up' if objective.higher_is_better else 'Down'} is better."]
            notes += [f"Not drawn, because all runs failed: {', '.join(lost)}."] if lost else []
            title = f"{method}: best {name} against {x}, {section.name}"
            axes = {"x": f"{x} (log scale)" if log else x, "y": f"best {name}", "log_x": log}
            pieces.append(_drawing(title, lines, objective == ACCURACY, notes, **axes))
        paths = [path for path in (x, line) if path]
        columns = {path.rsplit(".", 1)[-1]: [setting_text(flat(g.config).get(path)) for g in ordered] for path in paths}
        columns |= result_columns(ordered) | {"total": byte_columns(ordered)["total"]} | _counts(ordered)
        caption = f"{method} by {' and '.join(paths)} (mean ± standard deviation over seeds)"
        pieces.append(Cells.of(caption, columns))
    return Chapter("Sweep", pieces) if pieces else None


def targets_chapter(section: Section) -> Chapter | None:
    """Bytes to each target: bars and a table."""
    if not section.costs:
        return None
    groups, objective, baseline = section.groups, section.objective, section.baseline
    side = "above" if objective.higher_is_better else "below"
    pieces: list[Piece] = [
        f"A target is reached in the first evaluated round at or {side} it, for each seed separately. Catch-up is what "
        "clients downloaded because they had missed rounds; the ideal total leaves it out."
    ]
    for target, reached in section.costs.items():
        title = f"Bytes to reach {target_text(objective, target)}, {section.name}"
        rows = []
        for i, (group, cost) in enumerate(zip(groups, reached, strict=True)):
            if cost is not None:
                sent, count = cost.by_seed.values(), f"{len(cost.by_seed)} of {len(group.runs)}"
                label = group.label if len(sent) == len(group.runs) else f"{group.label} ({count} seeds)"
                spread, total = (min(sent), max(sent)), human_bytes(cost.bytes.mean)
                rows.append(figures.Bar(label, total, cost.by_direction, spread, i))
        never = [group.label for group, cost in zip(groups, reached, strict=True) if cost is None]
        note = "All messages of all clients: up (solid), down (pale), catch-up (outline)."
        if any(len(group.runs) > 1 for group in groups):
            note += " Mean over seeds; the thin line spans the lowest to the highest seed."
        note += f" Never reached by {', '.join(never)}." if never else ""
        if rows:
            pieces.append(Drawing(title, note, partial(figures.bars, rows)))
        theirs = reached[groups.index(baseline)]
        cells = [_target_cells(group, cost, theirs) for group, cost in zip(groups, reached, strict=True)]
        caption = (
            f"{title} (means over the seeds that reached it), and ratio: bytes of {baseline.label} divided by these"
        )
        pieces.append(Cells(f"{caption}, if all seeds reached it", _TARGET_HEADS, cells))
    return Chapter("Bytes to a target", pieces)


def _target_cells(group: SeedGroup, cost: TargetCost | None, baseline: TargetCost | None) -> list[str]:
    seeds = len(group.runs)
    if cost is None:
        return [group.label, "not reached", *["-"] * 5, f"0 of {seeds}"]
    mean, _, half = cost.bytes
    return [
        group.label,
        human_bytes(mean),
        f"{baseline.bytes.mean / mean:.3g}x" if baseline and len(cost.by_seed) == seeds else "-",
        f"{cost.rounds:.1f}",
        "-" if half is None else f"{human_bytes(max(0.0, mean - half))} to {human_bytes(mean + half)}",
        human_bytes(sum(cost.by_direction[:2])),
        human_seconds(cost.seconds),
        f"{len(cost.by_seed)} of {seeds}",
    ]


def layers_chapter(section: Section) -> Chapter | None:
    """Bytes or synchronizations by layer of the methods whose runs recorded them; bytes have one scale."""
    charts: list[tuple[SeedGroup, str, list[figures.Bar]]] = []
    for i, group in enumerate(section.groups):
        summary = group.runs[0].summary or {}
        layers = [row for row in summary.get("layers") or [] if isinstance(row, dict) and "layer" in row]
        what, rows = figures.layer_bars(layers, summary.get("rounds"), i)
        ranked = sorted(rows, key=lambda row: -row.segments[0])[:MAX_LAYERS]
        if len(ranked) < len(rows):
            what += f", the {MAX_LAYERS} largest of {len(rows)}"
        # without bytes, layers that were synchronized in every round are not worth a figure
        if layers and ("bytes" in what or any(row.get("syncs") != summary.get("rounds") for row in layers)):
            charts.append((group, what, [row for row in rows if row in ranked]))
    longest = max((figures.longest_bar(rows) for _, what, rows in charts if "bytes" in what), default=0)
    pieces: list[Piece] = []
    for group, what, rows in charts:
        seed = f"Seed {group.seeds[0]}. " if len(group.runs) > 1 else ""
        note = f"{seed}In parentheses: rounds in which the layer was synchronized."
        note += " All methods have the same scale." if "bytes" in what and len(charts) > 1 else ""
        title = f"{group.label}: {what}, {section.name}"
        scale = longest if "bytes" in what else 0
        pieces.append(Drawing(title, note, partial(figures.bars, rows, longest=scale)))
    return Chapter("Layers", pieces) if pieces else None


def search_chapter(section: Section) -> Chapter | None:
    """What was searched, on which seed, by what, and what the search cost."""
    found = {group.label: record for group in section.groups if (record := read_search(group.runs[0].path))}
    texts = how_searched(list(found.values()))
    if without := [group.label for group in section.groups if group.label not in found]:
        texts.append(f"Not searched, or not recorded: {', '.join(without)}.")
    rows = [search_cells(label, record) for label, record in found.items()]
    table = Cells("Search of each method, and its cost", SEARCH_HEADS, rows)
    return Chapter("Searched settings", [*texts, table]) if found else None


def search_cells(method: str, record: SearchRecord) -> tuple[str, ...]:
    """One row: a value at an end of what was tried has a mark."""
    return (
        method,
        record.setting,
        f"{record.value:g}{' (at an end)' if record.at_end else ''}",
        f"{min(record.tried):g} to {max(record.tried):g}",
        " + ".join(f"{count} x {rounds}" for count, rounds in record.rungs),
        f"{record.rounds:,}",
        human_bytes(record.bytes),
    )


def how_searched(records: Sequence[SearchRecord]) -> list[str]:
    """How the settings were searched, in sentences.

    >>> rungs = ((3, 5), (2, 10), (1, 20))
    >>> record = SearchRecord("method.client_opt.lr", 0.5, (0.25, 0.5, 1.0), rungs, 100, "accuracy", 55, 900)
    >>> print(how_searched([record])[0])
    Searched by successive halving (each rung keeps the better half and doubles the rounds) on seed 100, by accuracy.
    """
    texts = []
    for seed, by in dict.fromkeys((record.seed, record.chosen_by) for record in records):
        halving = "successive halving (each rung keeps the better half and doubles the rounds)"
        texts.append(f"Searched by {halving} on seed {seed}, by {by}.")
    if len({record.rungs[0] for record in records if record.rungs}) > 1:  # later rungs lack the runs that failed
        texts.append("Note: the methods were not searched with equal numbers of runs and rounds.")
    texts.append("Runs: number of runs x rounds of each rung. The bytes of a search are those of all its runs.")
    return texts


def settings_chapter(section: Section) -> Chapter:
    """Settings that differ, and settings that are shared."""
    groups = section.groups
    configs = [flat(group.config) for group in groups]
    paths = [path for path in differing([group.config for group in groups]) if path != "name"]
    rows = [
        [group.label, "; ".join(f"{path} = {setting_text(config[path])}" for path in paths if path in config)]
        for group, config in zip(groups, configs, strict=True)
    ]
    pieces = [Cells("Settings that differ", ("method", "settings"), rows)] if paths else []
    rows = [[path, setting_text(value)] for path, value in configs[0].items() if path not in (*paths, "name")]
    pieces.append(Cells("Shared settings", ("key", "value"), rows, folded=True))
    return Chapter("Settings", pieces)


CHAPTERS = (
    overview,
    sweep_chapter,
    targets_chapter,
    layers_chapter,
    search_chapter,
    settings_chapter,
)


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
