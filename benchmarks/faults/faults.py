"""A deployment with random, seeded faults between real processes.

On nodes: processes killed before, during or after training, late responses, corrupted and forged ones (`corrupt.py`).
On the network: duplicate responses, and responses of earlier rounds. Processes: nodes that are killed and restarted
some rounds later, a server that is killed three times, and a second server that is started by mistake.

Afterwards the accepted messages are checked: replayed from the first round on, they must give the final model bit for
bit; each must be in the log of the node that sent it, as valid or as an undetectable forgery; none may be corrupted.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.faults.corrupt import CORRUPTIONS, FORGERIES
from thinwire.core.key import Key
from thinwire.federation.engine import Engine
from thinwire.federation.federation import Federation
from thinwire.federation.job import RoundRecord
from thinwire.federation.settings import Settings
from thinwire.flower.apps import MakeJob, deployable, job_of
from thinwire.flower.client import Client
from thinwire.flower.grid_transport import GridTransport, Task, pack, unpack
from thinwire.flower.local import DeploymentFailed, deploy
from thinwire.flower.policy import Deadline
from thinwire.protocol.round import (
    Reply,
    Request,
    Response,
    Round,
)
from thinwire.protocol.setup import initial_server_state
from thinwire.protocol.state import ClientState
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute
from thinwire.secure.masks import sum_masked
from thinwire.wire import message as wire

KILLED = ("killed before training", "killed during training", "killed after training")
FAULTS = (*KILLED, "late", *CORRUPTIONS, *FORGERIES)
SHARE = 0.18  # of all requests to a client
KILLS, RETURNS = 3, 3


def script(seed: int, client: int, version: int) -> str:
    """The fault of a client in the round from a version, or ''; a function of the seed."""
    key = Key(seed).fold("fault", client, version)
    if float(key.fold("whether").uniform(1)) >= SHARE:
        return ""
    return FAULTS[int(key.fold("what").integers(1, len(FAULTS)))]


def digest(data: bytes) -> str:
    """A short hash of a message."""
    return hashlib.sha256(data).hexdigest()[:24]


# -- on a node ---------------------------------------------------------------------------------------------------------


def inject_faults(job: MakeJob, seed: int, logs: Path, seconds: float) -> Callable[..., Any]:
    """A Flower mod that injects faults into a node's app.

    Args:
        job: the job of a node.
        seed: the seed of the faults.
        logs: the folder that records the injected faults and the sent messages.
        seconds: the timeout of the server.

    A client has at most one fault per version: a repeated request is answered correctly.
    """

    def mod(message: Any, context: Any, proceed: Callable[..., Any]) -> Any:
        if message.metadata.message_type != "train":
            return proceed(message, context)
        from flwr.app import Message

        _, number, _, _, data = unpack(Task, message.content)
        client = Client(Engine(), job(dict(context.node_config)))
        version = wire.unpack(data, client.contract.schema).version
        fault = script(seed, number, version)
        if fault and not _first(logs / "faults" / f"{version}-{number}", fault):
            fault = ""
        if fault == "killed before training":
            _kill_self()
        if fault == "killed during training":
            threading.Timer(0.01, _kill_self).start()
        reply = proceed(message, context)
        if fault in KILLED:
            _kill_self()
        if fault == "late":
            time.sleep(seconds + 2)
        response = unpack(Response, reply.content)
        if fault in (CORRUPTIONS | FORGERIES) and response.data and response.data[3] == wire.UP:
            response = (CORRUPTIONS | FORGERIES)[fault](client, number, response)
        _first(logs / "sent" / f"{version}-{number}-{digest(response.data)}-{fault or 'valid'}", "")
        return Message(pack(response), reply_to=message)

    return mod


def _first(file: Path, text: str) -> bool:
    """Write a file unless it exists; returns whether it was written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x") as handle:
            handle.write(text)
    except FileExistsError:
        return False
    return True


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- on the server -----------------------------------------------------------------------------------------------------


class MessageLog:
    """Logs every accepted message; messages of a round that a killed server did not save are removed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.round = folder, 0

    def __call__(self, number: int, direction: str, client: int, message: bytes) -> None:
        """The `on_message` of `server_app`."""
        if number != self.round:
            self.round = number
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in self.folder.iterdir():
                if int(file.name.split("-")[0]) >= number:
                    file.unlink()
        if direction == "up":
            (self.folder / f"{number}-{client}").write_bytes(message)

    def read(self) -> dict[int, dict[int, bytes]]:
        """The messages by round and client."""
        found: dict[int, dict[int, bytes]] = {}
        for file in self.folder.iterdir():
            number, client = map(int, file.name.split("-"))
            found.setdefault(number, {})[client] = file.read_bytes()
        return found


class DuplicatingNetwork(GridTransport):
    """A network that duplicates responses and repeats responses of earlier rounds."""

    seed, logs, newest = 0, Path(), 0

    def send(self, requests: Mapping[int, Request], seconds: float) -> None:
        """Send requests, which name the round."""
        self.newest = max(0, *(request.accepted for request in requests.values()))
        super().send(requests, seconds)

    def receive(self, clients: Set[int], deadline: Deadline) -> Iterator[tuple[int, Response]]:
        """The responses of the network, with duplicates."""
        key = Key(self.seed).fold("echo", self.newest)
        before, self.before = getattr(self, "before", []), []
        if before and float(key.fold("old").uniform(1)) < SHARE:
            _first(self.logs / "faults" / f"old-{time.time_ns()}", "response of an earlier round")
            yield before[0]
        for client, response in super().receive(clients, deadline):
            self.before.append((client, response))
            yield client, response
            if float(key.fold("twice", client).uniform(1)) < SHARE / 4:
                _first(self.logs / "faults" / f"twice-{time.time_ns()}", "duplicate response")
                yield client, response


def write_faulty_app(folder: Path, *, seed: int, logs: Path, seconds: float) -> None:
    """Write the fault-injecting apps into an app folder."""
    (folder / "federated/client_app.py").write_text(
        "from pathlib import Path\n"
        "from benchmarks.faults.faults import inject_faults\n"
        "from federated.jobs import job\n"
        "from thinwire.flower.apps import client_app\n"
        f"app = client_app(job, [inject_faults(job, {seed}, Path({str(logs)!r}), {seconds})])\n"
    )
    (folder / "federated/server_app.py").write_text(
        "from pathlib import Path\n"
        "from benchmarks.faults import faults\n"
        "from federated.jobs import EXPERIMENT, job\n"
        "from thinwire.flower import grid_transport\n"
        "from thinwire.flower.apps import server_app\n"
        f"faults.DuplicatingNetwork.seed, faults.DuplicatingNetwork.logs = {seed}, Path({str(logs)!r})\n"
        "grid_transport.GridTransport = faults.DuplicatingNetwork\n"
        f"app = server_app(EXPERIMENT, job, faults.MessageLog(Path({str(logs / 'accepted')!r})))\n"
    )


# -- the run -----------------------------------------------------------------------------------------------------------


class ProcessFaults:
    """Kills and restarts the server and nodes at seeded rounds, and starts a second server."""

    def __init__(self, seed: int, rounds: int, nodes: int, run: Path) -> None:
        key, self.run = Key(seed).fold("havoc"), run
        # in the middle of the run, apart from each other
        third = (rounds - 4) // KILLS
        self.kills = {2 + i * third + int(key.fold("kill", i).integers(1, third)) for i in range(KILLS)}
        free = [n for n in range(2, rounds - 5) if not self.kills & set(range(n, n + 5))]
        picked = [free[int(key.fold("node", i).integers(1, len(free)))] for i in range(RETURNS)]
        self.leaves = {n: int(key.fold("which", n).integers(1, nodes)) for n in picked}
        self.stays = {n: 2 + int(key.fold("stays", n).integers(1, 3)) for n in picked}
        self.second = free[len(free) // 2]
        self.done: list[str] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.environments: list[dict[str, str]] = []
        self.away: dict[int, int] = {}  # node -> round of its restart
        self.second_servers: list[subprocess.Popen[bytes]] = []

    def started(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Called when a deployment has started."""
        self.processes, self.away = list(processes), {}
        self.environments = [_environment(process.pid) for process in processes]

    def after(self, record: RoundRecord) -> None:
        """Called after every round; a resumed deployment reports all rounds again."""
        number = record.round
        for node, back in list(self.away.items()):
            if number >= back:
                del self.away[node]
                self.done.append(f"node {node} restarted after round {number}")
                old = self.processes[1 + node]
                self.processes[1 + node] = subprocess.Popen(
                    old.args,
                    env=self.environments[1 + node],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        if number in self.leaves and self._once(f"node {self.leaves[number]} killed after round {number}"):
            node = self.leaves[number]
            os.killpg(self.processes[1 + node].pid, signal.SIGKILL)
            self.processes[1 + node].wait()
            self.away[node] = number + self.stays[number]
        if number == self.second and self._once(f"second server started after round {number}"):
            home = Path(self.environments[0]["FLWR_HOME"])
            words = f'run-dir="{self.run}"'
            command = [str(Path(sys.executable).with_name("flwr")), "run", str(home / "app"), "thinwire", "--stream"]
            self.second_servers.append(
                subprocess.Popen([*command, "-c", words], env=self.environments[0], cwd=home, stdout=subprocess.DEVNULL)
            )
        if number in self.kills and self._once(f"server killed after round {number}"):
            os.killpg(self.processes[0].pid, signal.SIGKILL)

    def _once(self, what: str) -> bool:
        if what in self.done:
            return False
        self.done.append(what)
        return True


def _environment(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def experiment_of(nodes: int, rounds: int) -> Settings:
    """FedAvg with a robust aggregator.

    The norms of honest updates are 0.3 to 2.1, half of them below 0.6; of four responses one is trimmed at either end.
    """
    options = {"task.clients": nodes, "cohort.size": nodes, "local.epochs": 1, "rounds": rounds}
    mean = {"kind": "bounded", "norm": 1.0, "weight": 500.0, "inner": {"kind": "trimmed", "share": 0.25}}
    return deployable(resolve("fedavg", "digits", {**options, "method.aggregator": mean}))


def faulty_run(
    folder: Path, *, nodes: int = 8, rounds: int = 40, seed: int = 1, seconds: float = 10.0
) -> dict[str, Any]:
    """Run the deployment and check the accepted messages.

    Args:
        folder: an empty folder.
        nodes: the number of nodes, with one client each.
        rounds: the number of rounds.
        seed: the seed of all faults.
        seconds: the timeout of the server.
    """
    experiment = experiment_of(nodes, rounds)
    quiet = execute(experiment, folder / "quiet")  # a deployment without faults ends with the same bits
    run, logs = folder / "run", folder / "logs"
    process_faults, began, starts = ProcessFaults(seed, rounds, nodes, run), time.monotonic(), 0
    while True:
        starts += 1
        try:
            summary = deploy(
                experiment,
                run,
                nodes=nodes,
                settings={"seconds": seconds, "quorum": 0.5, "tries": 5},
                resume=starts > 1,
                on_round=process_faults.after,
                on_start=process_faults.started,
                edit_app=partial(write_faulty_app, seed=seed, logs=logs, seconds=seconds),
            )
            break
        except DeploymentFailed as error:
            print(f"start {starts} ended: {error}", file=sys.stderr)
            if starts > KILLS + 5:
                raise
    return {
        "nodes": nodes,
        "rounds": rounds,
        "seed": seed,
        "seconds": time.monotonic() - began,
        "starts": starts,
        "process faults": process_faults.done,
        "accuracy without faults": quiet["final_accuracy"],
        "accuracy": summary["final_accuracy"],
        **check(experiment, run, logs),
    }


def check(experiment: Settings, run: Path, logs: Path) -> dict[str, Any]:
    """Accepted and refused messages; raises AssertionError if the logs are inconsistent."""
    messages = MessageLog(logs / "accepted").read()
    rows = [RoundRecord(**row) for row in _rows(run / "metrics.jsonl")]
    assert [row.round for row in rows] == sorted(messages) == list(range(1, experiment.rounds + 1))
    assert [row.clients for row in rows] == [len(messages[row.round]) for row in rows]
    replayed(experiment, messages, run)
    sent: dict[tuple[int, int, str], set[str]] = {}
    for file in (logs / "sent").iterdir():
        version, client, name, fault = file.name.split("-")
        sent.setdefault((int(version), int(client), name), set()).add(fault)
    accepted = [
        (number - 1, client, digest(data)) for number, uploads in messages.items() for client, data in uploads.items()
    ]
    assert len(set(accepted)) == len({name for _, _, name in accepted}) == len(accepted)
    kinds = Counter(_accepted_kind(sent[one]) for one in accepted)
    log = (run / "server.log").read_text().splitlines()
    injected = Counter(file.read_text() for file in (logs / "faults").iterdir())
    return {
        "message faults": dict(sorted(injected.items())),
        "accepted": len(accepted),
        "accepted by kind": dict(sorted(kinds.items())),
        "refused": sum("refused client" in line for line in log),
        "reasons": dict(Counter(_reason(line) for line in log if "refused client" in line).most_common()),
        "absent": sum(row.absent for row in rows),
        "second servers refused": sum("another process is writing" in line for line in log),
        "drifted": sum(row.drifted for row in rows),
    }


def replayed(experiment: Settings, messages: Mapping[int, Mapping[int, bytes]], run: Path) -> None:
    """Apply the accepted messages from round 1 on; raises AssertionError if that does not give the final model.

    Args:
        experiment: the experiment.
        messages: by round and client.
        run: the run directory.
    """
    federation = Federation(experiment.engine, job_of(experiment, None))
    contract = federation.contract
    server = initial_server_state(contract, federation.first)
    for number in sorted(messages):  # each accepted message was applied, exactly once
        opened, sent = Round.open(contract, server), messages[number]
        state = ClientState(opened.version)
        uploads = {i: opened.read(Reply(i, opened.version, sent[i], 0.0, 1, state)) for i in sorted(sent)}
        server = opened.close(uploads, experiment.task.clients, sum_masked=sum_masked).server
    final = load((run / "model.safetensors").read_bytes())
    weights = {**federation.weights(server.public), **server.public.buffers}
    assert all(torch.equal(final[name], block) for name, block in weights.items())


def _accepted_kind(sent: set[str]) -> str:
    """The kind under which an accepted message was sent: a refused response may be repeated without a fault."""
    allowed = [kind for kind in ("valid", "late", *FORGERIES) if kind in sent]
    assert allowed, f"accepted a message that was only sent as {sent}"
    return allowed[0]


def _reason(line: str) -> str:
    """The first words of the reason for a refusal, without numerals."""
    reason = line.split("refused client", 1)[1].split(": ", 1)[1]
    return " ".join(word for word in reason.split()[:9] if not any(letter.isdigit() for letter in word))


def _rows(file: Path) -> list[dict[str, Any]]:
    import json

    return [json.loads(line) for line in file.read_text().splitlines()]
