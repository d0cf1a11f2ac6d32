"""What secure aggregation costs beside the plain round: bytes of a client, and seconds of all parties.

    python benchmarks/bytes/secure.py --docs docs

Server and clients are in one process and exchange the messages of a deployment in memory. Each client trains one step
in each round, so that seconds are those of messages, keys and masks rather than of training; they are processor
seconds of all parties together, the median of the rounds after the first. Drop-outs send no upload: their masks are
recovered from shares. Bytes up are those of all clients, divided by the number of uploads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.page import write_part
from tests.flower.in_memory import FlowerServer, InMemory
from thinwire.flower.apps import job_of
from thinwire.flower.client import Client
from thinwire.flower.policy import RoundPolicy
from thinwire.protocol.round import Request
from thinwire.runs.config import resolve

ROUNDS = 5
CASES = (
    ("fedavg", "digits", 8, 0),
    ("fedavg", "digits", 8, 2),
    ("fedavg", "digits", 32, 0),
    ("fedavg", "digits", 32, 8),
    ("mapo", "digits", 8, 0),
    ("mapo", "digits", 8, 2),
    ("ddg", "digits", 8, 2),
    ("fedavg", "fashion-mnist", 8, 0),
    ("fedavg", "fashion-mnist", 8, 2),
)


class Cost(NamedTuple):
    """The cost of one round: bytes of a client, processor seconds of all."""

    up: float
    down: float
    seconds: float


class Dropping(InMemory):
    """A transport in memory in which the last clients receive no request for an upload."""

    def __init__(self, client: Client, dropped: int) -> None:
        super().__init__(client)
        self.dropped = range(len(client.job.task.clients) - dropped, len(client.job.task.clients))

    def send(self, requests: Mapping[int, Request], seconds: float) -> None:
        """Send all requests but those."""
        left = {i: request for i, request in requests.items() if request.phase or i not in self.dropped}
        super().send(left, seconds)


def cost(method: str, task: str, clients: int, dropped: int, secure: bool, rounds: int = ROUNDS) -> Cost:
    """The cost of a round, over all rounds after the first."""
    options = {"task.clients": clients, "cohort.size": clients, "rounds": rounds, "eval.every": rounds}
    options |= {"local.steps": 1, "method.secure_aggregation": secure, "engine.backend": "loop", "engine.chunk": 1}
    experiment = resolve(method, task, options)
    job = job_of(experiment, None)
    transport = Dropping(Client(experiment.engine, job), dropped)
    server = FlowerServer(experiment.engine, job, transport, RoundPolicy(seconds=0.1, tries=1))
    state, records, spent = server.start(), [], []
    for _ in range(rounds):
        began = time.process_time()
        state, record = server.round(state)
        spent.append(time.process_time() - began)
        records.append(record)
    counted = records[1:-1]
    left = clients - dropped
    up = statistics.median(record.bytes_up for record in counted) / left
    down = statistics.median(record.bytes_down + record.bytes_catchup for record in counted) / clients
    return Cost(up, down, statistics.median(spent[1:-1]))


def table(found: Mapping[tuple[str, str, int, int], tuple[Cost, Cost]]) -> str:
    """A Markdown table: plain and secure."""
    lines = [
        "| method | task | clients | drop-outs | bytes up, plain | secure | bytes down, plain | secure | "
        "seconds, plain | secure |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (method, task, clients, dropped), (plain, secure) in found.items():
        lines.append(
            f"| `{method}` | {task} | {clients} | {dropped} | {plain.up:,.0f} | {secure.up:,.0f} | {plain.down:,.0f} | "
            f"{secure.down:,.0f} | {plain.seconds:.2f} | {secure.seconds:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, and with --docs write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="the documentation folder; its secure-aggregation.md gets the table")
    options = parser.parse_args()
    found = {}
    for case in CASES:
        found[case] = cost(*case, secure=False), cost(*case, secure=True)
        print(*case, *found[case], file=sys.stderr, flush=True)
    print(table(found))
    if options.docs:
        command = "python benchmarks/bytes/secure.py --docs docs"
        write_part(options.docs / "secure-aggregation.md", "secure", table(found), command)


if __name__ == "__main__":
    main()
