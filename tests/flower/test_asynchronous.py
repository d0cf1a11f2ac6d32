"""Asynchronous rounds over a transport: the bits of the simulation, replay, faults."""

from __future__ import annotations

import json

import pytest

from tests.federation import same_public
from tests.flower.in_memory import FlowerServer
from tests.flower.replay import replay
from tests.flower.test_server import experiment, play
from tests.flower.timed import Timed
from thinwire.core.key import Key
from thinwire.errors import WireError
from thinwire.federation.simulation import make_simulation
from thinwire.federation.speed import ClientSpeeds
from thinwire.flower.client import Client, ClientStore
from thinwire.flower.policy import RoundPolicy
from thinwire.runs.build import build_job
from thinwire.runs.deployment_records import CohortLog
from thinwire.runs.execute import execute

TEN = {"task.clients": 10, "cohort.size": 3, "local.steps": 1, "rounds": 8}
SLOW = {"speed.slow_fraction": 0.3, "speed.slow_factor": 5.0, "speed.spread": 0.4}


def seconds_of(job) -> dict[int, float]:
    sizes = [len(job.task.clients.client(i)) for i in range(len(job.task.clients))]
    speeds = ClientSpeeds(job.speed, job.local, sizes, Key(job.seed))
    return {i: speeds.seconds(i, 0, 0, 0) for i in range(len(sizes))}


def federation(method="fedbuff", record=None, policy=None, **overrides):
    chosen = experiment(method, **{**TEN, **SLOW, **overrides})
    job = build_job(chosen)
    transport = Timed(Client(chosen.engine, job), seconds_of(job))
    lines: list[str] = []
    policy = policy or RoundPolicy(seconds=1000.0)
    server = FlowerServer(
        chosen.engine, job, transport, policy, lines.append, record or CohortLog(), clock=transport.clock
    )
    return server, transport, lines


@pytest.mark.parametrize("method", ["fedbuff", "fedbuff+ef+topk+int4", "fedbuff+hetlora"])
def test_a_deployment_with_the_speeds_of_a_simulation_has_its_bits(method):
    server, transport, lines = federation(method)
    ours, records, messages = play(server, 8)
    theirs, their_records, their_messages = play(make_simulation(server.engine, server.job), 8)
    assert same_public(ours.server.public, theirs.server.public)
    assert sorted(messages) == sorted(their_messages)
    assert [one._replace(late=0) for one in records] == [one._replace(clock=None) for one in their_records]
    assert max(one.staleness for one in records) > 0
    assert transport.clock.now == pytest.approx(their_records[-1].clock)
    assert {i: state.version for i, state in ours.clients.items()} == {
        i: state.version for i, state in theirs.clients.items()
    }
    assert not lines
    assert all(one.absent == 0 for one in records)


def deployed(folder):
    chosen = experiment("fedbuff+ef+topk", **{**TEN, **SLOW})
    execute(chosen, folder, prepare=lambda: federation("fedbuff+ef+topk", CohortLog(folder))[0])


def test_a_replay_has_the_weights_of_the_deployment(tmp_path):
    deployed(tmp_path / "run")
    rounds = CohortLog(tmp_path / "run").rounds
    assert any(base < number - 1 for number, one in rounds.items() for base in one.based)
    assert replay(tmp_path / "run")


@pytest.mark.parametrize("based", [["x", 1, 2], [-1, 0, 0], "all"])
def test_versions_that_are_not_valid_are_left_out(based, tmp_path):
    lines = [
        {"round": 1, "available": [0, 1, 2], "cohort": [0, 1, 2]},
        {"round": 1, "accepted": [0, 1, 2], "late": [], "based": based},
    ]
    (tmp_path / "cohorts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert CohortLog(tmp_path).rounds[1].accepted is None


class Twice(Timed):
    """A transport that brings every response twice, the second time at the end of a later exchange."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.copies = []

    def receive(self, clients, deadline):
        copies, self.copies = self.copies, []
        yield from copies
        for one in super().receive(clients, deadline):
            self.copies.append(one)
            yield one


def test_a_response_that_arrives_twice_counts_once():
    server, transport, lines = federation()
    twice = Twice(transport.client, transport.seconds)
    server.clients.transport = twice
    server.clients.clock = twice.clock
    ours = play(server, 6)[0]
    theirs = play(federation()[0], 6)[0]
    assert same_public(ours.server.public, theirs.server.public)
    assert any("responded to a round that is closed; it is not used" in line for line in lines)


def test_uploads_that_are_too_stale_are_refused_and_their_clients_go_back():
    server, _, lines = federation("fedbuff+ef+topk", **{"method.asynchronous.most_stale": 1, "rounds": 9})
    state, records, _ = play(server, 9)
    simulated = play(make_simulation(server.engine, server.job), 9)[0]
    assert any("versions ago, and at most 1 are used" in line for line in lines)
    assert sum(one.refused for one in records) > 0
    assert same_public(state.server.public, simulated.server.public)


def test_a_client_that_lost_its_state_while_it_trained_is_sent_the_newest():
    server, transport, _ = federation()
    state, _, _ = play(server, 3)
    late = sorted(server.clients.asked)
    assert late
    for client in late:
        store = (
            ClientStore.load(transport.stored[client], transport.client.first) if client in transport.stored else None
        )
        if store is not None:
            del transport.stored[client]
    state, records, _ = play(server, 6, state)
    assert state.round == 9
    assert all(one.clients == 3 for one in records)
    assert not any(one.refused for one in records)


def test_a_resumed_server_asks_again_and_clients_return_to_their_last_accepted_state():
    server, transport, _ = federation("fedbuff+ef+topk+int4", rounds=12)
    state, _, _ = play(server, 4)
    again = FlowerServer(server.engine, server.job, transport, server.clients.policy, clock=transport.clock)
    transport.pending.clear()  # requests from before the restart get no response
    state, records, _ = play(again, 6, state)
    assert state.round == 10
    assert all(one.clients == 3 and one.refused == 0 for one in records)


def test_a_round_goes_on_without_clients_that_never_respond():
    server, transport, _ = federation(policy=RoundPolicy(seconds=100.0, quorum=1.0))
    transport.offline = lambda: frozenset({0, 1, 2, 3, 4})
    transport.listed = lambda: frozenset(range(10))
    state, records, _ = play(server, 4)
    assert all(one.clients == 3 for one in records)
    assert set(state.clients) <= {5, 6, 7, 8, 9}


def test_a_server_without_enough_clients_stops():
    server, transport, _ = federation(policy=RoundPolicy(seconds=5.0, quorum=1.0, wait=1.0))
    transport.listed = lambda: frozenset({0, 1})
    with pytest.raises(WireError, match="3 are needed"):
        server.round(server.start())


def test_versions_that_are_made_again_forget_who_was_asked_before():
    server, _, lines = federation()
    state, _, _ = play(server, 2)
    play(server, 2, state)
    assert server.clients.asked
    after, records, _ = play(server, 3, state)  # the run went back to round 2
    assert after.round == 5
    assert all(one.clients == 3 for one in records)
    assert not any("ago" in line for line in lines)
