"""Cost and fault tolerance of a deployment, measured between processes; needs `pip install 'thinwire[flower]'`.

    python benchmarks/faults/deployment.py rounds       a minimal round, with flower-supernode and with ours
    python benchmarks/faults/deployment.py same         comparison with the simulation, bit for bit, 4 nodes
    python benchmarks/faults/deployment.py bytes        bytes on the sockets and bytes of our messages (--data-dir)
    python benchmarks/faults/deployment.py many         16 nodes
    python benchmarks/faults/deployment.py simulated    1,000 clients in Flower's simulation (flwr[simulation])
    python benchmarks/faults/deployment.py faults       random faults (faults.py)
    python benchmarks/faults/deployment.py endurance    200 rounds with 8 nodes: time, memory, disk (endurance.py)
    python benchmarks/faults/deployment.py loading      data that take 8 s to load
    python benchmarks/faults/deployment.py page         measures nothing; writes the page from the stored measurements

With `--docs docs` the results are written to docs/deployment.json and, as tables, to docs/deployment.md. Times depend
on the load of the machine, which is recorded before and after each measurement.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.faults import endurance as long_runs
from benchmarks.page import write_part
from thinwire.federation.job import RoundRecord
from thinwire.federation.settings import Settings
from thinwire.flower.app_folder import write_app
from thinwire.flower.apps import deployable
from thinwire.flower.local import Processes, deploy, free_ports
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute

Found = dict[str, Any]
METHODS = ("fedavg", "mapo", "flasc", "fedlama", "pfedpara", "scaffold")


class Relay:
    """A TCP relay that counts the bytes in each direction."""

    def __init__(self) -> None:
        self.up = self.down = 0
        self.lock = threading.Lock()

    def __call__(self, port: int) -> int:
        """Open a port that forwards to the given one."""
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(listener, port), daemon=True).start()
        return int(listener.getsockname()[1])

    def _serve(self, listener: socket.socket, port: int) -> None:
        while True:
            node, _ = listener.accept()
            try:
                link = socket.create_connection(("127.0.0.1", port))
            except OSError:  # the SuperLink is not running
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


def small(method: str, on: str, nodes: int, rounds: int, **more: Any) -> Settings:
    """An experiment with one client per node, all of them in every round."""
    options = {"task.clients": nodes, "cohort.size": nodes, "rounds": rounds, **more}
    return deployable(resolve(method, on, options))


def deployed(experiment: Settings, nodes: int, data_dir: Path | None = None, awake: bool = True) -> Found:
    """Deploy an experiment; returns its records with the bytes on the sockets at the end of each round."""
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
            node=[] if awake else ["flower-supernode"],
        )
        total = time.monotonic() - began
    return {"records": [record for record, _, _ in seen], "passed": [counts for _, *counts in seen], "seconds": total}


# -- measurements ------------------------------------------------------------------------------------------------------

# what a new process does before it can respond to a message
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
import thinwire.flower.apps, thinwire.flower.grid_transport, thinwire.models
lap("import thinwire")
import torch._dynamo
lap("imports of torch.func on first use")
from thinwire.flower.client import Client
from thinwire.protocol.round import Request, Round
from thinwire.federation.engine import Engine
from thinwire.protocol.setup import initial_server_state
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve
job = build_job(resolve("mapo", "digits", {"task.clients": 2, "cohort.size": 2, "local.steps": 1}))
client = Client(Engine(), job)
lap("load the data, build the model")
round = Round.open(client.contract, initial_server_state(client.contract, client.first))
request = Request(round.downloads.messages({0: 0})[0])
response, store = client.respond(0, request)
lap("train one step and respond")
print(json.dumps(laps))
"""


def rounds(given: argparse.Namespace) -> Found:
    """A minimal round with both kinds of nodes, in turn."""
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
            steps = itertools.pairwise(found["passed"])  # the first round also waits for nodes to register
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
    """The section of the page."""
    lines = ["| in a new process, once per message | seconds |", "|---|---|"]
    lines += [f"| {name} | {lap:.2f} |" for name, lap in found["parts"].items()]
    lines += [
        "",
        "| nodes | seconds per round: median | min | max | up per round | down per round |",
        "|---|---|---|---|---|---|",
    ]
    for kind, name in (("flower", "`flower-supernode`"), ("awake", "`thinwire site start`")):
        times, passed = found["seconds"][kind], found["passed"][kind]
        up, down = (statistics.median(pair[i] for pair in passed) for i in (0, 1))
        cells = " | ".join(f"{f(times):.2f}" for f in (statistics.median, min, max))
        lines.append(f"| {name} | {cells} | {up:,.0f} B | {down:,.0f} B |")
    count = len(found["seconds"]["awake"])
    return "\n".join(lines) + (
        f"\n\nMAPO, two nodes, one local step, {count} rounds of each kind; *up* and *down* are bytes on the sockets. "
        f"Starting and stopping all processes took {found['around']['flower']:.0f} and "
        f"{found['around']['awake']:.0f} s. A simulated round of the same work takes {found['simulated']:.3f} s."
    )


def same(given: argparse.Namespace) -> Found:
    """Compare simulation and deployment bit for bit."""
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
    """The section of the page."""
    lines = [
        "| method | rounds | weights | bytes of every round | total bytes | accuracy |",
        "|---|---|---|---|---|---|",
    ]
    for method, row in found.items():
        word = {True: "identical", False: "DIFFERENT"}
        cells = (row["rounds"], word[row["weights"]], word[row["bytes"]], f"{row['sent']:,}", f"{row['accuracy']:.4f}")
        lines.append(f"| {method} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def bytes_(given: argparse.Namespace) -> Found:
    """CNN-2 on Fashion-MNIST: bytes of our messages and bytes on the sockets."""
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
    """The section of the page."""
    lines = [
        "| method | rounds | direction | messages | message bytes | bytes on the socket | overhead per message |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, row in found.items():
        for i, direction in enumerate(("up", "down")):
            ours, socket_ = row["ours"][i], row["socket"][i]
            overhead = (socket_ - ours) / row["messages"]
            span = f"2 to {row['rounds'] + 1}"
            lines.append(
                f"| {method} | {span} | {direction} | {row['messages']} | {ours:,} | {socket_:,} | {overhead:,.0f} B |"
            )
    one = next(iter(found.values()))
    first = one["first"]["socket"]
    return "\n".join(lines) + (
        f"\n\nCNN-2, {one['nodes']} nodes. Until the end of round 1 of {next(iter(found))}, in which nodes "
        f"register and fetch the app, {first[0]:,} bytes were sent up and {first[1]:,} down."
    )


def many(given: argparse.Namespace) -> Found:
    """Many nodes on a small machine."""
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
    """The section of the page."""
    middle = statistics.median(found["seconds"][1:])
    return (
        f"{found['nodes']} nodes, {found['rounds']} rounds of FedAvg on digits: {sum(found['clients'])} updates "
        f"requested and accepted, {found['lost']} lost; {middle:.1f} s per round (median), {found['all']:.0f} s in "
        f"total; final accuracy {found['accuracy']:.4f}."
    )


def simulated(given: argparse.Namespace) -> Found:
    """Run the app of `thinwire app` with `flwr run` in Flower's simulation."""
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
        "responses": [row["clients"] for row in rows],
        "lost": sum(row["absent"] + row["refused"] for row in rows),
        "seconds": [row["seconds"] for row in rows],
        "all": seconds,
    }


def simulated_table(found: Found) -> str:
    """The section of the page."""
    each = ", ".join(f"{seconds:.0f}" for seconds in found["seconds"])
    return (
        f"{found['clients']:,} clients, all of them in each of {found['rounds']} rounds of FedAvg on digits: "
        f"{sum(found['responses']):,} responses, {found['lost']} lost; {each} s per round (the first includes "
        f"registration), {found['all']:.0f} s including the start of Ray."
    )


def faults(given: argparse.Namespace) -> Found:
    """Run with random faults."""
    from benchmarks.faults.faults import faulty_run

    with tempfile.TemporaryDirectory(prefix="thinwire-faults-") as folder:
        return faulty_run(Path(folder), nodes=given.nodes or 8, rounds=given.rounds or 40, seed=given.seed)


def faults_table(found: Found) -> str:
    """The section of the page."""
    struck = "; ".join(f"{name.replace('_', ' ')} {count}" for name, count in found["message faults"].items())
    reasons = "; ".join(f"{count}x *{name}*" for name, count in found["reasons"].items())
    taken = "; ".join(f"{name.replace('_', ' ')} {count}" for name, count in found["accepted by kind"].items())
    rows = (
        ("nodes, rounds, seed", f"{found['nodes']}, {found['rounds']}, {found['seed']}"),
        ("message faults", struck),
        ("process faults", "; ".join(found["process faults"])),
        ("second servers refused", found["second servers refused"]),
        ("updates accepted", f"{found['accepted']}, by kind: {taken}"),
        ("responses refused", f"{found['refused']}: {reasons}"),
        ("absent clients, summed over rounds", found["absent"]),
        ("full states sent", found["drifted"]),
        ("accuracy", f"{found['accuracy']:.4f}; without faults {found['accuracy without faults']:.4f}"),
        ("minutes", f"{found['seconds'] / 60:.0f}"),
    )
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)


def endurance(given: argparse.Namespace) -> Found:
    """Many rounds."""
    nodes = given.nodes or 8
    experiment = small("fedavg", "digits", nodes, given.rounds or 200, **{"local.epochs": 1, "eval.every": 10})
    return long_runs.endurance(experiment, nodes)


def loading(given: argparse.Namespace) -> Found:
    """Data that take long to load."""
    nodes = given.nodes or 2
    return long_runs.loading(small("fedavg", "digits", nodes, given.rounds or 5, **{"local.epochs": 1}), nodes)


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], Found], Callable[[Found], str]]] = {
    "rounds": (rounds, rounds_table),
    "same": (same, same_table),
    "bytes": (bytes_, bytes_table),
    "many": (many, many_table),
    "simulated": (simulated, simulated_table),
    "faults": (faults, faults_table),
    "endurance": (endurance, long_runs.endurance_table),
    "loading": (loading, long_runs.loading_table),
}


def text_of(what: str, entry: Found) -> str:
    """The text of the page about one measurement."""
    load = f"load {entry['load'][0]:.1f} before and {entry['load'][1]:.1f} after"
    facts = f"*{entry['machine']}; flwr {entry['flwr']}; {load}.*"
    lines = f"{COMMANDS[what][1](entry['found'])}\n\n{facts}".splitlines()
    return "\n".join(line if line.startswith("|") else textwrap.fill(line, 120) for line in lines)


def command_of(what: str) -> str:
    """The command that repeats a measurement."""
    return f"python benchmarks/faults/deployment.py {what} --docs docs"


def machine() -> str:
    """The number of cores and the processor."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.is_file() else None
    return f"{os.cpu_count()} cores, {model[1] if model else platform.machine()}"


def main() -> None:
    """Run one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*COMMANDS, "page"])
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of `rounds`")
    parser.add_argument("--seed", type=int, default=256, help="seed of `faults`")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("THINWIRE_DATA"))
    parser.add_argument("--docs", type=Path, help="the documentation folder to write to")
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
