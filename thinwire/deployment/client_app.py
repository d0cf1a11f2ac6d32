"""The ClientApp of a Flower app: it runs on every node.

    app = client_app(job)

`job(node_config)` returns the `Job` of the node, with its local examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from thinwire.deployment.client_files import client_file
from thinwire.deployment.jobs import MakeJob, clients_of_node
from thinwire.errors import ThinwireError, WireError
from thinwire.flower import need_flower
from thinwire.flower.client import Client
from thinwire.flower.client_store import Request, Response
from thinwire.runtime.job import Job
from thinwire.simulation.engine import LocalEngine


def client_app(job: MakeJob, mods: Sequence[Any] = ()) -> Any:
    """A Flower ClientApp.

    Args:
        job: returns the job of a node, given its `--node-config`.
        mods: Flower mods.

    Client states are stored in the folder `state-dir` of the `--node-config`, so that a run can be resumed after the
    server was restarted. Without `state-dir`, Flower stores them for as long as one run of the server lasts.
    """
    need_flower()
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    from thinwire.flower.grid_transport import pack, unpack

    app = ClientApp(mods=list(mods))

    def open_node(context: Context) -> tuple[Client, list[int]]:
        config = dict(context.node_config)
        client = _client_of(job(config), str(config.get("device", "cpu")))
        return client, clients_of_node(config, len(client.job.task.clients))

    def query(message: Message, context: Context) -> Message:
        client, local = open_node(context)
        return Message(pack({"clients": local, "schema": client.contract.schema.digest}), reply_to=message)

    def train(message: Message, context: Context) -> Message:
        fields = {"run": str, "client": int, "accepted": int, "phase": str}
        (run, number, accepted, phase), data = unpack(message.content, **fields)
        try:
            client, local = open_node(context)
            if number not in local:
                raise WireError(f"client {number} is not on this node, which has {local}")
            _check_data(client)
            if client.secure is not None and not context.node_config.get("state-dir"):
                raise WireError("secure aggregation needs a folder that stores which versions were answered: state-dir")
            with client_file(context, run, number) as file:
                response, state = client.respond(number, Request(data, accepted, phase), file.load(client))
                file.save(state.dump(client.first))
        except ThinwireError as error:
            response = Response(b"", error=f"{type(error).__name__}: {error}")
        fields = {"client": number, **{key: value for key, value in response._asdict().items() if key != "data"}}
        return Message(pack(fields, response.data), reply_to=message)

    app.query()(query)
    app.train()(train)
    return app


@lru_cache(1)
def _client_of(job: Job, device: str) -> Client:
    return Client(LocalEngine(device), job)


@lru_cache(1)
def _check_data(client: Client) -> None:
    """Check the data of this node once, before it trains."""
    client.federation.try_model()
