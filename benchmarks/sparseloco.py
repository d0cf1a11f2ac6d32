"""Bits that SparseLoCo takes for a value, in messages of real training, for its page.

    THINWIRE_DATA=data python benchmarks/sparseloco.py --docs docs

Clients train as in `thinwire run sparseloco --on TASK`, two in a round for four steps of 16 examples; the messages are
those of the last of a few rounds, when error feedback has earlier errors. Bits count whole messages, with headers,
scales and checksums. The paper's coding has a fixed length: log2(4,096) = 12 bits for a position and 2 for a value.
Without `--docs` the table is only printed.

    python benchmarks/sparseloco.py --search --docs docs      settings on digits, by examples that clients hold out
    python benchmarks/sparseloco.py --against --docs docs     its settings against FedAvg, on other seeds
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import write_part
from thinwire.core.selection import kept
from thinwire.core.units import human_bytes
from thinwire.experiments.build import build_job
from thinwire.experiments.config import resolve
from thinwire.search.compare import sweep

COMMAND = "python benchmarks/sparseloco.py --docs docs"
SEARCHED = {"lr": [0.003, 0.01, 0.02], "server_lr": [1, 2, 4, 8], "decay": [0.95]}
SEARCH_SEED, SEEDS = 100, 3  # results count from seed 0
HEAD = (
    "| task | weights | values in a message | bytes of a message | bits a value | paper's coding, bits a value | "
    "of a message of float32 |\n|---|---|---|---|---|---|---|"
)
TASKS = {"digits": 3, "fashion-mnist": 2, "shakespeare": 2}  # task -> rounds


def line(task: str, rounds: int) -> str:
    """The row of a task."""
    few = {"engine.backend": "loop", "cohort.size": 2, "local.batch": 16, "local.steps": 4}
    few |= {"rounds": rounds + 1, "eval.every": rounds + 1}  # so that nothing is evaluated
    experiment = resolve("sparseloco", task, few)
    simulation = experiment.engine.prepare(build_job(experiment))
    size, codec = simulation.contract.code.size, experiment.method.up.inner  # type: ignore[attr-defined]
    sizes = [min(codec.chunk, size - start) for start in range(0, size, codec.chunk)]
    values = sum(kept(codec.density, one, codec.rounding) for one in sizes)
    state = simulation.start()
    for _ in range(rounds):
        state, record = simulation.round(state)
    length = record.bytes_up / record.clients
    fixed = math.log2(codec.chunk) + 2
    return (
        f"| {task} | {size:,} | {values:,} | {length:,.0f} | {8 * length / values:.2f} | {fixed:.0f} | "
        f"1/{4 * size / length:,.0f} |"
    )


def search(out: Path) -> str:
    """The table of the search: the best by held-out examples first."""
    found = sweep("sparseloco", SEARCHED, "digits", seeds=1, seed=SEARCH_SEED, validation_fraction=0.1, out=out)
    lines = ["| `lr` | `server_lr` | `beta` | held-out accuracy, % | test accuracy, % |", "|---|---|---|---|---|"]
    for row in found.rows:
        assert row.validation
        assert row.final
        values = " | ".join(f"{value:g}" for value in row.values.values())
        lines.append(f"| {values} | {100 * row.validation.mean:.2f} | {100 * row.final.mean:.2f} |")
    return "\n".join(lines)


def against(out: Path) -> str:
    """The table of results on digits, over seeds that the search did not use."""
    now = resolve("sparseloco", "digits").method
    own = (now.client_opt.lr, now.server_opt.lr)  # type: ignore[attr-defined]
    rate = resolve("fedavg", "digits").method.client_opt.lr
    cases: list[tuple[str, str, dict[str, list]]] = [
        ("FedAvg", "fedavg", {"lr": [rate]}),
        ("SparseLoCo, `lr` 0.001, `server_lr` 1", "sparseloco", {"lr": [0.001], "server_lr": [1]}),
        (f"SparseLoCo, `lr` {own[0]:g}, `server_lr` {own[1]:g}", "sparseloco", {"lr": [own[0]], "server_lr": [own[1]]}),
    ]
    lines = [f"| | test accuracy, %, {SEEDS} seeds | bytes |", "|---|---|---|"]
    for label, method, over in cases:
        row = sweep(method, over, "digits", seeds=SEEDS, out=out).rows[0]
        assert row.final
        lines.append(f"| {label} | {100 * row.final.mean:.2f} ± {100 * row.final.std:.2f} | {human_bytes(row.bytes)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, or with --docs write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="the documentation folder")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--search", action="store_true", help="search settings on digits")
    parser.add_argument("--against", action="store_true", help="compare with FedAvg on digits")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="the folder of runs")
    given = parser.parse_args()
    if given.search or given.against:
        table = search(given.out) if given.search else against(given.out)
        print(table)
        if given.docs:
            part = "search" if given.search else "against"
            write_part(given.docs / "methods" / "sparseloco.md", part, table, COMMAND.replace(".py", f".py --{part}"))
        return
    table = "\n".join([HEAD, *(line(task, TASKS[task]) for task in given.tasks)])
    print(table)
    if given.docs:
        write_part(given.docs / "methods" / "sparseloco.md", "bits", table, COMMAND)


if __name__ == "__main__":
    main()
