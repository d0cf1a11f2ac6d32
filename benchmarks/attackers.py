"""Accuracy under sign-flip attacks, for each aggregator and several seeds.

    python benchmarks/attackers.py --seeds 1 2 3 --docs docs

FedAvg on handwritten digits: 20 clients with a Dirichlet partition (alpha 0.5), all of them in each of 30 rounds. An
attacker trains like the others, multiplies its update by -10 and sends it as a valid message. The attackers are drawn
from the seed. The server runs the real `close_round`; all other settings are those of the task preset.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import write_part
from thinwire.core.key import Key
from thinwire.deployment.jobs import job_of
from thinwire.errors import Diverged
from thinwire.experiments.config import Experiment, resolve
from thinwire.protocol.client import Updates
from thinwire.simulation.engine import LocalEngine
from thinwire.simulation.simulation import GroupResult, GroupTask, Simulation
from thinwire.training.inputs import Workload
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes

CLIENTS, ROUNDS, FACTOR = 20, 30, -10.0
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


class Attacked(Simulation):
    """A simulation in which some clients multiply their update by a factor.

    Args:
        experiment: the experiment.
        attackers: the attacking clients.
        factor: the factor of their update.
    """

    def __init__(self, experiment: Experiment, attackers: frozenset[int], factor: float = FACTOR) -> None:
        super().__init__(LocalEngine(backend="vmap"), job_of(experiment, None))
        self.attackers, self.factor = attackers, factor

    def _uploads(self, task: GroupTask, work: Workload, updates: Updates) -> GroupResult:
        """The uploads of a group, with those of attackers replaced."""
        result = super()._uploads(task, work, updates)
        messages = [
            self._attack(client, data) if client in self.attackers else data
            for client, data in zip(task.group.clients, result.messages, strict=True)
        ]
        return result._replace(messages=messages)

    def _attack(self, client: int, data: Bytes) -> bytes:
        """The message with scaled coordinates and a valid checksum."""
        schema = self.contract.schema.sent_by(client)
        message = wire.unpack(data, schema)
        body = wire.unpack_body(message.bodies[0], schema)
        values = torch.frombuffer(bytearray(body.fields[wire.COORDS]), dtype=torch.float32) * self.factor
        body = wire.Body(body.plan, {**body.fields, wire.COORDS: values.numpy().tobytes()})
        return wire.pack(wire.UP, message.version, [wire.pack_body(body, schema)], schema)


def attackers_of(seed: int, share: float) -> frozenset[int]:
    """The attacking clients."""
    return frozenset(map(int, Key(seed).fold("attackers").choice(CLIENTS, round(share * CLIENTS))))


def accuracy(aggregator: Mapping[str, object], share: float, seed: int, rounds: int = ROUNDS) -> float:
    """The accuracy after the last round, or of the last finite model if training diverged."""
    options = {
        "task.clients": CLIENTS,
        "cohort.size": CLIENTS,
        "rounds": rounds,
        "seed": seed,
        "method.aggregator": aggregator,
    }
    simulation = Attacked(resolve("fedavg", "digits", options, "paper"), attackers_of(seed, share))
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
        command = f"python benchmarks/attackers.py --seeds {' '.join(map(str, options.seeds))} --docs docs"
        write_part(options.docs / "deployment.md", "attackers", table(found), command)


if __name__ == "__main__":
    main()
