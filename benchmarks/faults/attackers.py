"""Accuracy under sign-flip attacks, for each aggregator and several seeds.

    python benchmarks/faults/attackers.py --seeds 1 2 3 --docs docs

FedAvg on handwritten digits: 20 clients with a Dirichlet partition (alpha 0.5), all of them in each of 30 rounds. An
attacker trains like the others, multiplies its update by -10 and sends it as a valid message. The attackers are drawn
from the seed (`[attack]`). The server runs the real `Round.close`; all other settings are those of the task preset.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.page import write_part
from thinwire.core.key import Key
from thinwire.errors import Diverged
from thinwire.federation.attacks import SignFlip
from thinwire.federation.simulation import make_simulation
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve

CLIENTS, ROUNDS, FACTOR = 20, 30, 10.0
SHARES = (0.0, 0.1, 0.2, 0.3)
AGGREGATORS: dict[str, Mapping[str, object]] = {
    "weighted": {"kind": "weighted"},
    "bounded, norm 1": {"kind": "bounded", "norm": 1.0},
    "trimmed, share 0.3": {"kind": "trimmed", "share": 0.3},
    "median": {"kind": "median"},
    "geometric-median": {"kind": "geometric-median"},
    "centered-clipping": {"kind": "centered-clipping"},
    "multi-krum, faulty 0.3": {"kind": "multi-krum", "faulty": 0.3},
}


def attackers_of(seed: int, share: float) -> frozenset[int]:
    """The attacking clients."""
    return SignFlip(fraction=share).attackers(Key(seed), CLIENTS) if share else frozenset()


def accuracy(aggregator: Mapping[str, object], share: float, seed: int, rounds: int = ROUNDS) -> float:
    """The accuracy after the last round, or of the last finite model if training diverged."""
    options = {
        "task.clients": CLIENTS,
        "cohort.size": CLIENTS,
        "rounds": rounds,
        "seed": seed,
        "method.aggregator": aggregator,
        "engine.backend": "vmap",
        **({"attack": {"kind": "sign-flip", "fraction": share, "factor": FACTOR}} if share else {}),
    }
    experiment = resolve("fedavg", "digits", options, "paper")
    simulation = make_simulation(experiment.engine, build_job(experiment))
    state, found = simulation.start(), 0.0
    try:
        for _ in range(rounds):
            state, record = simulation.round(state)
            found = found if record.accuracy is None else record.accuracy
    except Diverged:
        pass
    return found


def table(found: Mapping[str, Mapping[float, Sequence[float]]]) -> str:
    """A Markdown table: mean accuracy over the seeds and the range, in percent."""
    lines = [
        "| aggregator | " + " | ".join(f"{share:.0%} attack" for share in SHARES) + " |",
        "|---|" + "---|" * len(SHARES),
    ]
    for name, row in found.items():
        cells = (
            f"{100 * statistics.mean(row[s]):.1f} ({100 * min(row[s]):.0f} to {100 * max(row[s]):.0f})" for s in SHARES
        )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, and with --docs write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", choices=list(AGGREGATORS), default=list(AGGREGATORS))
    parser.add_argument("--docs", type=Path, help="the documentation folder; its deployment.md gets the table")
    options = parser.parse_args()
    found: dict[str, dict[float, list[float]]] = {}
    for name in options.only:
        found[name] = {}
        for share in SHARES:
            found[name][share] = [accuracy(AGGREGATORS[name], share, seed, options.rounds) for seed in options.seeds]
            print(name, f"{share:.0%}", *(f"{one:.3f}" for one in found[name][share]), file=sys.stderr, flush=True)
    print(table(found))
    if options.docs:
        command = f"python benchmarks/faults/attackers.py --seeds {' '.join(map(str, options.seeds))} --docs docs"
        write_part(options.docs / "deployment.md", "attackers", table(found), command)


if __name__ == "__main__":
    main()
