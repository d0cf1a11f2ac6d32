"""FLASC-S against a full grid: rank and density of FLASC on 20 Newsgroups, every pair run once.

    python benchmarks/flasc_s.py --device cuda --jobs 8 --rounds 40
    python benchmarks/flasc_s.py --device cuda --rounds 40 --table-only

Runs the whole grid, then the search of `thinwire tune` on the same run directories, and writes docs/results/flasc-s.md
and .json: the best settings of the grid and of the search, and the bytes of each.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from thinwire.cli.terminal import human_bytes
from thinwire.experiments.config import Experiment, resolve
from thinwire.experiments.grid import markdown, metrics, summary
from thinwire.experiments.run_grids import run_one
from thinwire.reports.finals import widened
from thinwire.search.candidates import changes, knobs_of, points
from thinwire.search.halving import Measured, flasc_s

RANKS, DENSITIES = (1, 4, 16, 64), (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
ALPHAS = (0.01, 1.0)


def experiment(alpha: float, options: argparse.Namespace, more: dict[str, Any] | None = None) -> Experiment:
    """FLASC on 20 Newsgroups with all settings that are not searched, and further ones."""
    settings: dict[str, Any] = {
        "task.clients": 350,
        "task.partition": {"kind": "dirichlet-flasc", "alpha": alpha},
        "task.length": 64,
        "cohort.size": 10,
        "local.epochs": 1,
        "local.batch": 16,
        "rounds": options.rounds,
        "eval.every": options.rounds,
        "checkpoint.every": options.rounds,
        "engine.device": options.device,
        "engine.precision": "bf16" if options.device == "cuda" else "float32",
        "method.download": "full",
        "method.client_weight": "uniform",
        "method.client_opt": {"kind": "sgd", "lr": 0.01, "momentum": 0.9},
        "method.server_opt": {"kind": "adam", "lr": 0.01},
        "seed": options.seed,
    }
    return resolve("flasc", on="text-classification", overrides={**settings, **(more or {})}, recipe="paper")


def pairs(alpha: float, options: argparse.Namespace) -> dict[tuple[float, float], Experiment]:
    """The experiment of each pair of the grid."""
    base = experiment(alpha, options)
    knobs = knobs_of(base, {"rank": RANKS, "density": DENSITIES})
    return {pair: experiment(alpha, options, changes(base, knobs, pair)) for pair in points(knobs)}


def part(alpha: float, options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The section of one partition, and the values of its runs."""
    grid = pairs(alpha, options)
    done = {pair: s for pair, e in grid.items() if (s := summary(e, options.out))}
    if len(done) < len(RANKS) * len(DENSITIES):
        return f"## alpha {alpha:g}\n\n{len(done)} of {len(RANKS) * len(DENSITIES)} runs finished.\n", {}

    def measure(pair: tuple[float, float], rounds: int) -> Measured:
        return Measured(done[pair]["final_accuracy"], None, done[pair]["bytes_total_honest"], rounds)

    found = flasc_s(measure, RANKS, DENSITIES, options.rounds)
    chosen = done[found.value]
    best = max(done, key=lambda pair: done[pair]["final_accuracy"])
    whole = sum(s["bytes_total_honest"] for s in done.values())
    tried = set(found.tried)
    names = {pair: e.digest()[:6] for pair, e in grid.items()}
    rows, runs = [], []
    for r, d in done:
        runs.append([done[r, d]])
        what = "chosen" if (r, d) == found.value else "tried" if (r, d) in tried else ""
        cells = [f"rank {r}, density {d:g}", f"{100 * done[r, d]['final_accuracy']:.2f}"]
        rows.append([*cells, human_bytes(done[r, d]["bytes_total_honest"]), what, names[r, d]])
    head, rows = widened(["method", "final accuracy %", "total", "search", "runs"], rows, runs)
    text = f"## alpha {alpha:g}\n\n" + markdown(head, rows)
    gap = 100 * (done[best]["final_accuracy"] - chosen["final_accuracy"])
    text += (
        f"\nThe best of the grid is rank {best[0]} with density {best[1]:g}, "
        f"{100 * done[best]['final_accuracy']:.2f} %. The search chose rank {found.value[0]} with density {found.value[1]:g}, "
        f"{100 * chosen['final_accuracy']:.2f} %: {gap:.2f} points lower. It tried {len(found.tried)} of "
        f"{len(done)} pairs and sent {human_bytes(found.bytes)}; the grid sent {human_bytes(whole)}: "
        f"{100 * found.bytes / whole:.1f} %.\n"
    )
    values = {
        names[pair]: {
            "method": f"rank {pair[0]}, density {pair[1]:g}",
            "alpha": alpha,
            "rank": pair[0],
            "density": pair[1],
            "seed": e.seed,
            "rounds": e.rounds,
            "best_accuracy": done[pair]["best_accuracy"],
            "final_accuracy": done[pair]["final_accuracy"],
            "accuracy": [[m["round"], m["accuracy"]] for m in metrics(e, options.out) if m["accuracy"] is not None],
            "bytes_total": done[pair]["bytes_total_honest"],
            "tried": pair in tried,
            **{key: done[pair].get(key) for key in ("task", "status", "status_round", "chance_accuracy")},
        }
        for pair, e in grid.items()
    }
    return text, values


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/flasc-s"))
    parser.add_argument("--docs", type=Path, default=Path("docs/results"))
    parser.add_argument("--table-only", action="store_true", help="do not run, only write the table")
    options = parser.parse_args()
    todo = [e for alpha in ALPHAS for e in pairs(alpha, options).values()]
    todo = [e for e in todo if not summary(e, options.out)]
    if todo and not options.table_only:
        todo.sort(key=lambda e: -e.method.space.rank)  # type: ignore[attr-defined] # the slowest first
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            for n, (e, failure) in enumerate(
                zip(todo, pool.map(run_one, todo, [options.out] * len(todo)), strict=True)
            ):
                print(f"{n + 1} of {len(todo)}: {e.digest()[:6]} {failure or 'done'}", flush=True)
    parts = [part(alpha, options) for alpha in ALPHAS]
    head = (
        "# FLASC-S against a grid\n\nRank and density of FLASC (both directions) on 20 Newsgroups with MiniLM, "
        "350 clients by the paper's Dirichlet partition, 10 per round, one epoch of batch 16, "
        f"{options.rounds} rounds, texts truncated at 64 tokens; alpha / rank and all learning rates as for rank 16; "
        f"seed {options.seed}; device {options.device}. The search is that of `thinwire tune`. Both select by accuracy "
        "on the test set.\n\n"
    )
    command = f"python benchmarks/flasc_s.py --device {options.device} --rounds {options.rounds}"
    text = head + "\n".join(text for text, _ in parts) + f"\nWritten by `{command}`.\n"
    options.docs.mkdir(parents=True, exist_ok=True)
    (options.docs / "flasc-s.md").write_text(text)
    body = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for _, values in parts for k, v in sorted(values.items()))
    (options.docs / "flasc-s.json").write_text("{\n" + body + "\n}\n")
    print(text)


if __name__ == "__main__":
    main()
