"""Hostile clients of a deployment: what each sends in place of its upload.

Every attack is well formed: the message is decoded, changed, and encoded again with a valid checksum. `python
benchmarks/faults/hostile.py` deploys digits between real processes with and without them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.faults.corrupt import fields_of, with_field
from benchmarks.page import write_part
from thinwire.core.text import human_bytes, markdown_text, percent
from thinwire.federation.engine import Engine
from thinwire.federation.settings import Settings
from thinwire.flower.apps import MakeJob, deployable
from thinwire.flower.client import Client
from thinwire.flower.local import deploy
from thinwire.flower.records import dump
from thinwire.protocol.round import Response
from thinwire.runs.config import resolve
from thinwire.runs.deployment_records import read_sites
from thinwire.wire import message as wire

LARGEST = torch.finfo(torch.float32).max
LONG_REPLY, LONG_TEXT = 400_000_000, 20_000_000  # bytes
NODES, CLIENTS, ROUNDS = 4, 15, 6


def scaled(factor: float, client: Client, number: int, response: Response) -> Response:
    """The update times a factor, within the range of float32."""
    values = torch.frombuffer(bytearray(fields_of(client, number, response)[wire.COORDS]), dtype=torch.float32)
    changed = (values.double() * factor).clamp(-LARGEST, LARGEST).float()
    return with_field(client, number, response, wire.COORDS, changed.numpy().tobytes())


def largest(client: Client, number: int, response: Response) -> Response:
    """An update of the largest floats, with a weight of 1e38."""
    values = torch.full((client.contract.code.size,), LARGEST).numpy().tobytes()
    response = with_field(client, number, response, wire.COORDS, values)
    return with_field(client, number, response, wire.WEIGHT, wire.pack_weight(1e38))


def infinite_loss(client: Client, number: int, response: Response) -> Response:
    """An infinite training loss."""
    return response._replace(loss=float("inf"))


def long_reply(client: Client, number: int, response: Response) -> Response:
    """A message of 400 MB."""
    return response._replace(data=bytes(LONG_REPLY))


def long_error(client: Client, number: int, response: Response) -> Response:
    """An error text of 20 MB, with control codes."""
    return Response(b"", error="\x1b[31m\n" * (LONG_TEXT // 6))


ATTACKS: dict[int, Callable[[Client, int, Response], Response]] = {  # by client
    1: partial(scaled, -1e6),
    4: largest,
    7: infinite_loss,
    10: long_reply,
    13: long_error,
}
ATTACK_WORDS = {
    1: "its update times -1e6",
    4: "the largest floats, with a weight of 1e38",
    7: "a loss of infinity",
    10: "400 MB, in two rounds, in chunks and in one object",
    13: "an error text of 20 MB",
}


# -- between processes -------------------------------------------------------------------------------------------------


def hostile_mod(job: MakeJob) -> Callable[..., Any]:
    """A Flower mod that replaces the replies of hostile clients; long replies are sent in two rounds only."""

    def mod(message: Any, context: Any, proceed: Callable[..., Any]) -> Any:
        reply = proceed(message, context)
        if message.metadata.message_type != "train":
            return reply
        from flwr.app import ConfigRecord, Message, RecordDict

        from thinwire.flower.grid_transport import Task, pack, unpack

        number, response = unpack(Task, message.content).client, unpack(Response, reply.content)
        client = Client(Engine(), job(dict(context.node_config)))
        version = wire.unpack(response.data, client.contract.schema.sent_by(number)).version
        if number not in ATTACKS or (number == 10 and version not in (1, 2)):
            return reply
        answer = ATTACKS[number](client, number, response)
        if number == 10 and version == 2:  # in one object, not in chunks
            return Message(RecordDict({"thinwire": ConfigRecord({"data": dump(answer)})}), reply_to=message)
        return Message(pack(answer), reply_to=message)

    return mod


def write_hostile_app(folder: Path, *, memory: Path) -> None:
    """Write apps with hostile clients, and a server that notes its largest memory after each round."""
    (folder / "federated/client_app.py").write_text(
        "from benchmarks.faults.hostile import hostile_mod\n"
        "from federated.jobs import job\n"
        "from thinwire.flower.apps import client_app\n"
        "app = client_app(job, [hostile_mod(job)])\n"
    )
    (folder / "federated/server_app.py").write_text(
        "import resource\n"
        "from federated.jobs import EXPERIMENT, job\n"
        "from thinwire.flower.apps import server_app\n"
        "def note(number, direction, client, message):\n"
        f"    with open({str(memory)!r}, 'a') as file:\n"
        "        print(number, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=file)\n"
        "app = server_app(EXPERIMENT, job, note)\n"
    )


def experiment_of(rounds: int = ROUNDS) -> Settings:
    """Digits, 15 clients, all in every round."""
    settings = {"task.clients": CLIENTS, "cohort.size": CLIENTS, "task.partition.kind": "iid", "rounds": rounds}
    return deployable(resolve("fedavg", "digits", {**settings, "local.epochs": 2}))


def compare(folder: Path, rounds: int = ROUNDS) -> dict[str, Any]:
    """Deploy with and without hostile clients; accuracies, the rise of the server's memory, and who was named."""
    memory, settings = folder / "memory", {"quorum": 0.5, "seconds": 300.0}
    honest = deploy(experiment_of(rounds), folder / "honest", nodes=NODES, settings=settings)
    hostile = deploy(
        experiment_of(rounds),
        folder / "hostile",
        nodes=NODES,
        settings=settings,
        edit_app=partial(write_hostile_app, memory=memory),
    )
    return {
        "rounds": rounds,
        "honest": honest["final_accuracy"],
        "hostile": hostile["final_accuracy"],
        **memory_of(memory),
        "clients": named_in(folder / "hostile"),
    }


def memory_of(file: Path) -> dict[str, int]:
    """The largest memory of the server after round 1, and by how much it rose later, in bytes."""
    peaks: dict[int, int] = {}
    for line in file.read_text().splitlines():
        number, peak = map(int, line.split())
        peaks[number] = max(peaks.get(number, 0), peak * 1024)
    return {"memory": peaks[1], "rise": max(peaks.values()) - peaks[1]}


def named_in(run: Path) -> dict[int, dict[str, Any]]:
    """For each hostile client: rounds in which it was refused, lines of the log, of the record, and a reason."""
    lines, records = (run / "server.log").read_text().splitlines(), read_sites(run)
    found: dict[int, dict[str, Any]] = {}
    for client in ATTACKS:
        own = [one for one in records if one.client == client and one.status == "refused"]
        log = [line for line in lines if f"client {client}:" in line]
        why = own[0].why if own else ""
        found[client] = {"refused": len({one.round for one in own}), "log": len(log), "record": len(own), "why": why}
    return found


def as_text(found: dict[str, Any]) -> str:
    """The table of the page."""
    rows = [
        f"| {ATTACK_WORDS[client]} | {one['refused']} | {one['log']} | {one['record']} | {markdown_text(one['why'])} |"
        for client, one in found["clients"].items()
    ]
    heads = "| a client sends | rounds refused | lines in the log | in the record | reason of the first |"
    return "\n".join(
        [
            heads,
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Accuracy {percent(found['hostile'])}, without hostile clients {percent(found['honest'])}, after "
            f"{found['rounds']} rounds. The largest memory of the server was {human_bytes(found['memory'])} after "
            f"round 1 and rose by {human_bytes(found['rise'])} after that.",
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--docs", type=Path, help="Folder of the documentation, whose page is written.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hostile-") as place:
        result = compare(Path(place), given.rounds)
    print(json.dumps(result, indent=1))
    if given.docs:
        write_part(
            given.docs / "safe-rounds.md", "hostile", as_text(result), "python benchmarks/faults/hostile.py --docs docs"
        )
