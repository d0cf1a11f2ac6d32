"""Measure what returning clients download: every missed broadcast, or one sum of them.

    python benchmarks/bytes/catchup.py fashion-mnist --rounds 60 --json docs/results/catchup.jsonl
    python benchmarks/bytes/catchup.py --table docs/results/catchup.jsonl --docs docs

Every row is one run with ten of a hundred clients a round, in which the downloads of each round are encoded twice: with
sums (`merge_codec = "lattice-sum"`), as they are sent, and without. The first row is top-k with int4 as it is without a
lattice; the last column compares the others with it. Bytes are lengths of messages.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.page import write_part
from thinwire.federation.engine import Engine
from thinwire.federation.simulation import make_simulation
from thinwire.protocol.round import Round
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve

EF, INT4 = {"kind": "error-feedback"}, {"kind": "quantize", "bits": 4}
TOPK = {"kind": "topk", "density": 0.05}
COMMAND = "python benchmarks/bytes/catchup.py --table docs/results/catchup.jsonl --docs docs"


def _chain(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "chain", "parts": list(parts)}


ROWS: dict[str, tuple[str, dict[str, Any]]] = {  # method, settings
    "top-k 5 %, int4": ("ef+topk+int4", {"method.down": _chain(EF, TOPK, INT4)}),
    "lattice-topk": ("lattice-topk", {}),
    "lattice-topk, 1 %": (
        "lattice-topk",
        {f"method.{way}.inner.density": 0.01 for way in ("up", "down")},
    ),
}


def measure(task: str, row: str, rounds: int, steps: int, seed: int) -> dict[str, Any]:
    """Bytes of a run with and without sums, and its accuracy."""
    method, settings = ROWS[row]
    quick = {"rounds": rounds, "eval.every": rounds, "seed": seed, **settings}
    quick |= {"local.steps": steps} if steps else {}
    simulation = make_simulation(Engine(), build_job(resolve(method, task, quick)))
    state, out = simulation.start(), {"row": row, "up": 0, "down": 0, "catchup": 0, "without": 0}
    for _ in range(rounds):
        cohort = simulation.clients.cohort(Round.open(simulation.contract, state.server), state)
        versions = {i: state.clients[i].version if i in state.clients else 0 for i in cohort}
        ledger = replace(state.server.ledger, adds_since=state.server.ledger.version)  # as if no step could be added
        plain = Round.open(simulation.contract, state.server._replace(ledger=ledger))
        _, without = plain.downloads.split(plain.downloads.messages(versions))
        state, record = simulation.round(state)
        out["up"] += record.bytes_up
        out["down"] += record.bytes_down
        out["catchup"] += record.bytes_catchup
        out["without"] += without
    return {**out, "accuracy": record.accuracy, "rounded": state.server.ledger.adds_since > 0}


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each row; the last column compares it with the first row of the same number of local steps."""
    heads = ("row", "local steps", "accuracy %", "up", "down", "catch-up by entries", "catch-up by sums")
    lines = [(*heads, "sums, % of entries", "% of the first row's entries"), ("---",) * (len(heads) + 2)]
    for one in rows:
        accuracy = "-" if one["accuracy"] is None else f"{100 * one['accuracy']:.2f}"
        sizes = [f"{one[key]:,}" for key in ("up", "down", "without", "catchup")]
        first = [
            other["without"] for other in rows if (other["row"], other["steps"]) == (next(iter(ROWS)), one["steps"])
        ]
        shares = [f"{100 * one['catchup'] / max(1, one['without']):.1f}"]
        shares += [f"{100 * one['catchup'] / max(1, size):.1f}" for size in first[:1]] or ["-"]
        lines.append((one["row"], str(one["steps"] or "all"), accuracy, *sizes, *shares))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def saved(file: Path) -> list[dict[str, Any]]:
    """The rows of a file that `--json` wrote."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    """Measure and print, or write the table of saved rows to the page on codecs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="fashion-mnist")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=0, help="local steps of a client in a round; 0 for all epochs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--json", type=Path, help="append the values of each row to this file")
    parser.add_argument("--table", type=Path, help="measure nothing: print the rows of this file")
    parser.add_argument("--docs", type=Path, help="write the table into methods/codecs.md of this folder")
    args = parser.parse_args()
    rows = [] if args.table is None else saved(args.table)
    for row in () if args.table else args.rows:
        about = {"task": args.task, "rounds": args.rounds, "steps": args.steps, "seed": args.seed}
        rows.append({**about, **measure(args.task, row, args.rounds, args.steps, args.seed)})
        print(rows[-1], flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))
    if args.docs:
        write_part(args.docs / "methods/codecs.md", "catchup", table(rows), COMMAND)


if __name__ == "__main__":
    main()
