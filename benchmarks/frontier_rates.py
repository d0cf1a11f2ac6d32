"""Learning rates over orders of magnitude for rows of the frontier, in short runs: where a search should be centered.

    python benchmarks/frontier_rates.py fashion-mnist --rows decomfl --factors 1 4 --json docs/frontier/rates.jsonl
    python benchmarks/frontier_rates.py --table docs/frontier/rates.jsonl --docs docs

As in the search of `thinwire frontier`: seed 100, a whole schedule, judged by the accuracy of the clients on the tenth
of their examples that they hold out. The test set is not used.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import write_part
from thinwire.errors import Diverged
from thinwire.experiments.build import build_job
from thinwire.experiments.frontier import Where, Work, frontier_grid, rows_of
from thinwire.experiments.grid import markdown
from thinwire.experiments.resolve import resolve
from thinwire.experiments.tune_rate import SEARCH_SEED, VALIDATION_FRACTION
from thinwire.simulation.engine import LocalEngine

COMMAND = "python benchmarks/frontier_rates.py --table docs/frontier/rates.jsonl --docs docs"


def measure(task: str, row: dict[str, Any], factor: float, rounds: int, steps: int) -> dict[str, Any]:
    """The accuracy of clients on held-out examples after a short run with the rate of the row times a factor."""
    quick = {
        "rounds": rounds,
        "eval.every": rounds,
        "seed": SEARCH_SEED,
        "task.validation_fraction": VALIDATION_FRACTION,
        **({"local.steps": steps} if steps else {}),
        **row["set"],
    }
    key, centers = next(iter(row["over"].items()))
    rate = float(f"{factor * centers[0]:.6g}")
    simulation = LocalEngine().prepare(build_job(resolve(row["method"], task, {**quick, key: rate})))
    state, accuracy = simulation.start(), None
    try:
        for _ in range(rounds):
            state, record = simulation.round(state)
        accuracy = record.client_accuracy
    except Diverged:
        pass
    return {"task": task, "row": row["label"], "key": key, "rate": rate, "rounds": rounds, "accuracy": accuracy}


def table(found: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: for each task and row the rates that were tried, with their accuracies in percent."""
    groups: dict[tuple[str, str, str, int], dict[float, float | None]] = {}
    for one in found:
        key = (one["task"], one["row"], one["key"].removeprefix("method."), one["rounds"])
        groups.setdefault(key, {})[one["rate"]] = one["accuracy"]
    rows = [
        [task, row, name, str(rounds), "; ".join(f"{rate:g}: {_percent(tried[rate])}" for rate in sorted(tried))]
        for (task, row, name, rounds), tried in groups.items()
    ]
    return markdown(["task", "row", "rate", "rounds", "rate: accuracy on held-out examples, %"], rows)


def _percent(accuracy: float | None) -> str:
    return "diverged" if accuracy is None else f"{100 * accuracy:.1f}"


def main() -> None:
    """Measure and print, or write the table of saved runs to the page on the frontier."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="fashion-mnist")
    parser.add_argument("--rows", nargs="*", default=[])
    parser.add_argument("--factors", type=float, nargs="+", default=[0.25, 1.0, 4.0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="local steps; 0 for those of the task")
    parser.add_argument("--json", type=Path, help="append the values of each run to this file")
    parser.add_argument("--table", type=Path, help="measure nothing: print the runs of this file")
    parser.add_argument("--docs", type=Path, help="write the table into frontier.md of this folder")
    args = parser.parse_args()
    if args.table:
        text = table([json.loads(line) for line in args.table.read_text().splitlines()])
        print(text)
        if args.docs:
            write_part(args.docs / "frontier.md", "rates", text, COMMAND)
        return
    grid = frontier_grid(rows_of(args.rows), Where(args.task), Work(rates=1))
    for row in grid.content["rows"]:
        for factor in args.factors:
            one = measure(args.task, row, factor, args.rounds, args.steps)
            print(json.dumps(one), flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(one) + "\n")


if __name__ == "__main__":
    main()
