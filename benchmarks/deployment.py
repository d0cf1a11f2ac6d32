"""What a round costs between real processes: seconds, and bytes on the sockets beside the bytes that we count.

    python benchmarks/deployment.py --methods mapo fedavg --nodes 2 --rounds 5

Nodes reach the SuperLink through a relay that counts what passes, TLS and all: our messages in Flower's records, its
own calls, and the asking for work that goes on all the time. Training is one step, so that the rest is seen.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import socket
import statistics
import tempfile
import threading
from pathlib import Path

from thinwire.run.config import resolve
from thinwire.run.deploy import deploy


class Relay:
    """A port that passes everything on to another, and counts."""

    def __init__(self) -> None:
        self.up = self.down = 0
        self.lock = threading.Lock()

    def __call__(self, port: int) -> int:
        """A new port that leads to this one."""
        door = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(door, port), daemon=True).start()
        return int(door.getsockname()[1])

    def _serve(self, door: socket.socket, port: int) -> None:
        while True:
            node, _ = door.accept()
            try:
                link = socket.create_connection(("127.0.0.1", port))
            except OSError:  # the SuperLink is gone, or not there yet
                node.close()
                continue
            threading.Thread(target=self._pass, args=(node, link, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(link, node, False), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self.lock:
                    if up:
                        self.up += len(data)
                    else:
                        self.down += len(data)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Measure, and print one line a method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["mapo", "fedavg"])
    parser.add_argument("--on", default="digits")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print("| method | seconds a round | messages up | socket up | messages down | socket down |")
    print("|---|---|---|---|---|---|")
    for method in given.methods:
        options = {"task.clients": given.nodes, "cohort.size": given.nodes, "local.steps": 1, "rounds": given.rounds}
        relay, seen = Relay(), []
        with tempfile.TemporaryDirectory() as folder:
            deploy(
                resolve(method, given.on, options),
                Path(folder) / "run",
                nodes=given.nodes,
                on_round=lambda record: seen.append((record, relay.up, relay.down)),  # noqa: B023
                relay=relay,
            )
        # from one record to the next; the first also waits for the nodes and says hello
        steps = list(itertools.pairwise(seen))
        seconds = [after[0].seconds for _, after in steps]
        row = (
            [after[0].bytes_up for _, after in steps],
            [after[1] - before[1] for before, after in steps],
            [after[0].bytes_down + after[0].bytes_catchup for _, after in steps],
            [after[2] - before[2] for before, after in steps],
        )
        cells = " | ".join(f"{statistics.median(numbers):,.0f}" for numbers in row)
        print(f"| {method} | {min(seconds):.1f} to {max(seconds):.1f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
