"""Train the tasks of `stranger_tasks.py` with untouched presets, and check that none of them fails.

    python benchmarks/strangers.py --processes 15 --json strangers.jsonl
    python benchmarks/strangers.py --methods fedavg --lr 0.01 0.03 0.1 0.3 1 --processes 15 --json rates.jsonl
    python benchmarks/strangers.py --table strangers.jsonl rates.jsonl

A method is given to `tw.simulate` by its name alone: no rounds, no rate, no schedule, nothing else is set. Each
of the five seeds has its own data, clients and initial weights (`benchmarks/stranger_tasks.py`). The check holds if, in
the mean over the seeds,

    no run diverges (a loss is not finite), is refused, collapses or stays at chance,
    FedAvg is within 2 points of FedAvg at the best of the rates of `--lr`, on every task,
    `thin`, `mapo`, `fedpara` and `topk` are within 3 points of FedAvg on every task, `lora` and `flasc` within 5.

"last" is the mean accuracy of the last five evaluations, "best" that of the best one. A run that diverged counts with
the accuracy of a constant prediction. Differences are taken seed by seed. The exit code is 1 if the check fails.

`--json` writes a line after each run, so a run that is killed keeps its results; the same command again makes the runs
that are missing. Seeds come in order, each with all tasks and methods.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import thinwire as tw
from benchmarks.stranger_tasks import TASKS
from thinwire.core.text import human_bytes
from thinwire.errors import ConfigError, Diverged
from thinwire.federation.job import RoundRecord
from thinwire.runs.collapse import chance_among

MARGINS = {"fedavg": 2.0, "mapo": 3.0, "thin": 3.0, "fedpara": 3.0, "topk": 3.0, "lora": 5.0, "flasc": 5.0}
METHODS = tuple(MARGINS)  # and the points that each may lose, FedAvg to its best rate, the others to FedAvg
SEEDS = (101, 102, 103, 104, 105)  # the sizes of the tasks were chosen with FedAvg on seed 1
LAST = 5  # evaluations of "last"


class Case(NamedTuple):
    """One run: a task, a method and a seed; `lr` and `rounds` only for exploration."""

    task: str
    method: str
    seed: int
    lr: float | None = None
    rounds: int | None = None
    device: str = "cpu"


class Row(NamedTuple):
    """The result of one run.

    Args:
        task, method, seed, lr, rounds: the run; lr and rounds are None if untouched.
        status: `finished`, `collapsed`, `at chance`, `diverged`, or `refused` if the method cannot train the model.
        why: one sentence, if it is not `finished`.
        last: mean accuracy of the last five evaluations; None if refused.
        best: best accuracy; None if refused.
        bytes: all bytes that were sent.
        seconds: wall time.
        curve: ten accuracies at equal distances, up to the last one: whether the run was near its plateau.
    """

    task: str
    method: str
    seed: int
    lr: float | None
    rounds: int | None
    status: str
    why: str
    last: float | None
    best: float | None
    bytes: int
    seconds: float
    curve: tuple[float, ...] = ()


def train(case: Case) -> Row:
    """One run, in one thread. Divergence and refusal are results."""
    torch.set_num_threads(1)
    task, began = TASKS[case.task](case.seed), time.perf_counter()
    history: list[RoundRecord] = []
    status, why = "finished", ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a change of status; it is in the row
            run = tw.simulate(
                task.model,
                task.clients,
                case.method,
                test=task.test,
                seed=case.seed,
                device=case.device,
                on_round=history.append,
                **{name: value for name, value in (("lr", case.lr), ("rounds", case.rounds)) if value is not None},
            )
        status, why = run.status, run.status_reason
    except Diverged as error:
        status, why = "diverged", str(error)
    except ConfigError as error:
        status, why = "refused", str(error)
    found: list[float | None] = [record.accuracy for record in history]
    accuracies = [one for one in found if one is not None]
    last = statistics.fmean(accuracies[-LAST:]) if accuracies and status != "refused" else None
    best = max(accuracies, default=None)
    if status == "diverged":
        chance = chance_among(task.test[1])
        assert chance is not None
        last, best = chance.share, max(chance.share, best or 0.0)
    sent = sum(record.bytes_up + record.bytes_down + record.bytes_catchup for record in history)
    curve = tuple(round(accuracies[len(accuracies) * i // 10 - 1], 4) for i in range(1, 11) if len(accuracies) >= 10)
    return Row(*case[:5], status, why, last, best, sent, time.perf_counter() - began, curve)


def measure(cases: Sequence[Case], processes: int) -> Iterator[Row]:
    """The results of all cases, each as soon as it is known."""
    if processes <= 1:
        yield from map(train, cases)
        return
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads of torch may hang
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for done in as_completed([pool.submit(train, case) for case in cases]):
            yield done.result()


def table(rows: Sequence[Row]) -> str:
    """A Markdown table: one line for each task and method.

    >>> row = Row("tabular", "fedavg", 1, None, None, "finished", "", 0.5, 0.75, 1000, 2.0)
    >>> print(table([row, row._replace(method="thin", last=0.25, status="collapsed", bytes=10)]).splitlines()[-1])
    | tabular | thin | 25.0 | 75.0 | -25.0 | 0 of 1 finished, 1 collapsed | 10 B | 2 |
    """
    lines = [
        "| task | method | last, % | best, % | last - FedAvg's, points | runs | bytes | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task, label in dict.fromkeys((row.task, _label(row)) for row in rows):
        own = [row for row in rows if (row.task, _label(row)) == (task, label)]
        counts = Counter(row.status for row in own)
        broken = "".join(f", {n} {status}" for status, n in counts.items() if status != "finished")
        gaps = differences(rows, task, label) if own[0].method != "fedavg" or own[0].lr else []
        cells = (
            task,
            label,
            _mean_std([row.last for row in own]),
            _mean_std([row.best for row in own]),
            f"{statistics.fmean(gaps):+.1f}" if gaps else "-",
            f"{counts['finished']} of {len(own)} finished{broken}",
            human_bytes(round(statistics.fmean(row.bytes for row in own))),
            f"{statistics.fmean(row.seconds for row in own):.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def differences(rows: Iterable[Row], task: str, label: str) -> list[float]:
    """The "last" of a method minus that of FedAvg with its own rate and as many rounds, in points, for each seed."""
    known = [row for row in rows if row.task == task and row.last is not None]
    base = {(row.rounds, row.seed): row.last for row in known if row.method == "fedavg" and row.lr is None}
    own = sorted((row.seed, row.rounds, row.last) for row in known if _label(row) == label)
    return [100 * (last - base[rounds, seed]) for seed, rounds, last in own if (rounds, seed) in base]


class Check(NamedTuple):
    """One line of the verdict."""

    holds: bool
    text: str


def verdict(rows: Sequence[Row]) -> list[Check]:
    """The lines that must hold, for untouched presets.

    >>> row = Row("tabular", "fedavg", 1, None, None, "finished", "", 0.5, 0.75, 1000, 2.0)
    >>> [check.holds for check in verdict([row, row._replace(lr=0.1), row._replace(method="thin", last=0.48)])]
    [True, True, True]
    >>> [check.holds for check in verdict([row, row._replace(lr=0.1, last=0.6), row._replace(method="thin", last=0.4)])]
    [True, False, False]
    """
    rows = [row for row in rows if row.rounds is None]
    own = [row for row in rows if row.lr is None]
    broken = [row for row in own if row.status != "finished"]
    checks = [
        Check(not broken and bool(own), f"no divergence, refusal or collapse: {_names(broken)} of {len(own)} runs")
    ]
    tasks = dict.fromkeys(row.task for row in own)
    for method in dict.fromkeys(row.method for row in own):
        labels = {_label(row) for row in rows if row.method == method and (row.lr is None) == (method != "fedavg")}
        gaps = {task: [gap for label in labels if (gap := differences(rows, task, label))] for task in tasks}
        sign, base = (-1, "its best rate") if method == "fedavg" else (1, "fedavg")
        means = {task: sign * max(map(statistics.fmean, found)) for task, found in gaps.items() if found}
        if means or method != "fedavg":
            each = ", ".join(f"{task} {mean:+.1f}" for task, mean in means.items())
            close = len(means) == len(tasks) and min(means.values()) >= -MARGINS.get(method, 3.0)
            checks.append(Check(close, f"{method} within {MARGINS.get(method, 3.0):g} points of {base}: {each}"))
    return checks


def _label(row: Row) -> str:
    """The method, with what was overridden."""
    lr = "" if row.lr is None else f", lr {row.lr:g}"
    rounds = "" if row.rounds is None else f", {row.rounds} rounds"
    return f"{row.method}{lr}{rounds}"


def _mean_std(values: Iterable[float | None]) -> str:
    """Mean and standard deviation in percent; a dash if there is no value."""
    known = [100 * value for value in values if value is not None]
    if not known:
        return "-"
    spread = f" ± {statistics.stdev(known):.1f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.1f}{spread}"


def _names(rows: Sequence[Row]) -> str:
    """The number of runs, and which."""
    which = ", ".join(f"{row.task} {row.method} seed {row.seed} {row.status}" for row in rows)
    return f"{len(rows)} ({which})" if rows else "0"


def read(files: Iterable[Path]) -> list[Row]:
    """The rows of files that `--json` wrote."""
    return [Row(**json.loads(line)) for file in files for line in file.read_text().splitlines()]


def main() -> None:
    """Train, print the table and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", type=Path, help="a file that gets one line a run, as soon as it is known")
    parser.add_argument("--table", type=Path, nargs="+", help="train nothing; read files that --json wrote")
    parser.add_argument("--lr", type=float, nargs="+", help="learning rates instead of the one that is found")
    parser.add_argument("--rounds", type=int, help="for exploration: other than 50 rounds")
    options = parser.parse_args()
    cases = [
        Case(task, method, seed, lr, options.rounds, options.device)
        for seed in options.seeds
        for task in options.tasks
        for method in options.methods
        for lr in options.lr or [None]
    ]
    rows = read(options.table or [])
    if not options.table:
        if options.json and options.json.exists():
            rows = [row for row in read([options.json]) if Case(*row[:5], options.device) in cases]
        done = {row[:5] for row in rows}
        for row in measure([case for case in cases if case[:5] not in done], options.processes):
            rows.append(row)
            line = f"{row.task} {_label(row)} seed {row.seed}: {row.status} {_mean_std([row.last])} % {row.why}"
            print(f"{len(rows)} of {len(cases)}: {line}", file=sys.stderr, flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row._asdict()) + "\n")
        order = {case[:5]: i for i, case in enumerate(cases)}
        rows.sort(key=lambda row: order[row[:5]])
    print(table(rows))
    if not any(row.lr is None and row.rounds is None for row in rows):
        return
    checks = verdict(rows)
    print(*(f"{'holds' if check.holds else 'FAILS'}: {check.text}" for check in checks), sep="\n")
    sys.exit(not all(check.holds for check in checks))


if __name__ == "__main__":
    main()
