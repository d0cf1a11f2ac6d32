"""On the server: open a round, and from decoded uploads to the next version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from thinwire.core.tree import restrict, to_device
from thinwire.errors import Diverged, Unfit, WireError
from thinwire.protocol.aggregate import Terms as Terms, aggregate
from thinwire.protocol.contract import Contract
from thinwire.protocol.download import RoundOpening
from thinwire.protocol.method import NORM_BOUND
from thinwire.protocol.next_version import next_version
from thinwire.protocol.norm_bound import bound_uploads
from thinwire.protocol.state import ServerState
from thinwire.protocol.upload import Upload
from thinwire.schedules.base import Plan
from thinwire.wire import message as wire


class ClosedRound(NamedTuple):
    """A closed round: the server's next state, and the clients whose uploads were changed or left out, with reasons."""

    server: ServerState
    bounded: dict[int, str]  # scaled down: see `norm_bound`
    refused: dict[int, str]  # left out: far beyond any bound, or the next state would not be finite with them
    medians: Mapping[str, float] = {}  # of each part of the uploads, for `recent`
    norms: Mapping[int, float] = {}  # of each client's update


def open_round(contract: Contract, server: ServerState, versions: Mapping[int, int]) -> dict[int, bytes]:
    """One message to each client of the cohort, the shortest that brings it from its version to the current one.

    Args:
        contract: the contract.
        server: the server's state.
        versions: the version of each client of the cohort.
    """
    return {client: b"".join(pieces) for client, pieces in RoundOpening(contract, server).messages(versions).items()}


def close_round(
    contract: Contract, server: ServerState, plan: Plan, uploads: Mapping[int, Upload], terms: Terms
) -> ClosedRound:
    """Aggregate the uploads of a round and make the next version.

    Args:
        contract: the contract.
        server: the server's state.
        plan: the plan of the round.
        uploads: the decoded uploads, by client number.
        terms: number of clients, noise, what uploads are compared with, and how masked ones are summed.

    Uploads far beyond their bound are left out. The whole next state is checked: if it is not finite, clients far above
    the median norm are left out, and if that does not help, Diverged is raised. Aggregates and the server's own states
    are on the CPU, where uploads are decoded; the next version is made on the device of the public state.
    """
    version = server.public.version
    if not uploads:
        raise WireError(
            f"no client responded in the round from version {version}; repeat the round, or sample other clients"
        )
    method = contract.at(version).method
    clients = sorted(uploads)
    received = [uploads[client] for client in clients]
    if method.secure_aggregation:
        return ClosedRound(_close(contract, server, plan, received, terms), {}, {})
    start = to_device(restrict(server.public.coords, plan.names), "cpu") if method.upload == "weights" else {}
    buffers = to_device(server.public.buffers, "cpu") if server.public.buffers else {}
    limit = 0.0 if method.privacy.bounds else method.norm_bound
    found = bound_uploads(clients, received, limit, start, buffers, terms.recent)
    usable = {i: one for i, one in zip(clients, found.uploads, strict=True) if i not in found.refused}
    if not usable:
        raise Unfit("no upload of this round can be used", found.refused)
    facts = found.medians, found.norms
    try:
        after = _close(contract, server, plan, list(usable.values()), terms)
        return ClosedRound(after, found.why, dict(found.refused), *facts)
    except Diverged:
        beyond = bound_uploads(clients, received, NORM_BOUND, start, buffers, terms.recent)
        far = {**beyond.why, **beyond.refused}
        left = [one for client, one in usable.items() if client not in far]
        if not far or not left or method.privacy.bounds:  # with privacy, one client must not decide who else counts
            raise
    refused = {client: f"the next state is not finite with it: {reason}" for client, reason in far.items()}
    after = _close(contract, server, plan, left, terms)
    return ClosedRound(after, found.why, {**refused, **found.refused}, *facts)


def full_state_message(contract: Contract, server: ServerState, data: bytes, client: int) -> bytes:
    """The whole state, for a client that requested it.

    Args:
        contract: the contract.
        server: the server's state.
        data: the client's message (`request_full_state`), not trusted.
        client: its number.
    """
    contract = contract.at(server.public.version)
    message = wire.unpack(data, contract.schema.sent_by(client), contract.longest_up)
    if message.kind != wire.LOST:
        raise WireError(f"a message of kind {wire.KINDS[message.kind]!r} requests no state, expected 'lost'")
    if message.version > server.public.version:
        raise WireError(f"a client is lost at version {message.version}, the server is at {server.public.version}")
    return b"".join(RoundOpening(contract, server).state(message.version, client))


def split_download(contract: Contract, server: ServerState, messages: Mapping[int, bytes]) -> tuple[int, int]:
    """Bytes of the ordinary broadcast, and bytes beyond it because clients had missed rounds."""
    return RoundOpening(contract, server).split([len(data) for data in messages.values()])


def _close(contract: Contract, server: ServerState, plan: Plan, uploads: list[Upload], terms: Terms) -> ServerState:
    """The next state with these uploads."""
    total = aggregate(contract.at(server.public.version), server.public, plan, uploads, terms)
    return next_version(contract, server, plan, total, len(uploads) / terms.registered)
