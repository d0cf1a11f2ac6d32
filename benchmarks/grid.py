"""Run a grid of experiments, several at a time, and write its table.

    python benchmarks/grid.py benchmarks/grids/mapo-layouts.toml --jobs 2 --out runs/grids --device cpu

A grid file names a task, rounds, seeds, and rows; each row is a method with settings, and `over` lists values to try in
every combination. Every run is an ordinary run directory, finished runs are used again, and the table (mean and
standard deviation over seeds, with the digest of each run) is written to docs/results/NAME.md from those directories.
A row may have its own `rounds`; `yardstick` names the label of the row whose bytes are 100 %. `--set KEY=VALUE` changes
a value in all runs, to try a grid out in small (with `--docs`, so that the table goes elsewhere).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from thinwire.run.config import Experiment, parse_overrides, resolve
from thinwire.run.execute import default_folder
from thinwire.terminal import human_bytes


def experiments(grid: dict, device: str, changes: dict) -> list[tuple[str, str, list[Experiment]]]:
    """(label, settings in words, one experiment a seed) of each line of the table."""
    out = []
    for row in grid["rows"]:
        over = row.get("over", {})
        seeds = row.get("seeds", grid.get("seeds", 1))
        for values in itertools.product(*over.values()):
            chosen = dict(zip(over, values, strict=True))
            common = {"rounds": row.get("rounds", grid["rounds"]), "engine.device": device, **grid.get("set", {})}
            own = {**({"rounds": row["rounds"]} if "rounds" in row else {}), **row.get("set", {}), **chosen}
            own = {key: value for key, value in own.items() if key not in changes}
            words = ", ".join(f"{_short(key)} {value}" for key, value in own.items())
            settings = {**common, **own, **changes}
            runs = [
                resolve(row["method"], row.get("on", grid["on"]), {**settings, "seed": seed}) for seed in range(seeds)
            ]
            out.append((row.get("label", row["method"]), words, runs))
    return out


def _short(key: str) -> str:
    """What a table calls a setting: its last name, or two where the last says nothing."""
    return "evaluated every" if key == "eval.every" else key.rsplit(".", 1)[-1]


def run_one(experiment: Experiment, out: Path) -> None:
    """One run in a process of its own, with one thread where many run side by side."""
    folder = default_folder(experiment, out)
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.parent / f"{folder.name}.toml"
    if (folder / "summary.json").exists():
        return
    from thinwire.run.config import to_table
    from thinwire.run.toml import dumps

    file.write_text(dumps(to_table(experiment)))
    words = ["resume", str(folder)] if (folder / "config.toml").exists() else ["run", str(file), "--out", str(folder)]
    done = subprocess.run([sys.executable, "-m", "thinwire", *words, "-q"], capture_output=True, text=True)
    file.unlink()
    print(
        f"{time.strftime('%H:%M:%S')} {folder.name} {'done' if done.returncode == 0 else done.stderr.strip()}",
        flush=True,
    )


def spread(values: list[float | None], scale: float = 100.0) -> str:
    """Mean and standard deviation in words."""
    known = [scale * value for value in values if value is not None]
    if not known:
        return "-"
    return f"{statistics.fmean(known):.2f}" + (f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else "")


def table(grid: dict, lines: list[tuple[str, str, list[Experiment]]], out: Path) -> str:
    """The grid's results in Markdown."""
    own = any(e.task.hold_out for _, _, runs in lines for e in runs)
    head = ["method", "settings", "seeds", "best accuracy %", "final accuracy %"]
    head += ["best own accuracy %", "final own accuracy %"] if own else []
    yardstick = grid.get("yardstick")
    head += ["numbers trained", "bytes up", "bytes down", "catch-up", "total"]
    head += [f"up, % of {yardstick}", f"total, % of {yardstick}"] if yardstick else []
    head += ["runs"]
    whole = {way: _mean_bytes(lines, yardstick, way, out) for way in ("bytes_up", "bytes_total")}
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for label, words, runs in lines:
        found = [(e, default_folder(e, out) / "summary.json") for e in runs]
        done = [json.loads(file.read_text()) for _, file in found if file.exists()]
        if not done:
            cells = [label, words, "0", "did not finish"]
            rows.append("| " + " | ".join(cells + ["-"] * (len(head) - len(cells))) + " |")
            continue
        cells = [
            label,
            words,
            str(len(done)),
            *(spread([d[k] for d in done]) for k in ("best_accuracy", "final_accuracy")),
        ]
        if own:
            cells += [spread([d[k] for d in done]) for k in ("best_own_accuracy", "final_own_accuracy")]
        cells.append(f"{done[0]['trainable']:,}")
        ways = ("bytes_up", "bytes_down", "bytes_catchup", "bytes_total")
        cells += [human_bytes(statistics.fmean(d[way] for d in done)) for way in ways]
        if yardstick:
            shares = [(statistics.fmean(d[way] for d in done), one) for way, one in whole.items()]
            cells += [f"{100 * mean / one:.2f}" if one else "-" for mean, one in shares]
        cells.append(" ".join(e.digest()[:6] for e, file in found if file.exists()))
        rows.append("| " + " | ".join(cells) + " |")
    first = lines[0][2][0]
    runs = [e for _, _, group in lines for e in group]
    rounds = " or ".join(sorted({f"{e.rounds:,}" for e in runs}, key=lambda word: (len(word), word)))
    steps = sorted({e.local.steps for e in runs})
    work = f"{first.local.epochs} epoch(s)" if steps == [0] else f"{' or '.join(map(str, steps))} local steps a round"
    setting = (
        f"{first.task.kind}, {first.task.clients} clients, {first.cohort.size} a round, {rounds} rounds, "
        f"batch {first.local.batch}, {work}; device {first.engine.device}."
    )
    return f"# {grid['title']}\n\n{grid.get('text', '').strip()}\n\n{setting}\n\n" + "\n".join(rows) + "\n"


def _mean_bytes(lines: list[tuple[str, str, list[Experiment]]], label: str | None, way: str, out: Path) -> float | None:
    """The mean bytes of the row of that label; None if there is none, or nothing of it is done."""
    files = [default_folder(e, out) / "summary.json" for name, _, runs in lines if name == label for e in runs]
    known = [json.loads(file.read_text())[way] for file in files if file.exists()]
    return statistics.fmean(known) if known else None


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grids", nargs="+", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/grids"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--docs", type=Path, default=Path("docs/results"))
    parser.add_argument("--table-only", action="store_true", help="run nothing, write the tables")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value in all runs")
    options = parser.parse_args()
    if options.jobs > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    work = [(grid, tomllib.loads(grid.read_text())) for grid in options.grids]
    lines = {grid: experiments(content, options.device, parse_overrides(options.set)) for grid, content in work}
    if not options.table_only:
        todo = {e.digest(): e for rows in lines.values() for _, _, runs in rows for e in runs}
        print(f"{len(todo)} runs, {options.jobs} at a time", flush=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda e: run_one(e, options.out), todo.values()))
    options.docs.mkdir(parents=True, exist_ok=True)
    for grid, content in work:
        text = table(content, lines[grid], options.out)
        words = " ".join([grid.as_posix(), "--device", options.device, *(f"--set {word}" for word in options.set)])
        text += f"\nWritten by `python benchmarks/grid.py {words}`.\n"
        (options.docs / f"{grid.stem}.md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
