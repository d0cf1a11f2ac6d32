"""The chapters of a page: functions of a part of the table, one task and objective, that return what is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from thinwire.core.reference import short_name
from thinwire.core.text import human_bytes, visible
from thinwire.metrics.objective import is_number, metric_value
from thinwire.reports import figures
from thinwire.reports.page import Cells, Chapter, Drawing, Headline, Piece
from thinwire.reports.rows import (
    BASELINE,
    Row,
    differing,
    objective_name,
    value_text,
)
from thinwire.reports.table import Table, capital, curve_drawing
from thinwire.reports.targets import headline, target_text
from thinwire.runs.records import read_clients, troubles
from thinwire.runs.toml import flat

MAX_LAYERS, MAX_CLIENTS = 16, 20


def chapters_of(part: Table, prefix: str = "") -> list[Chapter]:
    """The chapters for which its runs have data."""
    name = capital(objective_name(part.objective).removeprefix("test "))
    found = {
        f"{name} and bytes": _overview(part),
        "Bytes to a target": _targets(part),
        "Clients": _clients(part),
        "Layers": _layers(part),
        "Settings": _settings(part),
    }
    return [Chapter(prefix + heading, pieces) for heading, pieces in found.items() if pieces]


def _overview(part: Table) -> list[Piece]:
    """The main result, curves, and the table of all rounds."""
    rows, ranked = part.rows, part.objective.key
    metrics = dict.fromkeys(path for row in rows for path in row.others if path.startswith("metrics."))
    others = [one for one in ("accuracy", "client_accuracy", *metrics) if one != ranked]
    main = ranked if any(row.curve(ranked) for row in rows) else "loss"
    lead = headline(rows, part.baseline, part.costs)
    return [
        *([Headline(lead)] if lead else []),
        *_untuned(part),
        _setup(rows),
        *_notes(rows),
        part.drawing(main),
        part.drawing(main, by_bytes=False),
        *(part.drawing(one) for one in others if any(row.curve(one) for row in rows)),
        part.runs_cells(),
        *part.notes(),
    ]


def _untuned(part: Table) -> list[Piece]:
    """One sentence if FedAvg has one setting only and no record of a search."""
    found = [row for row in part.rows if row.runs[0].name == BASELINE]
    if len(part.rows) < 2 or len(found) != 1 or found[0].search:
        return []
    return [
        f"{found[0].label} ran with one setting only and without a search, so a tuned {BASELINE} may need fewer bytes."
    ]


def _setup(rows: Sequence[Row]) -> str:
    """Clients, partition, model, number of methods and of seeds, as one sentence."""
    run, seeds = rows[0].runs[0], max(len(row.runs) for row in rows)
    config, summary = flat(run.table), run.summary or {}
    model = short_name(str(config.get("task.model.kind") or summary.get("model", "?")))  # the class of a user's module
    alpha = f" (alpha {config['task.partition.alpha']:g})" if "task.partition.alpha" in config else ""
    parameters = summary.get("parameters")
    return (
        f"{config.get('task.clients', '?')} clients, {config.get('cohort.size', '?')} sampled per round; "
        f"partition {config.get('task.partition.kind', 'of the task')}{alpha}; model {visible(model, 80)}"
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
            notes += (
                [f"{which}: {found}; if clients are malicious, try aggregator = multi-krum."]
                if (found := troubles(run.records))
                else []
            )
            told = run.summary or {}
            if is_number(told.get("epsilon")) and is_number(told.get("delta")):
                notes.append(
                    f"{which}: epsilon {told['epsilon']:.4g} at delta {told['delta']:g} for neighbors in which "
                    f"{visible(str(told.get('neighbors', 'one client is absent')), 200)}."
                )
    return notes


def _targets(part: Table) -> list[Piece]:
    """Bytes to each target: bars and a table."""
    side, pieces = "above" if part.objective.higher_is_better else "below", list[Piece]()
    for target, reached in part.costs.items():
        bars, never = [], []
        for i, (row, cost) in enumerate(zip(part.rows, reached, strict=True)):
            if cost is None:
                never.append(row.label)
                continue
            sent, count = cost.sent.values(), f"{len(cost.by_seed)} of {len(row.runs)}"
            label = row.label if len(sent) == len(row.runs) else f"{row.label} ({count} seeds)"
            ways = [cost.mean(f"bytes_{way}") for way in ("up", "down", "catchup")]
            text = human_bytes(cost.mean("bytes_total"))
            bars.append(figures.Bar(label, text, ways, (min(sent), max(sent)), i))
        note = "All messages of all clients: up (solid), down (pale), catch-up (palest)."
        if any(len(row.runs) > 1 for row in part.rows):
            note += " Mean over seeds; the thin line spans the lowest to the highest seed."
        if never:
            note += f" Never reached by {', '.join(never)}."
        if bars:
            title = f"Bytes to reach {target_text(part.objective, target)}, {part.rows[0].task}"
            pieces.append(Drawing(title, note, partial(figures.bars, bars)))
    if part.costs:
        rule = (
            f"A target is reached in the first evaluated round from which on the objective stays at or {side} it "
            "(a share of correct labels: within two standard errors), for each seed separately."
        )
        pieces += [part.target_cells(), rule]
    return pieces


def _clients(part: Table) -> list[Piece]:
    """The accuracy, or the loss, of each client at the end of the first run of each method, the worst first."""
    found = {row.label: clients for row in part.rows if (clients := read_clients(row.runs[0].path))}
    if not found:
        return ["No client was measured by itself, since none has validation examples: --validation-fraction 0.2."]
    lines, tables = list[figures.Curve](), list[Cells]()
    for label, clients in found.items():
        by = "accuracy" if "accuracy" in clients[0] else "loss"
        lines.append(figures.Curve(label, [(i, *[one[by]] * 3) for i, one in enumerate(clients, 1) if by in one]))
        heads = list(dict.fromkeys(name for one in clients for name in one))
        rows = [[value_text(one.get(name, "")) for name in heads] for one in clients[:MAX_CLIENTS]]
        caption = f"{label}: the {len(rows)} worst of {len(clients):,} clients"
        tables.append(Cells(caption, [visible(name.replace("_", " "), 60) for name in heads], rows, len(found) > 1))
    chart = curve_drawing(
        f"{capital(by)} of each client, {part.rows[0].task}",
        lines,
        by == "accuracy",
        ["Each client's model after the last round, on its own validation examples. First run of each method."],
        x="clients, the worst first",
        y=by,
        integer_x=True,
    )
    return [chart, *tables]


def _layers(part: Table) -> list[Piece]:
    """Bytes by layer of the methods whose runs recorded them."""
    bars = list[figures.Bar]()
    for i, row in enumerate(part.rows):
        summary = row.runs[0].summary or {}
        found = [one for one in summary.get("layers") or () if isinstance(one, dict) and one.get("bytes_up")]
        for one in sorted(found, key=lambda one: -one["bytes_up"])[:MAX_LAYERS]:
            label = f"{row.label}: {one['layer']} ({one.get('syncs')} of {len(row.runs[0].records)})"
            bars.append(figures.Bar(label, human_bytes(one["bytes_up"]), [one["bytes_up"]], series=i))
    note = (
        f"In parentheses: rounds in which it was synchronized. First run, {MAX_LAYERS} largest layers of each method."
    )
    return [Drawing(f"Bytes up by layer, {part.rows[0].task}", note, partial(figures.bars, bars))] if bars else []


def _settings(part: Table) -> list[Piece]:
    """How settings were searched, settings that differ, and settings that are shared."""
    configs = {row.label: flat(row.config) for row in part.rows}
    paths = [path for path in differing([row.config for row in part.rows]) if path != "name"]
    own = [
        (label, "; ".join(f"{path} = {value_text(config[path])}" for path in paths if path in config))
        for label, config in configs.items()
    ]
    first = next(iter(configs.values()))
    shared = [(path, value_text(value)) for path, value in first.items() if path not in (*paths, "name")]
    tables = [part.searches(), Cells("Settings that differ", ("method", "settings"), own if paths else ())]
    return [*(one for one in tables if one.rows), Cells("Shared settings", ("key", "value"), shared, folded=True)]


def definitions() -> Chapter:
    """Definitions of bytes, intervals and time: the last chapter of a page."""
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
            "the round divided by its number of clients. Compute is the measured seconds of the round divided by its "
            "number of clients, since one machine simulates all of them. Latency and stragglers are not modeled. "
            "FedPara's Tables 7 and 8 use this formula.",
        ],
    )


def retry_text(retry: Mapping[str, Any]) -> str:
    """One time that a run went back, in a sentence; the values may come from a damaged file.

    >>> found = {"round": 3, "status": "rolled back", "from_round": 0, "left_out": [2], "bytes_abandoned": 2000}
    >>> retry_text(found)
    'round 3 rolled back: back to the start without clients 2, 2 kB abandoned'
    """
    number, back, lost = (metric_value(retry, key) or 0 for key in ("round", "from_round", "bytes_abandoned"))
    where = f"round {back:g}" if back else "the start"
    status = visible(str(retry.get("status")), 40)
    out = [f"{one}" for one in retry.get("left_out") or () if isinstance(one, int)]
    without = f" without clients {', '.join(out[:20])}" if out else ""
    return f"round {number:g} {status}: back to {where}{without}, {human_bytes(lost)} abandoned"
