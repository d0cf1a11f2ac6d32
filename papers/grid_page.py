"""Page of a grid: means and standard deviations over seeds, the search, and the values of every run as JSON.

    python -m papers grid mapo-fashion --jobs 2 --out runs/grids --device cpu

The files of grids are in `papers/grids`; `grid.py` defines their format. Every run is an ordinary run directory, and
finished runs are used again. The table is written to docs/results/NAME.md, and the values of every run to NAME.json.
Runs that a .json file there has are not run again, so rows of different days stand together; with `targets` they are,
since bytes by round are not kept.

`reference` is the label of the row whose bytes are 100 %; `targets` adds columns with the bytes until an accuracy was
reached (with `"eval.target_accuracy"` in `set`, runs end there); `last = 5` adds the mean of the last five evaluations.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from papers.archive import Archive, Runs
from papers.grid import LAST, Grid, Line, broken, last_accuracy, metrics, score, summary, to_target
from papers.markdown import at_edge, markdown, mean_std_text, selection_set, widened
from papers.tables import FOLDER, read
from thinwire.core.text import human_bytes
from thinwire.errors import UnknownName
from thinwire.federation.settings import Settings
from thinwire.reports.rows import MeanInterval
from thinwire.runs.config import digest
from thinwire.runs.files import write_all

KEPT = ("best_accuracy", "final_accuracy", "best_client_accuracy", "final_client_accuracy", "trainable")
DIRECTIONS = ("bytes_up", "bytes_down", "bytes_catchup", "bytes_total")


def interval(values: Sequence[float | None]) -> str:
    """The 95 % interval of the mean, by Student's t, in percent."""
    found = MeanInterval.of(None if value is None else 100 * value for value in values)
    if found is None or found.half is None or len([value for value in values if value is not None]) < 3:
        return "-"
    return f"{found.mean - found.half:.2f} to {found.mean + found.half:.2f}"


def results(grid: Grid, lines: list[Line], out: Runs) -> str:
    """The main table."""
    personal = any(e.task.validation_fraction for line in lines for e in line.runs)
    targets, last = grid.content.get("targets", []), grid.content.get("last", 0)
    head = ["method", "settings", "seeds", "rounds", "best accuracy %", "final accuracy %"]
    head += [f"mean of the last {last} %"] if last else []
    head += ["best client accuracy %", "final client accuracy %", "95 % interval of the latter"] if personal else []
    head += ["trained parameters", "bytes up", "bytes down", "catch-up", "total"]
    reference = grid.content.get("reference")
    head += [f"up, % of {reference}", f"total, % of {reference}"] if reference else []
    for target in targets:
        head += [f"rounds to {100 * target:g} %", f"bytes to {100 * target:g} %", "the same without catch-up"]
    head.append("runs")
    whole = {direction: _mean_bytes(lines, reference, direction, out) for direction in ("bytes_up", "bytes_total")}
    rows, runs = [], []
    for line in lines:
        done = [(e, s) for e in line.runs if (s := summary(e, out))]
        runs.append([s for _, s in done])
        if not done:
            rows.append([line.label, line.settings, "0", str(line.runs[0].rounds), "did not finish"])
            continue
        of = {key: [s[key] for _, s in done] for key in (*KEPT, *DIRECTIONS)}
        seeds = " ".join(str(e.seed) for e, _ in done)
        missing = f" ({len(line.runs) - len(done)} did not finish)" if len(done) < len(line.runs) else ""
        cells = [line.label, line.settings, seeds + missing, str(line.runs[0].rounds)]
        cells += [mean_std_text(of["best_accuracy"]), mean_std_text(of["final_accuracy"])]
        cells += [mean_std_text([last_accuracy(e, out, last) for e, _ in done])] if last else []
        if personal:
            cells += [mean_std_text(of["best_client_accuracy"]), mean_std_text(of["final_client_accuracy"])]
            cells.append(interval(of["final_client_accuracy"]))
        cells.append(f"{of['trainable'][0]:,}")
        cells += [human_bytes(statistics.fmean(of[direction])) for direction in DIRECTIONS]
        if reference:
            cells += [
                f"{100 * statistics.fmean(of[direction]) / one:.2f}" if one else "-" for direction, one in whole.items()
            ]
        for target in targets:
            cells += _target_cells([to_target(e, out, target) for e, _ in done])
        cells.append(" ".join(digest(e)[:6] for e, _ in done))
        rows.append(cells)
    return markdown(*widened(head, rows, runs))


def _mean_bytes(lines: list[Line], label: str | None, direction: str, out: Runs) -> float | None:
    """The mean bytes of the row with that label; None if there is no such row or no finished run."""
    known = [s[direction] for line in lines if line.label == label for e in line.runs if (s := summary(e, out))]
    return statistics.fmean(known) if known else None


def _target_cells(reached: list[tuple[int, int, int] | None]) -> list[str]:
    """Means over the seeds that reached the target, and their number if not all did."""
    known = [r for r in reached if r]
    if not known:
        return ["never", "never", "never"]
    note = f" ({len(known)} of {len(reached)} seeds)" if len(known) < len(reached) else ""
    rounds, honest, ideal = (statistics.fmean(values) for values in zip(*known, strict=True))
    return [f"{rounds:.0f}{note}", human_bytes(honest) + note, human_bytes(ideal) + note]


def search(grid: Grid, trials: list[Line], lines: list[Line], out: Runs) -> str:
    """The table of trials; marks whether the chosen value is at the edge of the range."""
    chosen = {(line.row, json.dumps(line.chosen)) for line in lines}
    rows, runs = [], []
    for line in trials:
        done = [s for e in line.runs if (s := summary(e, out))]
        runs.append(done)
        mark = ""
        if (line.row, json.dumps(line.chosen)) in chosen:
            over = {key: [trial.chosen[key] for trial in trials if trial.row == line.row] for key in line.chosen}
            edges = [k.rsplit(".", 1)[-1] for k, v in over.items() if at_edge(line.chosen[k], v)]
            mark = "chosen" + (f", at the edge of {', '.join(edges)}" if edges else "")
        words = _score_text(line, grid.by(line.row), out) if len(done) == len(line.runs) else "did not finish"
        rows.append([line.label, line.settings, words, mark, " ".join(digest(e)[:6] for e in line.runs)])
    seeds = ", ".join(str(seed) for seed in grid.tune["seeds"])
    by = " or ".join(dict.fromkeys(grid.by(line.row) for line in trials))
    what = by if by.startswith("bytes to ") else f"{by.replace('_', ' ')} %"
    head = ["method", "settings", what, "", "runs"]
    if what.startswith("bytes to "):
        head.insert(3, "best accuracy %")
        rows = [
            [*row[:3], mean_std_text([s["best_accuracy"] for s in mine]), *row[3:]]
            for row, mine in zip(rows, runs, strict=True)
        ]
    rounds = " or ".join(str(n) for n in sorted({line.runs[0].rounds for line in trials}))
    text = f"\n## The search\n\nOn seed {seeds}, {rounds} rounds, by accuracy {selection_set(what)}.\n\n"
    return text + markdown(*widened(head, rows, runs))


def _score_text(line: Line, by: str, out: Runs) -> str:
    """The score of a trial as text; failed runs have no score."""
    if by.startswith(LAST):
        return "failed" if broken(line, out) else f"{100 * score(line, out, by):.2f}"
    if not by.startswith("bytes to "):
        return mean_std_text([(summary(e, out) or {}).get(by) for e in line.runs]).split()[0]
    value = score(line, out, by)
    return "failed" if broken(line, out) else "never" if value == -math.inf else human_bytes(-value)


def page(name: str, grid: Grid, lines: list[Line], out: Runs) -> str:
    """The page of a grid."""
    first = lines[0].runs[0]
    steps = sorted({e.local.steps for line in lines for e in line.runs})
    epochs = f"{first.local.epochs} epoch(s)"
    work = " or ".join(f"{count} local steps per round" if count else epochs for count in steps)
    setting = (
        f"{first.task.kind}, {first.task.clients} clients, {first.cohort.size} per round, batch {first.local.batch}, "
        f"{work}; device {first.engine.device}."
    )
    done = [e for line in lines for e in line.runs if summary(e, out)]
    data = " Or: ".join(dict.fromkeys(filter(None, map(out.note, done))))  # runs on two machines may differ
    text = f"# {grid.content['title']}\n\n{grid.content.get('text', '').strip()}\n\n{setting}\n\n"
    text += f"{data}\n\n" if data else ""
    text += results(grid, lines, out)
    if trials := grid.trials(out):
        text += search(grid, trials, lines, out)
    words = " ".join([name, "--device", grid.device, *(f"--set {word}" for word in grid.changes)])
    return text + f"\nWritten by `python -m papers grid {words}`.\n"


def records(lines: list[Line], out: Runs, last: int = 0) -> dict[str, Any]:
    """The values of every run of a page, by the short digest used in the page."""
    found = {}
    for line in lines:
        for e in line.runs:
            if s := summary(e, out):
                curve = [[m["round"], m["accuracy"]] for m in metrics(e, out) if m["accuracy"] is not None]
                found[digest(e)[:6]] = {
                    "method": line.label,
                    "settings": line.settings,
                    "seed": e.seed,
                    "rounds": e.rounds,
                    **{key: s[key] for key in (*KEPT, *DIRECTIONS)},
                    **({"last_accuracy": last_accuracy(e, out, last)} if last else {}),
                    "accuracy": curve,
                    **({"note": note} if (note := out.note(e)) else {}),
                    **{key: s.get(key) for key in ("task", "status", "status_round", "chance_accuracy")},
                }
    return found


def archive(grids: Iterable[Grid], docs: Path) -> Archive:
    """The runs of some grids that the .json files of a folder have, by seed, rounds and the short digest."""
    files = [json.loads(file.read_text()) for file in sorted(docs.glob("*.json"))]
    kept = {name: run for file in files for name, run in file.items() if isinstance(run, dict) and "accuracy" in run}
    runs = {}
    for grid in grids:
        if not grid.content.get("targets"):
            for e in (e for line in (*grid.lines(), *grid.trials()) for e in line.runs):
                if found := _same(e, kept.get(digest(e)[:6])):
                    runs[digest(e)[:6]] = {**found, "digest": digest(e), "curve": _curve(found)}
    return Archive({}, runs)


def _same(experiment: Settings, run: dict[str, Any] | None) -> dict[str, Any] | None:
    """The run, if it has the seed and the rounds of the experiment."""
    wanted = (experiment.seed, experiment.rounds)
    return run if run is not None and (run.get("seed"), run.get("rounds")) == wanted else None


def _curve(run: dict[str, Any]) -> list[list[Any]]:
    """Round, bytes (not kept) and accuracy of every evaluated round."""
    return [[number, 0, accuracy] for number, accuracy in run["accuracy"]]


def load_grid(name: str, device: str = "cpu", changes: Sequence[str] = ()) -> Grid:
    """A grid of this folder by its name."""
    known = sorted(file.stem for file in (FOLDER / "grids").glob("*.toml"))
    if name not in known:
        raise UnknownName("grid", name, known)
    return Grid(copy.deepcopy(read(f"grids/{name}.toml")), device, changes)


def write_page(name: str, grid: Grid, runs: Runs, docs: Path) -> str:
    """Write the page of a grid and the values of its runs; returns the text."""
    lines = grid.final(runs)
    text = page(name, grid, lines, runs)
    kept = records([*lines, *grid.trials(runs)], runs, grid.content.get("last", 0))
    files = {f"{name}.md": text, f"{name}.json": run_lines(dict(sorted(kept.items())))}
    write_all(docs, {file: content.encode() for file, content in files.items()})
    return text


def run_lines(runs: Mapping[str, Any]) -> str:
    """A JSON file with one run a line."""
    body = ",\n".join(f"{json.dumps(name)}: {json.dumps(run)}" for name, run in runs.items())
    return "{\n" + body + "\n}\n"
