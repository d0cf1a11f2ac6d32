"""Runs side by side on one page: what accuracy cost in bytes, rounds, seconds and joules, and how to run it again.

The page is one file of HTML without scripts that loads nothing; the same tables can be had in Markdown. Equal runs make
equal pages, byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.text import visible
from thinwire.core.units import human_bytes, human_joules, human_seconds
from thinwire.errors import ConfigError
from thinwire.experiments.collapse import count_broken
from thinwire.experiments.files import write_atomically
from thinwire.experiments.link_time import JOULES_PER_BYTE, LINKS, energy, seconds_by_link
from thinwire.experiments.records import find_runs, read_run, totals
from thinwire.reports.charts import Bar, Curve, Frame, Row, bars, curves, dots, reach, shade, swatch
from thinwire.reports.layer_chart import MOST_LAYERS, LayerChart, layer_chart
from thinwire.reports.page import Chapter, Command, Figure, Grid, Piece, as_html, as_markdown
from thinwire.reports.seed_groups import (
    WAYS,
    Line,
    MeanInterval,
    Reached,
    choose_targets,
    differing,
    flat,
    group,
    yardstick,
)

NARROW = 340  # every chart is drawn twice, wide and narrow; the style sheet shows the one that fits


class Choices(NamedTuple):
    """What the reader chose."""

    targets: tuple[float, ...] = ()
    compute: float | None = None  # seconds that a client trains in a round; measured if None
    joules_per_byte: float = JOULES_PER_BYTE


def report(
    runs: Sequence[Any],
    html: Path | str | None = None,
    md: Path | str | None = None,
    *,
    targets: Sequence[float] = (),
    compute: float | None = None,
    joules_per_megabyte: float | None = None,
) -> list[Line]:
    """Write a page that compares runs; the lines that it compares are returned.

    Args:
        runs: run directories, folders that hold some, or what `tw.simulate(..., out=...)` returned.
        html: where to write the page.
        md: where to write its tables as Markdown.
        targets: accuracies from 0 to 1 whose cost is compared; chosen from the data by default.
        compute: seconds that a client trains in a round, instead of those measured on this machine.
        joules_per_megabyte: of the energy model.
    """
    check_page([file for file in (html, md) if file is not None], targets)
    if compute is not None and not 0 <= compute < math.inf:
        raise ConfigError(f"compute must be 0 or more seconds, not {compute}")
    joules = JOULES_PER_BYTE if joules_per_megabyte is None else joules_per_megabyte / 1e6
    if not 0 < joules < math.inf:
        raise ConfigError(f"joules a megabyte must be more than 0, not {joules_per_megabyte}")
    paths = [Path(getattr(run, "path", None) or run) for run in runs if not _unwritten(run)]
    recorded = [read_run(path) for path in find_runs(paths)]
    recorded = [run for run in recorded if run.records]
    if not recorded:
        raise ConfigError("nothing to report: no round of these runs is recorded yet")
    choices = Choices(tuple(targets), compute, joules)
    tasks = list(dict.fromkeys(run.task for run in recorded))
    lines = [line for task in tasks for line in group([run for run in recorded if run.task == task])]
    chapters = []
    for task in tasks:
        prefix = f"{task}: " if len(tasks) > 1 else ""
        chapters += [Chapter(prefix + heading, pieces) for heading, pieces in _task(task, lines, choices)]
    chapters.append(_meaning(choices))
    title = " and ".join(tasks)
    for file, text in ((html, as_html), (md, as_markdown)):
        if file is not None:
            write_atomically(Path(file), text(f"thinwire: {title}", chapters).encode())
            Path(file).chmod(0o644)  # others may read it
    return lines


def check_page(files: Sequence[Path | str], targets: Sequence[float]) -> None:
    """Refuse what cannot be written, before hours are spent on what would be in it."""
    for target in targets:
        if not 0 < target <= 1:
            raise ConfigError(f"a target is an accuracy above 0 and at most 1, such as 0.8, not {target}")
    for path in map(Path, files):
        if not path.parent.is_dir() or path.is_dir():
            why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise ConfigError(f"{path} cannot be written: {why}; name a file such as page.html")


def summaries(lines: Sequence[Line], compute: float | None = None) -> list[dict[str, Any]]:
    """The totals of every run under the label of its line, as `compare` takes them."""
    several = len({line.runs[0].task for line in lines}) > 1
    return [
        {
            **totals(run.records),
            "status": run.verdict.status,
            "method": f"{run.task}: {line.label}" if several else line.label,
            "seconds_by_link": seconds_by_link(run.records, compute),
        }
        for line in lines
        for run in line.runs
    ]


def _unwritten(run: Any) -> bool:
    if hasattr(run, "history") and run.path is None:
        raise ConfigError("this run was not written to a directory; write tw.simulate(..., out='runs/name')")
    return False


def _task(task: str, all_lines: Sequence[Line], choices: Choices) -> list[Chapter]:
    """The chapters of one task."""
    lines = [line for line in all_lines if line.runs[0].task == task]
    measure = yardstick(lines)
    targets = list(choices.targets) or choose_targets(lines, measure)
    costs = {
        target: [line.reached(target, choices.compute, choices.joules_per_byte) for line in lines] for target in targets
    }
    chapters = [_overview(task, lines, measure, costs)]
    if targets:
        chapters.append(_cost(task, lines, measure, costs))
        chapters.append(_time(task, lines, costs))
    if layers := _layers(task, lines):
        chapters.append(layers)
    chapters.append(_settings(lines))
    chapters.append(_again(lines))
    return chapters


def _overview(task: str, lines: Sequence[Line], measure: Line, costs: dict[float, list[Reached | None]]) -> Chapter:
    metric = "accuracy" if any(line.curve("accuracy") for line in lines) else "loss"
    pieces: list[Piece] = [sentence for sentence in (_headline(lines, measure, costs), _setting(lines)) if sentence]
    mixed = [path for path in differing([line.table for line in lines]) if path.split(".")[0] in ("task", "cohort")]
    if mixed:
        pieces.append(f"Note: these lines differ in {', '.join(mixed)}, so they did not see the same clients and data.")
    if late := [line.label for line in lines if line.unfinished]:
        names = ", ".join(late)
        pieces.append(f"Note: not finished yet: {names}. Totals are of the rounds that are there.")
    pieces += [
        f"Note: {line.label}, seed {run.table.get('seed', 0)}, {run.verdict.status}: {run.verdict.why}."
        for line in lines
        for run in line.broken
    ]
    pieces.append(curve_figure(task, lines, metric, tuple(costs), against="bytes"))
    pieces.append(curve_figure(task, lines, metric, tuple(costs), against="rounds"))
    if any(line.curve("client_accuracy") for line in lines):
        pieces.append(curve_figure(task, lines, "client_accuracy", (), against="bytes"))
    yard = measure.total("bytes_total")
    rows = []
    for line in lines:
        total = line.total("bytes_total")
        ways = [line.total(f"bytes_{way}") for way in WAYS]
        assert total
        assert yard
        ideal = total.mean - (ways[2].mean if ways[2] else 0)
        rows.append(
            [
                line.label,
                _share(line.total("final_accuracy")),
                _share(line.total("best_accuracy")),
                human_bytes(total.mean),
                f"{yard.mean / total.mean:.3g}x" if total.mean else "-",
                _interval(line.total("final_accuracy")),
                *(human_bytes(way.mean) if way else "-" for way in ways),
                human_bytes(ideal),
                f"{min(len(run.records) for run in line.runs):,}",
                f"{len(line.runs)}{' (unfinished)' if line.unfinished else ''}",
                count_broken(run.verdict.status for run in line.runs),
            ]
        )
    # what matters most first: a phone shows three or four columns
    heads = ["method", "final %", "best %", "total", "fewer", "95 % interval", "up", "down", "catch-up", "ideal"]
    heads += ["rounds", "seeds", "broke down"]
    caption = (
        "All rounds: accuracy (mean ± standard deviation over seeds; the interval is of the final one), bytes of all "
        f"messages of all clients, and how many times fewer than {measure.label}"
    )
    return Chapter("What accuracy cost", [*pieces, Grid(caption, heads, rows)])


def _setting(lines: Sequence[Line]) -> str:
    run = lines[0].runs[0]
    task, cohort = run.table.get("task", {}), run.table.get("cohort", {})
    partition, model = task.get("partition", {}), task.get("model", {})
    words = [f"{task.get('clients', '?')} clients, {cohort.get('size', '?')} of them in a round"]
    if partition:
        words.append(
            f"partition {partition.get('kind')}" + (f" (alpha {partition['alpha']:g})" if "alpha" in partition else "")
        )
    parameters = (run.summary or {}).get("parameters")
    words.append(f"model {model.get('kind', '?')}" + (f" of {parameters:,} parameters" if parameters else ""))
    seeds = max(len(line.runs) for line in lines)
    words.append(f"{len(lines)} methods" if len(lines) > 1 else "1 method")
    words.append(f"{seeds} seeds" if seeds > 1 else "1 seed: no spread can be given")
    return "; ".join(words) + "."


def _headline(lines: Sequence[Line], measure: Line, costs: dict[float, list[Reached | None]]) -> str:
    """The one sentence to remember: who reaches the highest target that the yardstick reaches with fewest bytes."""
    place = lines.index(measure)
    for target in sorted(costs, reverse=True):
        theirs = costs[target][place]
        full = [
            (cost.bytes.mean, line)
            for line, cost in zip(lines, costs[target], strict=True)
            if cost and cost.seeds == len(line.runs) and not line.broken  # what it reached is lost again
        ]
        if theirs is None or len(full) < 2:
            continue
        least, best = min(full, key=lambda pair: pair[0])
        if best is measure:
            return f"Cheapest way to {_pc(target)}: {measure.label}, with {human_bytes(least)} in all."
        return (
            f"Cheapest way to {_pc(target)}: {best.label}, with {human_bytes(least)} in all, "
            f"{theirs.bytes.mean / least:.3g} times fewer than {measure.label} ({human_bytes(theirs.bytes.mean)})."
        )
    return ""


def curve_figure(task: str, lines: Sequence[Line], metric: str, targets: tuple[float, ...], against: str) -> Figure:
    """A metric against `bytes` or `rounds`: a line for each method, a band over its seeds."""
    names = {"accuracy": "test accuracy", "client_accuracy": "accuracy of clients' own models", "loss": "training loss"}
    by_bytes = against == "bytes"
    drawn = [
        Curve(line.label, i, [(p.bytes if by_bytes else p.round, p.value, p.low, p.high) for p in line.curve(metric)])
        for i, line in enumerate(lines)
    ]
    x = "bytes of all messages so far, catch-up included (log scale)" if by_bytes else "rounds"
    title = f"{names[metric].capitalize()} against {'bytes' if by_bytes else 'rounds'}, {task}"
    ends = [f"{c.label} ends at {_value(metric, c.points[-1][1])}" for c in drawn if c.points]
    frame = Frame(
        title,
        f"{x} from left to right, {names[metric]} from bottom to top; " + "; ".join(ends) + ".",
        "total bytes (log scale)" if by_bytes else "rounds",
        names[metric],
        ident=f"{_ident(task)}-{metric}-{against}",
        log_x=by_bytes,
        whole_x=not by_bytes,
        x_text=human_bytes if by_bytes else lambda value: f"{value:g}",
        y_text=lambda value: _value(metric, value),
        marks=tuple((target, f"target {_pc(target)}") for target in targets) if by_bytes else (),
    )
    several = any(len(line.runs) > 1 for line in lines)
    band = "MeanInterval over seeds; the band is from the lowest to the highest seed." if several else ""
    where = " Up and left is better." if by_bytes and metric != "loss" else ""
    return Figure(
        title,
        band + where,
        curves(drawn, frame),
        curves(drawn, frame._replace(width=NARROW, height=300)),
        [(swatch(c.number), c.label) for c in drawn],
    )


def _cost(task: str, lines: Sequence[Line], measure: Line, costs: dict[float, list[Reached | None]]) -> Chapter:
    pieces: list[Piece] = [
        "A target is reached in the first evaluated round at or above it, counted for each seed on its own. Catch-up "
        "is what clients got on top because they had missed rounds; without it a bar is the ideal in which nobody "
        "ever does."
    ]
    legend = [(shade(1.0), "up"), (shade(0.55), "down"), (shade(0.0), "catch-up")]
    heads = ("method", "total", "fewer", "rounds", "95 % interval", "ideal", "energy", "seeds")
    several = any(len(line.runs) > 1 for line in lines)
    for target, reached in costs.items():
        theirs = reached[lines.index(measure)]
        rows, drawn = [], []
        for i, (line, cost) in enumerate(zip(lines, reached, strict=True)):
            if cost is None:
                rows.append([line.label, "not reached", *["-"] * 5, f"0 of {len(line.runs)}"])
                continue
            some = "" if cost.seeds == len(line.runs) else f" ({cost.seeds} of {len(line.runs)} seeds)"
            pieces_of_bar = [(cost.ways["up"], 1.0), (cost.ways["down"], 0.55), (cost.ways["catchup"], 0.0)]
            drawn.append(Bar(f"{line.label}{some}", human_bytes(cost.bytes.mean), i, pieces_of_bar, cost.spread))
            rows.append(
                [
                    line.label,
                    human_bytes(cost.bytes.mean),
                    f"{theirs.bytes.mean / cost.bytes.mean:.3g}x" if theirs and not some else "-",
                    f"{cost.rounds.mean:.1f}",
                    _byte_interval(cost.bytes),
                    human_bytes(cost.ideal),
                    human_joules(cost.joules),
                    f"{cost.seeds} of {len(line.runs)}",
                ]
            )
        title = f"Bytes to reach {_pc(target)}, {task}"
        if drawn:
            about = "; ".join(f"{bar.label}: {bar.value}" for bar in drawn) + "."
            frame = Frame(title, about, "bytes", ident=f"{_ident(task)}-cost-{target:g}".replace(".", "-"))
            narrow = bars(drawn, frame._replace(width=NARROW))
            whisker = (
                " MeanInterval over seeds; the thin line is from the lowest to the highest seed." if several else ""
            )
            note = f"All messages of all clients.{whisker}"
            pieces.append(Figure(title, note, bars(drawn, frame), narrow, legend))
        caption = f"{title} (means over the seeds that did), and times fewer than {measure.label} where all seeds did"
        pieces.append(Grid(caption, heads, rows))
    return Chapter("Bytes to a target", pieces)


def _time(task: str, lines: Sequence[Line], costs: dict[float, list[Reached | None]]) -> Chapter:
    target, reached = next(iter(costs.items()))
    rows = [
        Row(
            link.name,
            [
                (i, cost.seconds[link.name], f"{line.label}: {human_seconds(cost.seconds[link.name])}")
                for i, (line, cost) in enumerate(zip(lines, reached, strict=True))
                if cost
            ],
        )
        for link in LINKS
    ]
    title = f"Time to {_pc(target)} by link, {task}"
    about = "; ".join(f"{row.label}: {', '.join(says for _, _, says in row.dots)}" for row in rows)
    frame = Frame(title, about, "time (log scale)", ident=f"{_ident(task)}-time", x_text=human_seconds)
    figure = Figure(
        title,
        "If every client had this link. Left is better.",
        dots(rows, frame),
        dots(rows, frame._replace(width=NARROW)),
        [(swatch(i), line.label) for i, line in enumerate(lines)],
    )
    table = [
        [line.label, _pc(goal), *(human_seconds(cost.seconds[link.name]) for link in LINKS)]
        for goal, costs_of_goal in costs.items()
        for line, cost in zip(lines, costs_of_goal, strict=True)
        if cost
    ]
    speeds = [f"{link.down / 1e6:g} / {link.up / 1e6:g}" for link in LINKS]
    caption = "Time to a target by speed, Mbps down / up (means over the seeds that reached it)"
    grid = Grid(caption, ("method", "target", *speeds), table)
    return Chapter("Time over slow links", [figure, grid])


def _layers(task: str, lines: Sequence[Line]) -> Chapter | None:
    """Traffic by layer, of the lines whose runs counted it; bytes of all lines on one scale."""
    charts: list[tuple[Line, LayerChart]] = []
    alike: list[str] = []
    for i, line in enumerate(lines):
        summary = line.runs[0].summary or {}
        layers = [row for row in summary.get("layers") or [] if isinstance(row, dict) and "layer" in row]
        if not layers:
            continue
        chart = layer_chart(layers, summary.get("rounds"), i, MOST_LAYERS)
        if chart.bytes or any(row.get("syncs") != summary.get("rounds") for row in layers):
            charts.append((line, chart))
        else:
            alike.append(line.label)
    longest = max((reach(chart.bars) for _, chart in charts if chart.bytes), default=0)
    pieces: list[Piece] = []
    if alike:
        names = " and ".join(filter(None, (", ".join(alike[:-1]), alike[-1])))
        pieces.append(
            f"{names}: every layer spoke in every round, and the codec mixes layers, so none has bytes of its own."
        )
    for i, (line, chart) in enumerate(charts):
        title = f"{line.label}: {chart.what}, {task}"
        about = "; ".join(f"{bar.label}: {bar.value}" for bar in chart.bars) + "."
        frame = Frame(title, about, chart.what, ident=f"{_ident(task)}-layers-{i}")
        seed = f"Of seed {line.seeds[0]}. " if len(line.runs) > 1 else ""
        scale = " All methods on one scale." if chart.bytes and len(charts) > 1 else ""
        most = longest if chart.bytes else 0
        figure = Figure(
            title,
            f"{seed}In brackets: rounds in which it spoke.{scale}",
            bars(chart.bars, frame, most),
            bars(chart.bars, frame._replace(width=NARROW), most),
        )
        pieces.append(figure)
    return Chapter("Layers", pieces) if pieces else None


def _settings(lines: Sequence[Line]) -> Chapter:
    tables = [flat(line.table) for line in lines]
    paths = [path for path in differing([line.table for line in lines]) if path != "name"]
    shared = {path: value for path, value in tables[0].items() if path not in paths and path != "name"}
    pieces: list[Piece] = []
    if paths:
        rows = []
        for line, table in zip(lines, tables, strict=True):
            own = [path for path in paths if path in table and (line is lines[0] or table[path] != tables[0].get(path))]
            rows.append([line.label, "; ".join(f"{path} = {_setting_text(table[path])}" for path in own)])
        caption = f"Settings in which they differ; of all but the first, what is not as in {lines[0].label}"
        pieces.append(Grid(caption, ("method", "settings"), rows))
    rows = [[path, _setting_text(value)] for path, value in shared.items()]
    pieces.append(Grid("Settings that they share", ("key", "value"), rows, folded=True))
    machines: dict[str, list[str]] = {}
    for line in lines:
        for run in line.runs:
            words = _environment(run.environment)
            machines.setdefault(words, [])
            if line.label not in machines[words]:
                machines[words].append(line.label)
    rows = [[", ".join(names), words] for words, names in machines.items()]
    pieces.append(Grid("Where they ran", ("methods", "machine and versions"), rows))
    return Chapter("Settings and machines", pieces)


def _environment(environment: dict[str, Any]) -> str:
    if not environment:
        return "not recorded"
    machine = environment.get("gpu") or environment.get("machine", "?")
    words = [f"{environment.get('system', '?')} on {machine}", f"{environment.get('threads', '?')} threads"]
    words += [f"device {environment['device']}"] if environment.get("device") else []
    words += [f"clients trained by {environment['clients_trained_by']}"] if "clients_trained_by" in environment else []
    words += [f"Python {environment.get('python', '?')}"]
    versions = environment.get("versions")
    words += [f"{name} {version}" for name, version in (versions if isinstance(versions, dict) else {}).items()]
    return ", ".join(words)


def _again(lines: Sequence[Line]) -> Chapter:
    from thinwire.reports.rerun import rerun  # late: needs torch, the rest of the page does not

    pieces: list[Piece] = ["Each command repeats one run with exactly these settings."]
    commands = dict.fromkeys(visible(rerun(run.table, run.path), 10_000) for line in lines for run in line.runs)
    return Chapter("Run it again", [*pieces, Command("\n".join(commands))])


def _meaning(choices: Choices) -> Chapter:
    compute = (
        "the measured seconds of the round divided by its clients, because the simulating machine trains them all"
        if choices.compute is None
        else f"{choices.compute:g} s a round, as given"
    )
    megabyte = energy(1e6, choices.joules_per_byte)
    constant = (
        " (0.1 kWh a gigabyte, a figure for mobile networks)" if choices.joules_per_byte == JOULES_PER_BYTE else ""
    )
    return Chapter(
        "What the numbers mean",
        [
            "Bytes are lengths of messages that were made: up from clients, down to clients that were there in the "
            "round before, and catch-up, what clients got on top because they had missed rounds. Total is all three; "
            "ideal is without catch-up.",
            "Curves and totals are means over runs that differ by their seed only. The 95 % interval is that of the "
            "mean over seeds by Student's t: wide with few seeds, and rightly so.",
            "Time of a round = compute + 8 × bytes up of a client / upload speed + 8 × bytes down and catch-up of a "
            "client / download speed; clients work side by side on equal links, and a client's bytes are the round's "
            f"divided by its clients. Compute is {compute}. No latency, no stragglers. FedPara's Tables 7 and 8 are "
            "this formula.",
            f"Energy = {megabyte:.3g} J a megabyte × total bytes{constant}: the form of the user-to-data-centre model "
            "that FedPara uses, in which device, access network, core and data centre each cost some joules a byte. "
            "FedPara prints no constant and estimates differ by more than ten times, so trust the ratios only; they "
            "are those of the bytes. Training is not in it.",
        ],
    )


def _share(value: MeanInterval | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value.mean:.2f}" + (f" ± {100 * value.std:.2f}" if value.half is not None else "")


def _interval(value: MeanInterval | None) -> str:
    if value is None or value.half is None:
        return "-"
    low, high = max(0.0, value.mean - value.half), min(1.0, value.mean + value.half)
    return f"{100 * low:.1f} to {100 * high:.1f}"


def _byte_interval(value: MeanInterval) -> str:
    if value.half is None:
        return "-"
    return f"{human_bytes(max(0.0, value.mean - value.half))} to {human_bytes(value.mean + value.half)}"


def _value(metric: str, value: float) -> str:
    return f"{value:.3g}" if metric == "loss" else _pc(value)


def _pc(share: float) -> str:
    return f"{100 * share:.3g} %"


def _setting_text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _ident(words: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in words)
