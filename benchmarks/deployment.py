"""What a deployment costs and what it bears, measured between real processes; needs `pip install 'thinwire[flower]'`.

    python benchmarks/deployment.py rounds       an empty round, by Flower's own nodes and by nodes that stay awake
    python benchmarks/deployment.py same         the same bits as the simulation, 4 nodes
    python benchmarks/deployment.py bytes        bytes on the sockets beside the bytes that we count (--data-dir)
    python benchmarks/deployment.py many         16 nodes
    python benchmarks/deployment.py simulated    1,000 clients in Flower's own simulation (flwr[simulation])
    python benchmarks/deployment.py faults       everything goes wrong (benchmarks/faults.py)
    python benchmarks/deployment.py page         nothing: writes the page again from what was measured

With `--docs docs` the outcome goes into docs/deployment.json and, as a table, into docs/deployment.md. Seconds depend
on what else the machine does: its load, before and after, stands beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import write_part
from thinwire.deployment.app_folder import write_app
from thinwire.deployment.apps import deployable
from thinwire.deployment.local import Processes, deploy, free_ports
from thinwire.experiments.config import Experiment, resolve
from thinwire.experiments.execute import execute
from thinwire.runtime.job import RoundRecord

Found = dict[str, Any]
METHODS = ("fedavg", "mapo", "flasc", "fedlama", "pfedpara", "scaffold")


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


def small(method: str, on: str, nodes: int, rounds: int, **more: Any) -> Experiment:
    """One client a node, all of them in every round."""
    options = {"task.clients": nodes, "cohort.size": nodes, "rounds": rounds, **more}
    return deployable(resolve(method, on, options))


def deployed(experiment: Experiment, nodes: int, data_dir: Path | None = None, awake: bool = True) -> Found:
    """Run it, and give its records with what had passed the sockets at each."""
    relay = Relay()
    seen: list[tuple[RoundRecord, int, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        deploy(
            experiment,
            Path(folder) / "run",
            nodes=nodes,
            data_dir=data_dir,
            on_round=lambda record: seen.append((record, relay.up, relay.down)),
            relay=relay,
            awake=awake,
        )
        total = time.monotonic() - began
    return {"records": [record for record, _, _ in seen], "passed": [counts for _, *counts in seen], "seconds": total}


# -- measurements ------------------------------------------------------------------------------------------------------

# what a process does before it can answer a message, in a process of its own
_PARTS = """
import json, sys, time
laps, last = {}, time.perf_counter()
def lap(name):
    global last
    laps[name] = time.perf_counter() - last
    last = time.perf_counter()
import flwr.supernode.runtime.run_clientapp
lap("import Flower")
import torch
lap("import torch")
import thinwire.deployment.apps, thinwire.flower.grid_transport, thinwire.models
lap("import thinwire")
import torch._dynamo
lap("what torch.func imports when first used")
from thinwire.flower.client import Client
from thinwire.flower.client_store import Ask
from thinwire.simulation.engine import LocalEngine
from thinwire.protocol.server import open_round
from thinwire.protocol.round import begin
from thinwire.experiments.build import build_job
from thinwire.experiments.config import resolve
job = build_job(resolve("mapo", "digits", {"task.clients": 2, "cohort.size": 2, "local.steps": 1}))
client = Client(LocalEngine(), job)
lap("read the data, make the model")
ask = Ask(open_round(client.contract, begin(client.contract, client.first), {0: 0})[0])
answer, kept = client.answer(0, ask)
kept.dump(client.first)
lap("train a step and answer")
print(json.dumps(laps))
"""


def rounds(given: argparse.Namespace) -> Found:
    """An empty round, by both kinds of nodes, in turn."""
    experiment = small("mapo", "digits", 2, given.rounds or 8, **{"local.steps": 1})
    parts: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {"flower": [], "awake": []}
    passed: dict[str, list[list[int]]] = {"flower": [], "awake": []}
    started: dict[str, list[float]] = {"flower": [], "awake": []}
    for _ in range(given.repeat):
        done = subprocess.run([sys.executable, "-c", _PARTS], capture_output=True, text=True, check=True)
        for name, lap in json.loads(done.stdout).items():
            parts.setdefault(name, []).append(lap)
        for kind in seconds:
            found = deployed(experiment, 2, awake=kind == "awake")
            steps = itertools.pairwise(found["passed"])  # the first round also waits for nodes, and says hello
            passed[kind] += [[b - a for a, b in zip(before, after, strict=True)] for before, after in steps]
            seconds[kind] += [record.seconds for record in found["records"][1:]]
            started[kind].append(found["seconds"] - sum(seconds[kind][1 - experiment.rounds :]))
    simulated: list[RoundRecord] = []
    with tempfile.TemporaryDirectory() as folder:
        execute(experiment, Path(folder) / "run", on_round=simulated.append)
    return {
        "parts": {name: statistics.median(laps) for name, laps in parts.items()},
        "seconds": seconds,
        "passed": passed,
        "around": {kind: statistics.median(times) for kind, times in started.items()},
        "simulated": statistics.median(record.seconds for record in simulated[1:]),
    }


def rounds_table(found: Found) -> str:
    """As a part of the page."""
    lines = ["| in a new process, once for each message | seconds |", "|---|---|"]
    lines += [f"| {name} | {lap:.2f} |" for name, lap in found["parts"].items()]
    lines += [
        "",
        "| nodes | seconds a round: median | least | most | up a round | down a round |",
        "|---|---|---|---|---|---|",
    ]
    for kind, name in (("flower", "`flower-supernode`"), ("awake", "`thinwire node`")):
        times, passed = found["seconds"][kind], found["passed"][kind]
        up, down = (statistics.median(pair[i] for pair in passed) for i in (0, 1))
        numbers = " | ".join(f"{f(times):.2f}" for f in (statistics.median, min, max))
        lines.append(f"| {name} | {numbers} | {up:,.0f} B | {down:,.0f} B |")
    count = len(found["seconds"]["awake"])
    return "\n".join(lines) + (
        f"\n\nMAPO, two nodes, one local step, {count} rounds of each kind; *up* and *down* are bytes on the sockets. "
        f"To start everything, and to take it down again, took {found['around']['flower']:.0f} and "
        f"{found['around']['awake']:.0f} s. A simulated round of the same work takes {found['simulated']:.3f} s."
    )


def same(given: argparse.Namespace) -> Found:
    """Simulation and deployment, compared bit for bit."""
    found: Found = {}
    for method in given.methods or METHODS:
        experiment = small(method, "digits", 4, given.rounds or 5, **{"local.epochs": 1})
        with tempfile.TemporaryDirectory() as folder:
            runs = [Path(folder) / name for name in ("deployed", "simulated")]
            began = time.monotonic()
            deploy(experiment, runs[0], nodes=4)
            seconds = time.monotonic() - began
            execute(experiment, runs[1])
            models = [(run / "model.safetensors").read_bytes() for run in runs]
            logs = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
        counts = [[(row["bytes_up"], row["bytes_down"], row["bytes_catchup"]) for row in log] for log in logs]
        found[method] = {
            "rounds": experiment.rounds,
            "weights": models[0] == models[1],
            "bytes": counts[0] == counts[1],
            "sent": sum(sum(row) for row in counts[0]),
            "accuracy": logs[0][-1]["accuracy"],
            "seconds": seconds,
        }
        print(method, found[method], flush=True)
    return found


def same_table(found: Found) -> str:
    """As a part of the page."""
    lines = [
        "| method | rounds | weights | bytes of every round | bytes in all | accuracy |",
        "|---|---|---|---|---|---|",
    ]
    for method, row in found.items():
        word = {True: "the same", False: "DIFFERENT"}
        cells = (row["rounds"], word[row["weights"]], word[row["bytes"]], f"{row['sent']:,}", f"{row['accuracy']:.4f}")
        lines.append(f"| {method} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def bytes_(given: argparse.Namespace) -> Found:
    """CNN-2 on Fashion-MNIST: our count, and what passed."""
    found: Found = {}
    nodes = 5
    for method in given.methods or ("mapo", "fedavg"):
        experiment = small(method, "fashion-mnist", nodes, given.rounds or 20, **{"local.steps": 1, "eval.every": 20})
        run = deployed(experiment, nodes, given.data_dir)
        records, passed = run["records"], run["passed"]
        later = records[1:]
        found[method] = {
            "nodes": nodes,
            "rounds": len(later),
            "messages": sum(record.clients for record in later),
            "ours": [
                sum(record.bytes_up for record in later),
                sum(record.bytes_down + record.bytes_catchup for record in later),
            ],
            "socket": [after - before for before, after in zip(passed[0], passed[-1], strict=True)],
            "first": {
                "ours": [records[0].bytes_up, records[0].bytes_down + records[0].bytes_catchup],
                "socket": passed[0],
            },
            "seconds": [record.seconds for record in later],
        }
        print(method, found[method], flush=True)
    return found


def bytes_table(found: Found) -> str:
    """As a part of the page."""
    lines = [
        "| method | rounds | way | messages | bytes of ours | on the socket | overhead a message |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, row in found.items():
        for i, way in enumerate(("up", "down")):
            ours, socket_ = row["ours"][i], row["socket"][i]
            over = (socket_ - ours) / row["messages"]
            span = f"2 to {row['rounds'] + 1}"
            lines.append(f"| {method} | {span} | {way} | {row['messages']} | {ours:,} | {socket_:,} | {over:,.0f} B |")
    one = next(iter(found.values()))
    first = one["first"]["socket"]
    return "\n".join(lines) + (
        f"\n\nCNN-2, {one['nodes']} nodes. Until the end of round 1 of {next(iter(found))}, in which nodes say who "
        f"they are and fetch the app, {first[0]:,} bytes went up and {first[1]:,} down."
    )


def many(given: argparse.Namespace) -> Found:
    """As many nodes as the issue of a small machine allows."""
    nodes = given.nodes or 16
    run = deployed(small("fedavg", "digits", nodes, given.rounds or 10, **{"local.epochs": 1}), nodes)
    rows = run["records"]
    return {
        "nodes": nodes,
        "rounds": len(rows),
        "clients": [row.clients for row in rows],
        "lost": sum(row.absent + row.refused for row in rows),
        "accuracy": rows[-1].accuracy,
        "seconds": [row.seconds for row in rows],
        "all": run["seconds"],
    }


def many_table(found: Found) -> str:
    """As a part of the page."""
    middle = statistics.median(found["seconds"][1:])
    return (
        f"{found['nodes']} nodes, {found['rounds']} rounds of FedAvg on digits: {sum(found['clients'])} updates asked "
        f"for and taken, {found['lost']} lost; {middle:.1f} s a round (median), {found['all']:.0f} s with starting and "
        f"ending; final accuracy {found['accuracy']:.4f}."
    )


def simulated(given: argparse.Namespace) -> Found:
    """The app that `thinwire app` writes, under `flwr run` in Flower's simulation."""
    clients, rounds_ = given.nodes or 1000, given.rounds or 3
    experiment = resolve(
        "fedavg",
        "digits",
        {
            "task.clients": clients,
            "task.partition.kind": "iid",
            "cohort.size": clients,
            "local.steps": 1,
            "rounds": rounds_,
        },
    )
    home = Path(tempfile.mkdtemp(prefix="thinwire-deploy-"))
    (port,) = free_ports(1)
    run = home / "run"
    began = time.monotonic()
    with Processes(home, given.data_dir) as processes:
        write_app(experiment, home / "app")
        (home / "config.toml").write_text(
            f'[superlink.sim]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
            f"options.num-supernodes = {clients}\noptions.backend.client-resources.num-cpus = 1\n"
        )
        command = ["flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
        link = processes.start("superlink", [*command, "--disable-runtime-dependency-installation"])
        processes.wait_for_port(link, port)
        words = f'run-dir="{run}"'
        server = processes.start("server", ["flwr", "run", str(home / "app"), "sim", "--stream", "-c", words])
        while server.poll() is None and not (run / "summary.json").is_file():
            time.sleep(0.5)
        if not (run / "summary.json").is_file():
            raise SystemExit("\n".join(processes.log("server")[-30:] + processes.log("superlink")[-30:]))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        seconds = time.monotonic() - began
    return {
        "clients": clients,
        "rounds": len(rows),
        "answers": [row["clients"] for row in rows],
        "lost": sum(row["absent"] + row["refused"] for row in rows),
        "seconds": [row["seconds"] for row in rows],
        "all": seconds,
    }


def simulated_table(found: Found) -> str:
    """As a part of the page."""
    each = ", ".join(f"{seconds:.0f}" for seconds in found["seconds"])
    return (
        f"{found['clients']:,} clients, all of them in each of {found['rounds']} rounds of FedAvg on digits: "
        f"{sum(found['answers']):,} answers, {found['lost']} lost; {each} s a round (the first with everybody's "
        f"hello), {found['all']:.0f} s with starting Ray."
    )


def faults(given: argparse.Namespace) -> Found:
    """Everything goes wrong."""
    from benchmarks.faults import faulty_run

    with tempfile.TemporaryDirectory(prefix="thinwire-faults-") as folder:
        return faulty_run(Path(folder), nodes=given.nodes or 8, rounds=given.rounds or 40, seed=given.seed)


def faults_table(found: Found) -> str:
    """As a part of the page."""
    struck = "; ".join(f"{name.replace('_', ' ')} {count}" for name, count in found["struck"].items())
    reasons = "; ".join(f"{count}x *{name}*" for name, count in found["reasons"].items())
    taken = "; ".join(f"{name.replace('_', ' ')} {count}" for name, count in found["accepted as"].items())
    rows = (
        ("nodes, rounds, seed", f"{found['nodes']}, {found['rounds']}, {found['seed']}"),
        ("on nodes and between", struck),
        ("besides", "; ".join(found["havoc"])),
        ("servers that were turned away", found["turned away"]),
        ("updates taken", f"{found['accepted']}, by what their nodes know of them: {taken}"),
        ("answers refused", f"{found['refused']}: {reasons}"),
        ("clients missed, summed over rounds", found["absent"]),
        ("whole states sent", found["drifted"]),
        ("accuracy", f"{found['accuracy']:.4f}; without faults {found['quiet accuracy']:.4f}"),
        ("minutes", f"{found['seconds'] / 60:.0f}"),
    )
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], Found], Callable[[Found], str]]] = {
    "rounds": (rounds, rounds_table),
    "same": (same, same_table),
    "bytes": (bytes_, bytes_table),
    "many": (many, many_table),
    "simulated": (simulated, simulated_table),
    "faults": (faults, faults_table),
}


def text_of(what: str, entry: Found) -> str:
    """What the page says about one measurement."""
    load = f"load {entry['load'][0]:.1f} before and {entry['load'][1]:.1f} after"
    facts = f"*{entry['machine']}; flwr {entry['flwr']}; {load}.*"
    lines = f"{COMMANDS[what][1](entry['found'])}\n\n{facts}".splitlines()
    return "\n".join(line if line.startswith("|") else textwrap.fill(line, 120) for line in lines)


def command_of(what: str) -> str:
    """How it is measured again."""
    return f"python benchmarks/deployment.py {what} --docs docs"


def machine() -> str:
    """In a few words."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.is_file() else None
    return f"{os.cpu_count()} cores, {model[1] if model else platform.machine()}"


def main() -> None:
    """Measure one thing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*COMMANDS, "page"])
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--repeat", type=int, default=3, help="of `rounds`")
    parser.add_argument("--seed", type=int, default=256, help="of `faults`")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("THINWIRE_DATA"))
    parser.add_argument("--docs", type=Path, help="write into the pages of this folder")
    given = parser.parse_args()
    file = given.docs / "deployment.json" if given.docs else None
    if given.what != "page":
        before = os.getloadavg()[0]
        found = COMMANDS[given.what][0](given)
        load = (round(before, 2), round(os.getloadavg()[0], 2))
        entry = {"machine": machine(), "flwr": metadata.version("flwr"), "load": load, "found": found}
        print(text_of(given.what, entry))
        if file:
            known = json.loads(file.read_text()) if file.is_file() else {}
            file.write_text(json.dumps({**known, given.what: entry}, indent=1) + "\n")
    for what, entry in json.loads(file.read_text()).items() if file else ():
        write_part(given.docs / "deployment.md", what, text_of(what, entry), command_of(what))


if __name__ == "__main__":
    main()
