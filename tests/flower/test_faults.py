"""What goes wrong between machines, and what then happens: decided, counted, and without harm to the rest."""

from __future__ import annotations

import pytest
import torch

from benchmarks.spoilt import SPOILT
from tests.federation import same_public
from tests.flower.test_loop import experiment, play
from thinwire.errors import CheckpointError, ConfigError, WireError
from thinwire.experiments.build import build_job
from thinwire.flower.client import Client
from thinwire.flower.client_store import Ask, ClientStore
from thinwire.flower.policy import RoundPolicy
from thinwire.flower.server import FlowerServer
from thinwire.flower.transport import Heard, InMemory

ALL = {"cohort.size": 4}


class Faulty(InMemory):
    """A transport with a script: which fault strikes which client in which asking."""

    def __init__(self, client: Client, script: dict[tuple[int, int], str]) -> None:
        super().__init__(client)
        self.script, self.asking = script, -1
        self.late: list[Heard] = []
        self.asked: list[tuple[int, int]] = []

    def clients(self):
        self.asking += 1
        return frozenset(i for i in super().clients() if self.script.get((self.asking, i)) != "away")

    def ask(self, asks, seconds):
        late, self.late = self.late, []
        yield from late
        for number, ask in asks.items():
            self.asked.append((self.asking, number))
            fault = self.script.get((self.asking, number), "")
            if fault == "vanishes":  # before it hears anything
                continue
            if fault == "lost its disk":
                self.kept.pop(number, None)
            if fault == "damaged disk":
                self.kept[number] = self.kept[number][:-1] + b"?"
                with pytest.raises(CheckpointError):
                    ClientStore.load(self.kept[number], self.client.first)
                del self.kept[number]
            heard = Heard(number, self.upload(number, ask))
            if fault == "answer lost":
                continue
            if fault == "late":
                self.late.append(heard)
                continue
            if fault in SPOILT:
                heard = heard._replace(answer=SPOILT[fault](self.client, number, heard.answer))
            yield heard
            if fault == "twice":
                yield heard


def federation(method: str, script, patience=None, **overrides):
    chosen = experiment(method, **{**ALL, **overrides})
    job = build_job(chosen)
    transport = Faulty(Client(chosen.engine, job), script)
    lines: list[str] = []
    served = FlowerServer(
        chosen.engine, job, lambda *_: transport, patience or RoundPolicy(seconds=0.01, quorum=0.5), lines.append
    )
    return served, transport, lines


def memory_sums(served: FlowerServer, transport: InMemory, state) -> None:
    """SCAFFOLD's shared memory is the mean of the clients' own: true only if each answer counted once on both sides."""
    total = {name: torch.zeros_like(block) for name, block in state.server.public.shared.items()}
    for i, known in state.clients.items():
        kept = ClientStore.load(transport.kept[i], served.public)
        counted = kept.said is None or kept.places[-1].public.version == known.version
        place = kept.places[-1] if counted else kept.places[0]
        for name in total:
            total[name] += place.state.correction[name] / 4
    for name, block in state.server.public.shared.items():
        torch.testing.assert_close(block, total[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("fault", sorted(SPOILT))
def test_a_message_that_cannot_be_used_is_refused_alone(fault):
    served, _, lines = federation("fedavg", {(1, 2): fault})
    state, records, _ = play(served, 3)
    assert [(r.clients, r.refused, r.absent) for r in records] == [(4, 0, 0), (3, 1, 0), (4, 0, 0)]
    assert [line for line in lines if "client 2" in line]
    assert all(torch.isfinite(block).all() for block in state.server.public.coords.values())
    assert records[-1].accuracy > records[0].accuracy


@pytest.mark.parametrize("fault", ["away", "vanishes", "answer lost", "late"])
def test_a_client_that_is_not_heard_is_left_out_and_comes_back(fault):
    served, transport, _ = federation("scaffold", {(1, 2): fault, (2, 2): "away"})
    state, records, _ = play(served, 5)
    assert [(r.clients, r.absent) for r in records] == [(4, 0), (3, 1), (3, 1), (4, 0), (4, 0)]
    assert same_public(ClientStore.load(transport.kept[2], served.public).places[-1].public, _before(served, 4))
    memory_sums(served, transport, state)


def _before(served: FlowerServer, rounds: int):
    """The public state after some rounds of the same script."""
    fresh = Faulty(served.transport.client, served.transport.script)
    again = FlowerServer(served.engine, served.job, lambda *_: fresh, served.patience)
    return play(again, rounds)[0].server.public


def test_the_first_answer_may_be_lost_too():
    served, transport, _ = federation("scaffold", {(0, 1): "answer lost", (0, 3): "vanishes", (1, 0): "answer lost"})
    state, records, _ = play(served, 4)
    assert [r.clients for r in records] == [2, 3, 4, 4]
    memory_sums(served, transport, state)


def test_an_answer_that_comes_twice_counts_once():
    served, _, _ = federation("scaffold", {(0, 1): "twice", (1, 2): "twice"})
    plain, _, _ = federation("scaffold", {})
    (ours, records, _), (theirs, _, _) = play(served, 3), play(plain, 3)
    assert same_public(ours.server.public, theirs.server.public)
    assert records[0].clients == 4
    assert records[0].bytes_up > records[2].bytes_up  # it was sent, so it is counted


@pytest.mark.parametrize("fault", ["lost its disk", "damaged disk"])
@pytest.mark.parametrize("method", ["fedavg", "mapo"])
def test_a_client_that_lost_its_state_gets_the_whole(fault, method):
    served, _, _ = federation(method, {(2, 1): fault})
    plain, _, _ = federation(method, {})
    (ours, records, _), (theirs, _, _) = play(served, 4), play(plain, 4)
    assert [(r.clients, r.drifted) for r in records] == [(4, 0), (4, 0), (4, 1), (4, 0)]
    assert records[2].bytes_catchup > records[1].bytes_catchup
    assert same_public(ours.server.public, theirs.server.public)  # these methods keep nothing of their own


@pytest.mark.parametrize("method", ["scaffold", "pfedpara", "fedlama", "ef+topk+int4"])
def test_a_server_that_dies_in_a_round_goes_on_to_the_same_bits(method):
    served, _, _ = federation(method, {})
    plain, _, _ = federation(method, {})
    state, _, _ = play(served, 2)
    play(served, 1, state)  # all clients answer, and the server dies before it has written it down
    state, _, messages = play(served, 2, state)
    theirs, _, their_messages = play(plain, 4)
    assert same_public(state.server.public, theirs.server.public)
    assert messages == [seen for seen in their_messages if seen[0] > 2]


def test_a_server_that_was_set_back_finds_clients_that_are_ahead():
    served, _, _ = federation("scaffold", {})
    state, _, _ = play(served, 1)
    play(served, 3, state)
    after, records, _ = play(served, 2, state)
    assert [(r.clients, r.drifted) for r in records] == [(4, 4), (4, 0)]
    assert after.round == 3


def test_too_few_answers_are_asked_for_again_and_those_that_came_are_kept():
    away = {(1, i): "answer lost" for i in (1, 2, 3)}
    served, transport, lines = federation("scaffold", away)
    plain, _, _ = federation("scaffold", {})
    (ours, records, _), (theirs, _, _) = play(served, 3), play(plain, 3)
    assert same_public(ours.server.public, theirs.server.public)
    assert {number for asking, number in transport.asked if asking == 2} == {1, 2, 3}
    assert records[1].bytes_catchup > 0
    assert any("1 of 4 clients answered, 2 are needed" in line for line in lines)


def test_no_quorum_stops_the_run_and_harms_nothing():
    gone = {(asking, i): "vanishes" for asking in (1, 2, 3) for i in (0, 1, 2)}
    served, _, _ = federation("scaffold", gone)
    plain, _, _ = federation("scaffold", {})
    state, _, _ = play(served, 1)
    with pytest.raises(WireError, match=r"round 2: 1 of 4 clients .* 2 are needed"):
        served.round(state)
    ours, _, _ = play(served, 2, state)
    theirs, _, _ = play(plain, 3)
    assert same_public(ours.server.public, theirs.server.public)


def test_a_client_answers_another_method_with_an_error_and_stays_where_it_was():
    served, transport, _ = federation("fedavg", {})
    play(served, 1)
    other, _, _ = federation("mapo", {})
    state = other.start()
    from thinwire.protocol.server import open_round

    ask = Ask(open_round(other.contract, state.server, {0: 0})[0])
    before = transport.kept[0]
    answer = transport.answer(0, ask)
    assert "another method or model" in answer.error
    assert transport.kept[0] == before


@pytest.mark.parametrize("given", [{"quorum": 0}, {"quorum": 1.5}, {"seconds": 0}, {"tries": 0}])
def test_patience_is_checked(given):
    with pytest.raises(ConfigError):
        RoundPolicy(**given)


def test_a_late_answer_is_refused_and_the_new_one_counts():
    served, transport, _ = federation("scaffold", {(1, 2): "late"})
    state, records, _ = play(served, 4)
    assert [(r.clients, r.refused, r.absent) for r in records] == [(4, 0, 0), (3, 0, 1), (4, 1, 0), (4, 0, 0)]
    memory_sums(served, transport, state)


def test_a_client_that_was_away_for_long_takes_the_short_way():
    served, _, _ = federation("mapo", {(asking, 2): "away" for asking in range(1, 6)}, rounds=8)
    _, records, _ = play(served, 8)
    assert [r.clients for r in records] == [4, 3, 3, 3, 3, 3, 4, 4]
    assert records[6].bytes_catchup > 0
    assert records[7].bytes_catchup == 0
