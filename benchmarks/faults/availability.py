"""A deployment of ten sites between real processes: most are offline, one is slow.

    python benchmarks/faults/availability.py --rounds 40

Five sites are offline from the start, two more from a later round on. One takes 25 seconds longer than the others. The
cohort has four sites, the quorum is two, the grace time three seconds. It prints how long rounds stay open after their
quorum, and whether a replay of the recorded cohorts gives the same weights.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.flower.replay import replay
from thinwire.federation.job import RoundRecord
from thinwire.flower.apps import deployable
from thinwire.flower.grid_transport import GridTransport
from thinwire.flower.local import deploy
from thinwire.flower.policy import Deadline, RoundPolicy
from thinwire.protocol.round import Response
from thinwire.runs.config import resolve
from thinwire.runs.deployment_records import CohortLog
from thinwire.runs.files import append

SITES, COHORT = 10, 4
OFFLINE = frozenset(range(5, 10))  # from the start
LEAVING = frozenset({3, 4})  # later
SLOW = 0
POLICY = {"seconds": 120.0, "quorum": 0.5, "grace": 3.0, "wait": 30.0}


class TimedNetwork(GridTransport):
    """Flower as a transport that logs when responses arrive, and when a round ends."""

    times = Path()

    def receive(self, clients: Set[int], deadline: Deadline) -> Iterator[tuple[int, Response]]:
        """The responses, with a line for each call."""
        began, arrived = time.monotonic(), dict[int, float]()
        try:
            for client, response in super().receive(clients, deadline):
                if client in clients:
                    arrived[client] = time.monotonic() - began
                yield client, response
        finally:
            line = {"asked": [*clients], "arrived": arrived, "seconds": time.monotonic() - began}
            append(self.times, (json.dumps(line) + "\n").encode())


def slow_site(seconds: float) -> Callable[..., Any]:
    """A Flower mod: one site takes longer to train."""

    def mod(message: Any, context: Any, proceed: Callable[..., Any]) -> Any:
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == SLOW:
            time.sleep(seconds)
        return proceed(message, context)

    return mod


def write_apps(folder: Path, times: Path, seconds: float) -> None:
    """Write the apps of the slow site and of the server that logs times into an app folder."""
    (folder / "federated/client_app.py").write_text(
        "from benchmarks.faults.availability import slow_site\n"
        "from federated.jobs import job\n"
        "from thinwire.flower.apps import client_app\n"
        f"app = client_app(job, [slow_site({seconds})])\n"
    )
    (folder / "federated/server_app.py").write_text(
        "from pathlib import Path\n"
        "from benchmarks.faults import availability\n"
        "from federated.jobs import EXPERIMENT, job\n"
        "from thinwire.flower import grid_transport\n"
        "from thinwire.flower.apps import server_app\n"
        f"availability.TimedNetwork.times = Path({str(times)!r})\n"
        "grid_transport.GridTransport = availability.TimedNetwork\n"
        "app = server_app(EXPERIMENT, job)\n"
    )


def availability(folder: Path, rounds: int = 40, leave: int = 4, seconds: float = 25.0) -> dict[str, Any]:
    """Run the deployment, and measure its rounds.

    Args:
        folder: an empty folder.
        rounds: the number of rounds.
        leave: the round after which two more sites are killed.
        seconds: how much longer the slow site takes.
    """
    options = {"task.clients": SITES, "cohort.size": COHORT, "local.epochs": 1, "rounds": rounds}
    experiment, times = deployable(resolve("fedavg", "digits", options)), folder / "times.jsonl"
    nodes: list[subprocess.Popen[bytes]] = []

    def start(processes: Any) -> None:
        nodes.extend(processes[1:])
        kill(OFFLINE)

    def kill(sites: frozenset[int]) -> None:
        for i in sites:
            os.killpg(nodes[i].pid, signal.SIGKILL)

    def after(record: RoundRecord) -> None:
        if record.round == leave:
            kill(LEAVING)

    summary = deploy(
        experiment,
        folder / "run",
        nodes=SITES,
        settings=POLICY,
        on_start=start,
        on_round=after,
        edit_app=lambda app: write_apps(app, times, seconds),
    )
    exchanges = [json.loads(line) for line in times.read_text().splitlines()]
    needed = RoundPolicy.of(POLICY).needed(COHORT)
    quorums = [sorted(one["arrived"].values())[needed - 1] for one in exchanges if len(one["arrived"]) >= needed]
    enough = [one["seconds"] for one in exchanges if len(one["arrived"]) >= needed]
    recorded = CohortLog(folder / "run").rounds
    return {
        "rounds": summary["rounds"],
        "exchanges": len(exchanges),
        "seconds after the quorum": [end - quorum for quorum, end in zip(quorums, enough, strict=True)],
        "seconds of a round": statistics.median(one["seconds"] for one in exchanges),
        "asked": [one.cohort for one in recorded.values()],
        "accepted": [one.accepted for one in recorded.values()],
        "late": [one.late for one in recorded.values()],
        "replay is identical": replay(folder / "run"),
        "accuracy": summary["final_accuracy"],
    }


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--leave", type=int, default=4, help="two more sites are killed after this round")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = availability(Path(folder), given.rounds, given.leave)
    waits = found["seconds after the quorum"]
    print(f"{found['rounds']} rounds, {found['exchanges']} times asked; {found['seconds of a round']:.1f} s (median)")
    print(f"closed after the quorum: {statistics.median(waits):.2f} s (median), {max(waits):.2f} s at most")
    print(f"late: {sum(map(len, found['late']))}; replay identical: {found['replay is identical']}")


if __name__ == "__main__":
    main()
