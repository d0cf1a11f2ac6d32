"""Faults of clients, network and server: each is counted and does not affect other clients."""

from __future__ import annotations

import pytest
import torch

from benchmarks.faults.corrupt import CORRUPTIONS
from tests.federation import same_public
from tests.flower.in_memory import FlowerServer, InMemory
from tests.flower.test_server import experiment, play
from thinwire.errors import ConfigError, WireError
from thinwire.flower.client import Client, ClientStore
from thinwire.flower.policy import RoundPolicy
from thinwire.protocol.round import Request, Round
from thinwire.runs.build import build_job

ALL = {"cohort.size": 4}


class Faulty(InMemory):
    """A transport with a script: which fault happens to which client in which exchange."""

    def __init__(self, client: Client, script: dict[tuple[int, int], str]) -> None:
        super().__init__(client)
        self.script, self.exchanges = script, -1
        self.late = []
        self.requested: list[tuple[int, int]] = []

    def clients(self):
        self.exchanges += 1
        return frozenset(i for i in super().clients() if self.script.get((self.exchanges, i)) != "absent")

    def receive(self, clients, deadline):
        late, self.late = self.late, []
        yield from late
        while self.waiting:
            number = next(iter(self.waiting))
            request = self.waiting.pop(number)
            self.requested.append((self.exchanges, number))
            fault = self.script.get((self.exchanges, number), "")
            if fault == "request lost":  # before it receives the request
                continue
            if fault == "lost its disk":
                self.stored.pop(number, None)
            if fault == "damaged disk":
                self.stored[number] = self.stored[number][:-1] + b"?"
                with pytest.raises(WireError):
                    ClientStore.load(self.stored[number], self.client.first)
                del self.stored[number]
            response = self.respond(number, request)
            if fault == "response lost":
                continue
            if fault == "late":
                self.late.append((number, response))
                continue
            if fault in CORRUPTIONS:
                response = CORRUPTIONS[fault](self.client, number, response)
            yield number, response
            if fault == "twice":
                yield number, response


def federation(method: str, script, policy=None, **overrides):
    chosen = experiment(method, **{**ALL, **overrides})
    job = build_job(chosen)
    transport = Faulty(Client(chosen.engine, job), script)
    lines: list[str] = []
    server = FlowerServer(chosen.engine, job, transport, policy or RoundPolicy(seconds=0.01, quorum=0.5), lines.append)
    return server, transport, lines


def check_correction_states(server: FlowerServer, transport: InMemory, state) -> None:
    """SCAFFOLD's shared state must be the mean of the clients' states: each upload counted once on both sides."""
    total = {name: torch.zeros_like(block) for name, block in state.server.public.shared.items()}
    for i, known in state.clients.items():
        store = ClientStore.load(transport.stored[i], server.first)
        accepted = store.response is None or store.positions[-1].public.version == known.version
        position = store.positions[-1] if accepted else store.positions[0]
        for name in total:
            total[name] += position.state.correction[name] / 4
    for name, block in state.server.public.shared.items():
        torch.testing.assert_close(block, total[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("fault", sorted(CORRUPTIONS))
def test_a_corrupt_upload_is_refused_and_the_others_count(fault):
    server, _, lines = federation("fedavg", {(1, 2): fault})
    state, records, _ = play(server, 3)
    assert [(r.clients, r.refused, r.absent) for r in records] == [(4, 0, 0), (3, 1, 0), (4, 0, 0)]
    assert [line for line in lines if "client 2" in line]
    assert all(torch.isfinite(block).all() for block in state.server.public.coords.values())
    assert records[-1].accuracy > records[0].accuracy


@pytest.mark.parametrize("fault", ["absent", "request lost", "response lost", "late"])
def test_a_client_that_does_not_respond_is_left_out_and_takes_part_later(fault):
    server, transport, _ = federation("scaffold", {(1, 2): fault, (2, 2): "absent"})
    state, records, _ = play(server, 5)
    assert [(r.clients, r.absent) for r in records] == [(4, 0), (3, 1), (3, 1), (4, 0), (4, 0)]
    assert same_public(ClientStore.load(transport.stored[2], server.first).positions[-1].public, _before(server, 4))
    check_correction_states(server, transport, state)


def _before(server: FlowerServer, rounds: int):
    """The public state after some rounds of the same script."""
    fresh = Faulty(server.clients.transport.client, server.clients.transport.script)
    again = FlowerServer(server.engine, server.job, fresh, server.clients.policy)
    return play(again, rounds)[0].server.public


def test_the_first_response_may_be_lost():
    server, transport, _ = federation(
        "scaffold", {(0, 1): "response lost", (0, 3): "request lost", (1, 0): "response lost"}
    )
    state, records, _ = play(server, 4)
    assert [r.clients for r in records] == [2, 3, 4, 4]
    check_correction_states(server, transport, state)


def test_a_response_that_arrives_twice_counts_once():
    server, _, _ = federation("scaffold", {(0, 1): "twice", (1, 2): "twice"})
    plain, _, _ = federation("scaffold", {})
    (ours, records, _), (theirs, _, _) = play(server, 3), play(plain, 3)
    assert same_public(ours.server.public, theirs.server.public)
    assert records[0].clients == 4
    assert records[0].bytes_up > records[2].bytes_up  # it was sent, so it is counted


@pytest.mark.parametrize(("fault", "method"), [("lost its disk", "mapo"), ("damaged disk", "fedavg")])
def test_a_client_that_lost_its_store_receives_the_whole_state(fault, method):
    server, _, _ = federation(method, {(2, 1): fault})
    plain, _, _ = federation(method, {})
    (ours, records, _), (theirs, _, _) = play(server, 4), play(plain, 4)
    assert [(r.clients, r.drifted) for r in records] == [(4, 0), (4, 0), (4, 1), (4, 0)]
    assert records[2].bytes_catchup > records[1].bytes_catchup
    assert same_public(ours.server.public, theirs.server.public)  # these methods have no client state


@pytest.mark.parametrize("method", ["scaffold", "pfedpara", "fedlama", "ef+topk+int4"])
def test_a_server_that_was_killed_resumes_with_the_same_bits(method):
    server, _, _ = federation(method, {})
    plain, _, _ = federation(method, {})
    state, _, _ = play(server, 2)
    play(server, 1, state)  # all clients respond, and the server is killed before its checkpoint
    state, _, messages = play(server, 2, state)
    theirs, _, their_messages = play(plain, 4)
    assert same_public(state.server.public, theirs.server.public)
    assert messages == [message for message in their_messages if message[0] > 2]


def test_clients_ahead_of_a_restored_server_receive_the_whole_state():
    server, _, _ = federation("scaffold", {})
    state, _, _ = play(server, 1)
    play(server, 3, state)
    after, records, _ = play(server, 2, state)
    assert [(r.clients, r.drifted) for r in records] == [(4, 4), (4, 0)]
    assert after.round == 3


def test_without_a_quorum_the_other_clients_are_asked_again():
    lost = {(1, i): "response lost" for i in (1, 2, 3)}
    server, transport, lines = federation("scaffold", lost)
    plain, _, _ = federation("scaffold", {})
    (ours, records, _), (theirs, _, _) = play(server, 3), play(plain, 3)
    assert same_public(ours.server.public, theirs.server.public)
    assert {number for exchange, number in transport.requested if exchange == 2} == {1, 2, 3}
    assert records[1].bytes_catchup > 0
    assert any("1 of 4 clients responded, 2 are needed" in line for line in lines)


def test_a_run_without_a_quorum_stops_and_can_be_resumed():
    gone = {(exchange, i): "request lost" for exchange in (1, 2, 3) for i in (0, 1, 2)}
    server, _, _ = federation("scaffold", gone)
    plain, _, _ = federation("scaffold", {})
    state, _, _ = play(server, 1)
    with pytest.raises(WireError, match=r"round 2: 1 of 4 clients .* 2 are needed"):
        server.round(state)
    ours, _, _ = play(server, 2, state)
    theirs, _, _ = play(plain, 3)
    assert same_public(ours.server.public, theirs.server.public)


def test_a_client_responds_to_another_method_with_an_error_and_does_not_change():
    server, transport, _ = federation("fedavg", {})
    play(server, 1)
    other, _, _ = federation("mapo", {})
    state = other.start()
    request = Request(Round.open(other.contract, state.server).downloads.messages({0: 0})[0])
    before = transport.stored[0]
    response = transport.respond(0, request)
    assert "another method or model" in response.error
    assert transport.stored[0] == before


@pytest.mark.parametrize("given", [{"quorum": 0}, {"quorum": 1.5}, {"seconds": 0}, {"tries": 0}])
def test_invalid_policies_are_an_error(given):
    with pytest.raises(ConfigError):
        RoundPolicy(**given)


def test_a_late_response_is_refused_and_the_new_one_counts():
    server, transport, _ = federation("scaffold", {(1, 2): "late"})
    state, records, _ = play(server, 4)
    assert [(r.clients, r.refused, r.absent) for r in records] == [(4, 0, 0), (3, 0, 1), (4, 1, 0), (4, 0, 0)]
    check_correction_states(server, transport, state)


def test_a_client_that_missed_rounds_catches_up_once():
    server, _, _ = federation("mapo", {(exchange, 2): "absent" for exchange in range(1, 6)}, rounds=8)
    _, records, _ = play(server, 8)
    assert [r.clients for r in records] == [4, 3, 3, 3, 3, 3, 4, 4]
    assert records[6].bytes_catchup > 0
    assert records[7].bytes_catchup == 0
