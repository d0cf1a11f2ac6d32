"""The ClientApp of a Flower app: it runs on every node.

    app = client_app(job)

`job(node_config)` returns the `Job` of the node, with its local examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from thinwire.core.text import visible
from thinwire.deployment.client_files import client_file
from thinwire.deployment.introduction import Asked, clients_here, introduce, site_keys
from thinwire.deployment.jobs import MakeJob
from thinwire.deployment.software import software_of
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

    from thinwire.flower.grid_transport import nonce_of, pack, response_fields, unpack

    app = ClientApp(mods=list(mods))

    @lru_cache(1)  # a node that has loaded its data before it forks for a message does not read them again
    def job_for(config: tuple[tuple[str, Any], ...]) -> Job:
        return job(dict(config))

    def open_node(context: Context) -> Client:
        config = dict(context.node_config)
        client = _client_of(job_for(tuple(sorted(config.items()))), str(config.get("device", "cpu")))
        if client.secure is not None:  # read for each message: a site may have been revoked
            client.secure = replace(client.secure, site_keys=site_keys(config))
        return client

    def load(config: dict[str, Any]) -> None:
        """Load data and model for messages of processes that are forked afterwards; a GPU cannot be used before."""
        found = job_for(tuple(sorted(config.items())))
        if (device := str(config.get("device", "cpu"))) == "cpu":
            _check_data(_client_of(found, device))

    def query(message: Message, context: Context) -> Message:
        try:
            (run, refusal), _ = unpack(message.content, run=str, refusal=str)
            if refusal:
                print(f"thinwire: the server does not use this node: {visible(refusal, 300)}", flush=True)
                return Message(pack({}), reply_to=message)
            client, nonce = open_node(context), nonce_of(message.content)
            asked = Asked(run, nonce, context.node_id, len(client.job.task.clients))
            fields = introduce(dict(context.node_config), asked, software_of(job, client.contract))
        except ThinwireError as error:
            fields = {"error": f"{type(error).__name__}: {error}"}
            print(f"thinwire: this node cannot take part: {visible(str(error))}", flush=True)
        return Message(pack(fields), reply_to=message)

    def train(message: Message, context: Context) -> Message:
        (run, number, accepted, phase), data = unpack(message.content, run=str, client=int, accepted=int, phase=str)
        try:
            client = open_node(context)
            if number not in (local := clients_here(context.node_config, len(client.job.task.clients))):
                raise WireError(f"client {number} is not on this node, which has {local}")
            _check_data(client)
            if client.secure is not None and not context.node_config.get("state-dir"):
                raise WireError("secure aggregation needs a folder that stores which versions were answered: state-dir")
            with client_file(context, run, number) as file:
                stored = file.load(client)
                response, state = client.respond(number, Request(data, accepted, phase), stored)
                if state is not stored:
                    file.save(state.dump(client.first))
        except ThinwireError as error:
            response = Response(b"", error=f"{type(error).__name__}: {error}")
        return Message(pack(response_fields(number, response), response.data), reply_to=message)

    app.query()(query)
    app.train()(train)
    app.load = load  # type: ignore[attr-defined] # `thinwire node --app` calls it once
    return app


@lru_cache(1)
def _client_of(job: Job, device: str) -> Client:
    return Client(LocalEngine(device), job)


@lru_cache(1)
def _check_data(client: Client) -> None:
    """Check the data of this node once, before it trains."""
    client.federation.try_model()
