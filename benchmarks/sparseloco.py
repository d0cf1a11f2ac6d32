"""Bits that SparseLoCo takes for a value, in messages of real training, for its page.

    THINWIRE_DATA=data python benchmarks/sparseloco.py --docs docs

Clients train as in `thinwire run sparseloco --on TASK`, two in a round for four steps of 16 examples; the messages are
those of the last of a few rounds, when error feedback has earlier errors. Bits count whole messages, with headers,
scales and checksums. The paper's coding has a fixed length: log2(4,096) = 12 bits for a position and 2 for a value.
Without `--docs` the table is only printed.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import write_part
from thinwire.core.selection import kept
from thinwire.experiments.build import build_job
from thinwire.experiments.config import resolve

COMMAND = "python benchmarks/sparseloco.py --docs docs"
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


def main() -> None:
    """Print the table, or with --docs write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="the documentation folder")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    given = parser.parse_args()
    table = "\n".join([HEAD, *(line(task, TASKS[task]) for task in given.tasks)])
    print(table)
    if given.docs:
        write_part(given.docs / "methods" / "sparseloco.md", "bits", table, COMMAND)


if __name__ == "__main__":
    main()
