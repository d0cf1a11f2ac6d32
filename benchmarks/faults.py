"""A deployment in which everything goes wrong, at random with a seed, between real processes.

On nodes: processes that die before, during or after training, late answers, spoilt ones (`spoilt.py`), lies. Between:
answers that come twice, and answers of earlier rounds. Besides: nodes that are killed and come back some rounds later,
a server that is killed three times, and a second server that is started by mistake.

What counted is checked afterwards: the messages that the server took, replayed from the first round on, must give the
final model bit for bit; each of them must be in the books of the node that sent it, as sound or as a lie that nobody
can see; no spoilt one may be among them.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.spoilt import LIES, SPOILT
from thinwire.core.key import Key
from thinwire.deployment.apps import MakeJob, deployable, job_of
from thinwire.deployment.local import DeploymentFailed, deploy
from thinwire.experiments.config import Experiment, resolve
from thinwire.experiments.execute import execute
from thinwire.flower.client import Client
from thinwire.flower.client_store import Answer, Ask
from thinwire.flower.grid_transport import GridTransport, pack, unpack
from thinwire.flower.transport import Heard
from thinwire.protocol.round import begin, close_round, plan_round
from thinwire.runtime.job import RoundRecord
from thinwire.simulation.engine import LocalEngine
from thinwire.simulation.simulation import Simulation
from thinwire.wire import message as wire

DEATHS = ("dies before training", "dies during training", "dies after training")
FAULTS = (*DEATHS, "late", *SPOILT, *LIES)
SHARE = 0.18  # of all askings of a client
KILLS, RETURNS = 3, 3


def script(seed: int, client: int, version: int) -> str:
    """What goes wrong with a client in the round from a version: a function of the seed."""
    key = Key(seed).fold("fault", client, version)
    if float(key.fold("whether").uniform(1)) >= SHARE:
        return ""
    return FAULTS[int(key.fold("what").integers(1, len(FAULTS)))]


def digest(data: bytes) -> str:
    """A short name for a message."""
    return hashlib.sha256(data).hexdigest()[:24]


# -- on a node ---------------------------------------------------------------------------------------------------------


def saboteur(job: MakeJob, seed: int, books: Path, seconds: float) -> Callable[..., Any]:
    """A mod of Flower's around a node's app.

    Args:
        job: the job of a node.
        seed: of the script.
        books: a folder: which faults struck, and which messages were sent.
        seconds: how long the server waits.

    A fault strikes a client once a version: asked again, it does as it should.
    """

    def mod(message: Any, context: Any, proceed: Callable[..., Any]) -> Any:
        if message.metadata.message_type != "train":
            return proceed(message, context)
        from flwr.app import Message

        (_, number, _), data = unpack(message.content, run=str, client=int, heard=int)
        client = Client(LocalEngine(), job(dict(context.node_config)))
        version = wire.unpack(data, client.contract.schema).version
        fault = script(seed, number, version)
        if fault and not _first(books / "struck" / f"{version}-{number}", fault):
            fault = ""
        if fault == "dies before training":
            _die()
        if fault == "dies during training":
            threading.Timer(0.01, _die).start()
        reply = proceed(message, context)
        if fault in DEATHS:
            _die()
        if fault == "late":
            time.sleep(seconds + 2)
        (who, loss, examples, error), said = unpack(reply.content, client=int, loss=float, examples=int, error=str)
        answer = Answer(said, loss, examples, error)
        if fault in (SPOILT | LIES) and answer.data and said[3] == wire.UP:
            answer = (SPOILT | LIES)[fault](client, number, answer)
        _first(books / "sent" / f"{version}-{number}-{digest(answer.data)}-{fault or 'sound'}", "")
        fields = {"client": who, "loss": answer.loss, "examples": answer.examples, "error": answer.error}
        return Message(pack(fields, answer.data), reply_to=message)

    return mod


def _first(file: Path, text: str) -> bool:
    """Write a file, if it is not there; whether it was not."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x") as handle:
            handle.write(text)
    except FileExistsError:
        return False
    return True


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- on the server -----------------------------------------------------------------------------------------------------


class Books:
    """Keeps every message that counted; what a killed server took in a round that it did not save is struck out."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.round = folder, 0

    def __call__(self, number: int, direction: str, client: int, message: bytes) -> None:
        """The on_message of `server_app`."""
        if number != self.round:
            self.round = number
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in self.folder.iterdir():
                if int(file.name.split("-")[0]) >= number:
                    file.unlink()
        if direction == "up":
            (self.folder / f"{number}-{client}").write_bytes(message)

    def read(self) -> dict[int, dict[int, bytes]]:
        """By round, by client."""
        found: dict[int, dict[int, bytes]] = {}
        for file in self.folder.iterdir():
            number, client = map(int, file.name.split("-"))
            found.setdefault(number, {})[client] = file.read_bytes()
        return found


class Echoing(GridTransport):
    """A network on which answers come twice, and answers of earlier rounds come again."""

    seed, books = 0, Path()

    def ask(self, asks: Mapping[int, Ask], seconds: float) -> Iterator[Heard]:
        """As it should, and more."""
        key = Key(self.seed).fold("echo", max(0, *(ask.heard for ask in asks.values())))
        before, self.before = getattr(self, "before", []), []
        if before and float(key.fold("old").uniform(1)) < SHARE:
            _first(self.books / "struck" / f"old-{time.time_ns()}", "answer of an earlier round")
            yield before[0]
        for heard in super().ask(asks, seconds):
            self.before.append(heard)
            yield heard
            if float(key.fold("twice", heard.client).uniform(1)) < SHARE / 4:
                _first(self.books / "struck" / f"twice-{time.time_ns()}", "answer comes twice")
                yield heard


def dress(folder: Path, *, seed: int, books: Path, seconds: float) -> None:
    """Put all of it into an app."""
    (folder / "federated/client_app.py").write_text(
        "from pathlib import Path\n"
        "from benchmarks.faults import saboteur\n"
        "from federated.task import job\n"
        "from thinwire.deployment.apps import client_app\n"
        f"app = client_app(job, [saboteur(job, {seed}, Path({str(books)!r}), {seconds})])\n"
    )
    (folder / "federated/server_app.py").write_text(
        "from pathlib import Path\n"
        "from benchmarks import faults\n"
        "from federated.task import EXPERIMENT, job\n"
        "from thinwire.flower import grid\n"
        "from thinwire.deployment.apps import server_app\n"
        f"faults.Echoing.seed, faults.Echoing.books = {seed}, Path({str(books)!r})\n"
        "grid.GridTransport = faults.Echoing\n"
        f"app = server_app(EXPERIMENT, job, faults.Books(Path({str(books / 'heard')!r})))\n"
    )


# -- the run -----------------------------------------------------------------------------------------------------------


class Havoc:
    """Kills the server and nodes at rounds that the seed says, brings nodes back, and starts a second server."""

    def __init__(self, seed: int, rounds: int, nodes: int, run: Path) -> None:
        key, self.run = Key(seed).fold("havoc"), run
        # within the middle of the run, apart from each other
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
        self.away: dict[int, int] = {}  # node, and when it comes back
        self.twins: list[subprocess.Popen[bytes]] = []

    def started(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """A deployment is up."""
        self.processes, self.away = list(processes), {}
        self.environments = [_environment(process.pid) for process in processes]

    def after(self, record: RoundRecord) -> None:
        """After every round; a resumed deployment tells of all rounds again."""
        number = record.round
        for node, back in list(self.away.items()):
            if number >= back:
                del self.away[node]
                self.done.append(f"node {node} came back after round {number}")
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
        if number == self.second and self._once(f"a second server after round {number}"):
            home = Path(self.environments[0]["FLWR_HOME"])
            words = f'run-dir="{self.run}"'
            command = [str(Path(sys.executable).with_name("flwr")), "run", str(home / "app"), "thinwire", "--stream"]
            self.twins.append(
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


def experiment_of(nodes: int, rounds: int) -> Experiment:
    """FedAvg with a mean that bears liars.

    Honest changes are 0.3 to 2.1 long, half of them below 0.6; of four answers still one is left out at either end.
    """
    options = {"task.clients": nodes, "cohort.size": nodes, "local.epochs": 1, "rounds": rounds}
    mean = {"kind": "bounded", "norm": 1.0, "weight": 500.0, "inner": {"kind": "trimmed", "share": 0.25}}
    return deployable(resolve("fedavg", "digits", {**options, "method.aggregator": mean}))


def faulty_run(
    folder: Path, *, nodes: int = 8, rounds: int = 40, seed: int = 1, seconds: float = 10.0
) -> dict[str, Any]:
    """The run, and what is found afterwards.

    Args:
        folder: an empty one.
        nodes: how many, with one client each.
        rounds: how many.
        seed: of everything that goes wrong.
        seconds: how long the server waits for answers.
    """
    experiment = experiment_of(nodes, rounds)
    quiet = execute(experiment, folder / "quiet")  # a deployment without faults ends with the same bits
    run, books = folder / "run", folder / "books"
    havoc, began, starts = Havoc(seed, rounds, nodes, run), time.monotonic(), 0
    while True:
        starts += 1
        try:
            summary = deploy(
                experiment,
                run,
                nodes=nodes,
                settings={"seconds": seconds, "quorum": 0.5, "tries": 5},
                resume=starts > 1,
                on_round=havoc.after,
                on_start=havoc.started,
                dress=partial(dress, seed=seed, books=books, seconds=seconds),
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
        "havoc": havoc.done,
        "quiet accuracy": quiet["final_accuracy"],
        "accuracy": summary["final_accuracy"],
        **check(experiment, run, books),
    }


def check(experiment: Experiment, run: Path, books: Path) -> dict[str, Any]:
    """What counted and what did not; an AssertionError where the books do not agree."""
    simulation = Simulation(experiment.engine, job_of(experiment, None))
    contract = simulation.contract
    heard = Books(books / "heard").read()
    rows = [RoundRecord(**row) for row in _rows(run / "metrics.jsonl")]
    assert [row.round for row in rows] == sorted(heard) == list(range(1, experiment.rounds + 1))
    assert [row.clients for row in rows] == [len(heard[row.round]) for row in rows]
    server = begin(contract, simulation.federation.first)
    for number in sorted(heard):  # each counted, and counted once
        server = close_round(contract, server, plan_round(contract, server), heard[number], experiment.task.clients)
    final = load((run / "model.safetensors").read_bytes())
    weights = {**simulation.federation.weights(server.public), **server.public.buffers}
    assert all(torch.equal(final[name], block) for name, block in weights.items())
    sent: dict[tuple[int, int, str], set[str]] = {}
    for file in (books / "sent").iterdir():
        version, client, name, fault = file.name.split("-")
        sent.setdefault((int(version), int(client), name), set()).add(fault)
    accepted = [(number - 1, client, digest(data)) for number, said in heard.items() for client, data in said.items()]
    assert len(set(accepted)) == len({name for _, _, name in accepted}) == len(accepted)
    as_sent = Counter(_sound(sent[one]) for one in accepted)
    log = (run / "server.log").read_text().splitlines()
    struck = Counter(file.read_text() for file in (books / "struck").iterdir())
    return {
        "struck": dict(sorted(struck.items())),
        "accepted": len(accepted),
        "accepted as": dict(sorted(as_sent.items())),
        "refused": sum("refused client" in line for line in log),
        "reasons": dict(Counter(_reason(line) for line in log if "refused client" in line).most_common()),
        "absent": sum(row.absent for row in rows),
        "turned away": sum("another process is writing" in line for line in log),
        "drifted": sum(row.drifted for row in rows),
    }


def _sound(sent: set[str]) -> str:
    """As what a message may have counted that was sent as these: an answer that was refused may be repeated soundly."""
    allowed = [way for way in ("sound", "late", *LIES) if way in sent]
    assert allowed, f"a message counted that was only ever sent as {sent}"
    return allowed[0]


def _reason(line: str) -> str:
    """The first words of why a client was refused, without its numbers."""
    said = line.split("refused client", 1)[1].split(": ", 1)[1]
    return " ".join(word for word in said.split()[:9] if not any(letter.isdigit() for letter in word))


def _rows(file: Path) -> list[dict[str, Any]]:
    import json

    return [json.loads(line) for line in file.read_text().splitlines()]
